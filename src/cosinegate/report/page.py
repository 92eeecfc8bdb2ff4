"""Writes the HTML page: template, style, charts' library, data and script in one file."""

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
from cosinegate.config.identity import FIGURES
from cosinegate.report.content import run_content
from cosinegate.runs.outputs import require_own, write_text
from cosinegate.terminal.console import say
from cosinegate.terminal.errors import UserError
from cosinegate.terminal.escape import printable

HERE = Path(__file__).parent
OWN = r"<!doctype html>.*<title>CosineGate report</title>"


def report(config: DictConfig) -> None:
    """Writes the report that the config asks for, and prints its path."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    folders = chosen_folders(config)
    if config.sweep is not None:  # of a sweep on its way, those that have begun
        folders = [folder for folder in folders if (folder / "record.json").exists()]
    if not folders:
        raise UserError("runs: no run to report on")
    default = (folders[0] if len(folders) == 1 else Path(config.runs_dir) / FIGURES) / "report.html"
    path = default if config.path is None else Path(config.path)
    write_report(list(dict.fromkeys(folders)), path, config.limit_batches)
    say(f"report  {path}  ({path.stat().st_size / 2**20:.1f} MB, opens from disk)")


def write_report(folders: list[Path], path: Path, limit_batches: int | None = None) -> None:
    """Writes one self-contained HTML file about the runs in the folders."""
    require_own({path: OWN})
    examples = max(4, min(24, 96 // len(folders)))  # a page of many runs stays small
    runs = [run_content(folder, examples, limit_batches) for folder in track(folders, "reading runs", transient=True)]
    content = {"runs": runs, "frontier": _frontier(folders)}
    data = json.dumps(_plain(content), allow_nan=False).replace("<", "\\u003c")  # nothing in it can end the script
    page = (HERE / "page.html").read_text()
    for mark, name in {"style": "page.css", "library": "echarts.min.js", "script": "page.js"}.items():
        page = page.replace("{{" + mark + "}}", (HERE / name).read_text())
    page = page.replace("{{data}}", data)
    write_text(path, page)


def _frontier(folders: list[Path]) -> list[dict[str, Any]]:
    """Returns the points of the runs that can be compared: those of the family with the most configurations."""
    runs = find_runs(folders, lambda words: say(words.replace("skipped", "left out of the frontier", 1)))
    by_family = families(runs, "counted")
    if not by_family:
        return []
    family = max(by_family, key=lambda name: len(by_family[name]))
    points = []
    for group in pareto.mark(by_family[family], "counted"):
        (counted, _), (accuracy, _) = group.cost("counted"), group.accuracy()
        point = {"label": group.label, "counted": counted, "accuracy": accuracy, "on_frontier": group.on_frontier}
        points.append(point | {"family": pareto.title(family)})
    return points


def _plain(node: Any) -> Any:
    """Returns the content without control characters, and with null for numbers that JSON does not have."""
    if isinstance(node, dict):
        return {printable(key): _plain(child) for key, child in node.items()}
    if isinstance(node, list | tuple):
        return [_plain(child) for child in node]
    if isinstance(node, str):
        return "\n".join(map(printable, node.split("\n")))  # a page obeys marks of direction as a terminal does
    return None if isinstance(node, float) and not math.isfinite(node) else node
