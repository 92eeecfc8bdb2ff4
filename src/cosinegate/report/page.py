"""Puts the page together: template, style, charts' library, data and script in one file."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.progress import track

from cosinegate.analysis import pareto
from cosinegate.analysis.runs import families, find_runs
from cosinegate.analysis.tables import chosen_folders
from cosinegate.console import say
from cosinegate.errors import UserError
from cosinegate.files import write_atomically
from cosinegate.report.content import run_content

HERE = Path(__file__).parent


def report(config: DictConfig) -> None:
    """Writes the report that the config asks for, and says where."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.runs is None and config.sweep is None:
        raise UserError("runs has no value: give a run's folder, as in runs=[runs/mnist/<run>], or sweep=quick")
    folders = chosen_folders(config)
    if config.sweep is not None:  # of a sweep on its way, those that have begun
        folders = [folder for folder in folders if (folder / "record.json").exists()]
    if not folders:
        raise UserError("runs: no run to report on")
    default = folders[0] / "report.html" if len(folders) == 1 else Path("results/report.html")
    path = default if config.path is None else Path(config.path)
    try:
        write_report(list(dict.fromkeys(folders)), path, config.limit_batches)
    except OSError as error:
        raise UserError(f"path = {path}: cannot be written: {error.strerror}") from error
    say(f"report  {path}  ({path.stat().st_size / 2**20:.1f} MB, opens from disk)")


def write_report(folders: list[Path], path: Path, limit_batches: int | None = None) -> None:
    """One self-contained HTML file about the runs in the folders."""
    examples = max(4, min(24, 96 // len(folders)))  # a page of many runs stays small
    runs = [run_content(folder, examples, limit_batches) for folder in track(folders, "reading runs", transient=True)]
    content = {"runs": runs, "frontier": _frontier(folders)}
    data = json.dumps(_finite(content), allow_nan=False).replace("<", "\\u003c")  # nothing in it can end the script
    page = (HERE / "page.html").read_text()
    for mark, name in {"style": "page.css", "library": "echarts.min.js", "script": "page.js"}.items():
        page = page.replace("{{" + mark + "}}", (HERE / name).read_text())
    page = page.replace("{{data}}", data)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page)


def _frontier(folders: list[Path]) -> list[dict[str, Any]]:
    """The runs that can be compared, as points: of several families the one with the most configurations."""
    runs = find_runs(folders, lambda words: say(words.replace("skipped", "left out of the frontier", 1)))
    found = families(runs, "counted")
    if not found:
        return []
    family = max(found, key=lambda one: len(found[one]))
    points = []
    for one in pareto.mark(found[family], "counted"):
        (counted, _), (accuracy, _) = one.cost("counted"), one.accuracy()
        point = {"label": one.label, "counted": counted, "accuracy": accuracy, "on_frontier": one.on_frontier}
        points.append(point | {"family": pareto.title(family)})
    return points


def _finite(node: Any) -> Any:
    """JSON has no word for what is not a number."""
    if isinstance(node, dict):
        return {key: _finite(child) for key, child in node.items()}
    if isinstance(node, list | tuple):
        return [_finite(child) for child in node]
    return None if isinstance(node, float) and not math.isfinite(node) else node
