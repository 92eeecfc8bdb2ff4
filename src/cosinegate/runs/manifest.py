"""The list of a sweep's or a search's runs, kept in runs_dir/.sweeps for `make pareto SWEEP=...`."""

import hashlib
import json
import os
import re
import shlex
from pathlib import Path

from cosinegate.config.identity import SWEEPS
from cosinegate.runs.lock import locked
from cosinegate.runs.outputs import naming, write_text
from cosinegate.runs.untrusted import read_json
from cosinegate.terminal.errors import UserError

PLAIN = re.compile(r"[\w./-]+", re.ASCII)  # what Hydra's grammar takes without quotes


def manifest_path(name: str, runs_dir: str) -> Path:
    return Path(runs_dir) / SWEEPS / f"{name}.json"


def add_to_manifest(name: str, runs_dir: str, folders: list[Path]) -> None:
    """Adds runs to a sweep's list, and keeps those of earlier commands and of other processes."""
    path = manifest_path(name, runs_dir)
    with naming(path), locked(path.parent, wait=True, quiet=True):
        before = read_manifest(path) if os.path.lexists(path) else []
        runs = list(dict.fromkeys([*before, *_relative(folders, runs_dir)]))
        if runs != before:
            write_text(path, json.dumps({"sweep": name, "runs": runs}, indent=2) + "\n")


def read_manifest(path: Path) -> list[str]:
    """Returns the folders of a sweep's runs, relative to runs_dir."""
    listed = read_json(path)
    runs = listed.get("runs") if isinstance(listed, dict) else None
    if not isinstance(runs, list) or not all(isinstance(run, str) for run in runs):
        raise UserError(f"{path} cannot be read: it lists no runs")
    return runs


def how_to_draw(name: str, runs_dir: str) -> str:
    """Returns the command that draws the sweep's runs."""
    values = {"sweep": name, "runs_dir": runs_dir}
    words = [f"{key}={value if PLAIN.fullmatch(value) else json.dumps(value)}" for key, value in values.items()]
    command = shlex.join(["python", "src/pareto.py", *words])
    return f"to draw them: {command}"


def digest(folders: list[Path], runs_dir: str) -> str:
    """Returns ten hex digits that two commands share if they ask for the same runs."""
    return hashlib.sha256("\n".join(sorted(_relative(folders, runs_dir))).encode()).hexdigest()[:10]


def _relative(folders: list[Path], runs_dir: str) -> list[str]:
    return [os.path.relpath(folder, runs_dir) for folder in folders]
