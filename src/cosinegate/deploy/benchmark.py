"""Times the deployed forms of a run against the dense network, in turns in one process, each in its fastest way."""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cosinegate.config.choices import Checkpoint, Dynamic
from cosinegate.config.commands import BenchmarkConfig
from cosinegate.config.identity import reference
from cosinegate.data import image_set
from cosinegate.deploy.benchmark_table import MARK, as_markdown, draw
from cosinegate.deploy.engines import DENSE, Engines, Model
from cosinegate.deploy.exits import EarlyExitNetwork
from cosinegate.deploy.export import move_budget
from cosinegate.deploy.forward import forward
from cosinegate.deploy.int8 import CALIBRATION_IMAGES
from cosinegate.deploy.onnx_forms import require_exportable, run_onnx, session
from cosinegate.deploy.source import Source, is_the_records, load_source, require_something_to_deploy
from cosinegate.deploy.timing import MANY, Row, round_times, table_rows
from cosinegate.networks.flops import block_flops, dense_flops
from cosinegate.networks.name import network_name
from cosinegate.runs.files import require_writable
from cosinegate.runs.lock import is_locked, locked
from cosinegate.runs.outputs import naming, require_own, write_text
from cosinegate.runs.record import now, provenance, read_record, write_record
from cosinegate.terminal import console
from cosinegate.terminal.errors import UserError
from cosinegate.training.load import chosen_path, load_checkpoint, run_folder_of

OWN_JSON, OWN_TABLE = r'\{\s*"run": .*"rows": \[', r"# [^\n]* on \w+, \d+ thread\(s\)\n\nTest accuracy "
LATENCY_BATCH = 1  # what `latency_ms` of the record is measured at


def benchmark(options: BenchmarkConfig) -> dict[str, Any]:
    """Writes benchmark.json, .md and .png, and the latency into the run's record; returns the results."""
    torch.set_num_threads(options.threads)
    source = load_source(options.run, options.checkpoint, options.root, options.data_folder)
    require_something_to_deploy(source)
    folder = Path(options.output) if options.output is not None else source.folder / "benchmark"
    path, table, figure = (folder / f"benchmark.{kind}" for kind in ("json", "md", "png"))
    require_own({path: OWN_JSON, table: OWN_TABLE}, {figure: MARK})
    held_out = source.held_out()
    move_budget(source, options.budget)
    network, _ = source.compile(options.dynamic, options.tolerance)
    require_exportable(network, source.path)
    images, labels = source.data.whole_images("test", options.images)
    if len(images) < max(options.batches):
        raise UserError(f"batches = {list(options.batches)}: there are {len(images)} test images")
    others = _beside(source, options)
    require_writable(folder)
    console.say(f"counting FLOPs and accuracy on {len(images)} test images")
    scores, route, flops = forward(network, images)
    counted, executed = route.float().mean().item(), flops / source.reference_flops
    name = "exits" if isinstance(network, EarlyExitNetwork) else "routed" if network.has_gates else "compiled"
    own = Model(network, counted, executed, _record_folder(source, options), is_own=True)
    models = {DENSE: Model(source.dense(), 1.0, 1.0, None), name: own} | others
    with tempfile.TemporaryDirectory() as scratch, naming(Path(scratch)):
        engines = Engines(
            models,
            images=images[:CALIBRATION_IMAGES],
            held_out=held_out,
            scratch=Path(scratch),
            threads=options.threads,
            torch_compile=options.torch_compile,
        )
        int8 = _int8(name, own, source, route, Path(scratch), images, labels)
        rows, kernels = _measure(engines, models, int8, images, options)
    results = {
        "run": str(source.folder),
        "data": source.data.image_set.name,
        "threads": options.threads,
        "dense": network_name(reference(source.config.network)),
        "budget": options.budget,
        "dynamic": options.dynamic.name,
        "tolerance": options.tolerance,
        "model": name,
        "blocks": [sum(block.residual is not None for block in network.blocks), len(network.blocks)],
        "accuracy": _accuracy(scores, labels),
        "counted": counted,
        "executed": executed,
        "int8": int8,
        "rows": [asdict(row) for row in rows],
        "kernels": kernels,
        "provenance": provenance(),
    }
    write_text(path, json.dumps(results, indent=2) + "\n")
    write_text(table, as_markdown(results))
    draw(results, figure)
    _into_records(models, rows, options.threads)
    return results | {"folder": str(folder)}


