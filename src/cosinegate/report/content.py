"""The content of the HTML page, as plain values."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cosinegate.callbacks.routes import Routes
from cosinegate.config.choices import Checkpoint
from cosinegate.config.ranges import is_number
from cosinegate.deploy.exits.frontier import read_frontier
from cosinegate.deploy.source import is_written_network
from cosinegate.evaluate import find_routes, load_module
from cosinegate.plots.curves import phases
from cosinegate.runs.record import Row, read_metrics, read_record
from cosinegate.runs.untrusted import parse_yaml, read_text, value_at
from cosinegate.terminal.console import say
from cosinegate.terminal.errors import UserError

BINS = 40  # of CIR
CURVES = ("train/acc", "val/acc", "gates/mean", "gates/relaxed_mean", "flops/executed", "schedule/prog")
NEEDED = ("experiment", "data", "gate", "selected_on", "versions", "flops", "accuracy", "command")


def run_content(folder: Path, examples: int, limit_batches: int | None = None) -> dict[str, Any]:
    """Returns a run's card and curves and, from its checkpoint, the gates' decisions for every test image."""
    record = read_record(folder)
    if record is None:
        raise UserError(f"runs = {folder}: has no record.json; give a run's folder")
    missing = [key for key in NEEDED if key not in record.model_fields_set or getattr(record, key) is None]
    if missing:
        raise UserError(f"{folder / 'record.json'} has no {', '.join(missing)}")
    rows = read_metrics(folder)
    try:
        text = read_text(folder / "config.yaml")
    except FileNotFoundError:
        text = ""
    warmup = value_at(parse_yaml(text, folder / "config.yaml") or {}, "objective.warmup_epochs")
    gated = record.gate != "none"
    has_target = record.lambda_flops != 0 and record.exits is None  # without a penalty prog(t) moves nothing
    curves = [name for name in CURVES if has_target or name != "schedule/prog"]
    frontier = read_frontier(folder) if record.exits is not None else None
    content = {
        "name": f"{record.experiment} {folder.name}" + (" dense" if record.gate == "none" else ""),
        "folder": folder.as_posix(),
        "record": record.as_dict(),
        "config": text,
        "epochs": sorted(rows),
        "curves": {name: _curve(rows, name) for name in curves if any(name in row for row in rows.values())},
        "skipped": [None if mean is None else 1 - mean for mean in _curve(rows, "gates/mean")],
        "blocks": _blocks(rows),
        "has_target": has_target,
        "tau_target": record.tau_target if has_target else None,
        "gated": gated,
        "exits": None if frontier is None else frontier.model_dump(),
        "phases": phases(rows, warmup if is_number(warmup) else 0) if gated and has_target else [],
    }
    if not gated:
        return content | {"routes": None}
    if not (folder / "checkpoints" / "last.ckpt").is_file() and not is_written_network(folder):
        say(f"{folder} has no checkpoint: its routes are left out")
        return content | {"routes": None}
    which = "best" if record.selected_on == "holdout" and record.status == "finished" else "last"
    _, module, trained, _ = load_module(str(folder), Checkpoint[which])
    trained.trainer.enable_progress_bar = False  # the page shows one bar over all runs
    routes, data = find_routes(module, trained, limit_batches)
    pixels = data.splits["test"][0].numpy()
    return content | {"routes": routes_content(routes, pixels, data.image_set.classes, examples)}


def routes_content(routes: Routes, pixels: np.ndarray, classes: tuple[str, ...], examples: int) -> dict[str, Any]:
    """Returns statistics of the routes, and `examples` images with the fewest and as many with the most blocks."""
    fewest, most = routes.extremes(min(examples, len(routes.index) // 2))
    content: dict[str, Any] = {
        "images": len(routes.index),
        "classes": list(classes),
        "class_x_block": routes.by_class(len(classes)).tolist(),
        "by_computed": routes.accuracy_by_computed(),
        "paths": routes.paths(most=12),
        "number_of_paths": len(np.unique(routes.open, axis=0)),
        "examples": [_example(routes, row, pixels, classes) for row in (*fewest, *most)],
        "fewest": len(fewest),
        "cir": None,
    }
    if routes.gated:
        blocks, known = routes.gated, routes.cir[:, routes.gated]
        low, high = np.floor(min(0.0, np.nanmin(known)) * 5) / 5, np.ceil(max(1.0, np.nanmax(known)) * 5) / 5
        edges = np.linspace(low, high, BINS + 1)
        content["cir"] = {
            "blocks": blocks,
            "edges": edges.tolist(),
            "counts": [np.histogram(routes.cir[:, b], edges)[0].tolist() for b in blocks],
            "open_rate": [routes.open_rate_by_cir(b, edges).tolist() for b in blocks],
            "threshold": routes.threshold[blocks].tolist(),
            "open": routes.open.mean(0)[blocks].tolist(),
        }
    return content


def _example(routes: Routes, row: int, pixels: np.ndarray, classes: tuple[str, ...]) -> dict[str, Any]:
    picture = pixels[routes.index[row]]
    file = io.BytesIO()
    Image.fromarray(picture.squeeze(-1) if picture.shape[2] == 1 else picture).save(file, "PNG")
    return {
        "src": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}",
        "index": int(routes.index[row]),
        "label": classes[routes.label[row]],
        "predicted": classes[routes.predicted[row]],
        "open": routes.open[row].astype(int).tolist(),
        "cir": None if routes.cir is None else routes.cir[row].round(3).tolist(),
    }


def _curve(rows: dict[int, Row], name: str) -> list[float | None]:
    return [round(rows[epoch][name], 5) if name in rows[epoch] else None for epoch in sorted(rows)]


def _blocks(rows: dict[int, Row]) -> list[list[float | None]]:
    names = sorted({name for row in rows.values() for name in row if name.startswith("gates/block_")})
    return [_curve(rows, name) for name in names]