def _measure(
    engines: Engines, models: dict[str, Model], int8: dict[str, float], images: Tensor, options: BenchmarkConfig
) -> tuple[list[Row], dict[str, Any]]:
    """Returns the rows of every batch size, and where the time goes at some of them."""
    rows = []
    for batch in sorted(set(options.batches)):
        console.say(f"timing batch {batch}: {options.rounds} rounds of every model in turn")
        times = round_times(engines.at(batch), batch, images, options.rounds)
        rows += table_rows(times, models, int8, batch)
    console.say("profiling both engines")
    return rows, {str(batch): engines.kernels(batch, images) for batch in _profiled(rows)}


def _record_folder(source: Source, options: BenchmarkConfig) -> Path | None:
    """Returns the run whose record gets the latency, or None if the record is about another network."""
    is_exact = options.budget is None and options.dynamic is Dynamic.keep and options.tolerance == 0
    return source.folder if is_exact and is_the_records(source.path) else None


def _accuracy(scores: Tensor, labels: Tensor) -> float:
    return (scores.argmax(1) == labels).float().mean().item()


def _int8(
    name: str, model: Model, source: Source, route: Tensor, folder: Path, images: Tensor, labels: Tensor
) -> dict[str, float]:
    """Returns accuracy and FLOPs of the network with int8 convolutions: rounding moves some images over a threshold."""
    scores, taken = run_onnx(session(folder / f"{name}-int8.onnx", 1), images.contiguous().numpy(), MANY)
    accuracy = {"accuracy": _accuracy(torch.from_numpy(np.asarray(scores)), labels)}
    if taken is None:
        return accuracy | {"counted": model.counted, "executed": model.executed}
    taken = torch.from_numpy(np.asarray(taken)).float()
    inner = model.network.network if isinstance(model.network, EarlyExitNetwork) else model.network
    moved = (taken.mean(0) - route.float().mean(0)) * block_flops(inner, source.data.image_set.shape)
    executed = model.executed + moved.sum().item() / source.reference_flops
    return accuracy | {"counted": taken.mean().item(), "executed": executed}


def _profiled(rows: list[Row]) -> list[int]:
    """Returns the batch sizes to profile: the smallest, the largest, and those at which a bar is missed."""
    batches = [row.batch for row in rows]
    return sorted({min(batches), max(batches), *(row.batch for row in rows if row.met is False)})


def _beside(source: Source, options: BenchmarkConfig) -> dict[str, Model]:
    """Returns the other dense runs by name; a name that is taken gets a number."""
    models: dict[str, Model] = {}
    for run in options.against:
        name, model = _dense_run(run, options.checkpoint, source)
        models[name if name not in models else f"{name} ({len(models) + 1})"] = model
    return models


def _dense_run(run: str, checkpoint: Checkpoint | None, beside: Source) -> tuple[str, Model]:
    """Returns a dense run on the same data, with its FLOPs over the reference network's."""
    path = chosen_path(run, checkpoint)
    module, config = load_checkpoint(path)
    if module.network.has_gates:
        raise UserError(f"against = {run}: has gates; give runs of dense networks")
    theirs, ours = image_set(config.data).name, beside.data.image_set.name
    if theirs != ours:
        raise UserError(f"against = {run}: is on {theirs}, not on {ours}")
    executed = dense_flops(module.network, beside.data.image_set.shape) / beside.reference_flops
    name = f"{config.name} {network_name(config.network)} s{config.seed}"
    own = run_folder_of(path) if is_the_records(path) else None
    return name, Model(module.network, executed, executed, own)


def _into_records(models: dict[str, Model], rows: list[Row], threads: int) -> None:
    """Writes `latency_ms`, the fastest form at batch 1, into the records of the runs.

    `time_ratio`, to the dense network on the same engine, can be compared between benchmarks; milliseconds cannot.
    """
    for name, model in models.items():
        measured = [row for row in rows if row.batch == LATENCY_BATCH and row.model == name]
        measured = [row for row in measured if "int8" not in row.engine]  # its accuracy is not the record's
        if model.folder is None or not (model.folder / "record.json").exists() or not measured:
            continue
        if is_locked(model.folder):
            console.say(f"a process is at work in {model.folder}: its record gets no latency")
            continue
        best = min(measured, key=lambda row: row.ms_per_image)
        how = {"batch": best.batch, "engine": best.engine, "threads": threads, "time_ratio": best.time_ratio}
        latency = {"latency_ms": best.ms_per_image, "latency": how | {"measured": now()}}
        with locked(model.folder, wait=False), naming(model.folder / "record.json"):
            write_record(model.folder, read_record(model.folder).replace(**latency))
