"""A run's folder: the config, metrics.csv (a row an epoch) and record.json, which holds what a table needs."""

import csv
import io
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from cosinegate.errors import UserError
from cosinegate.files import write_atomically

FORMAT = 1
AWAY = "move its folder away to train the run again"
STATES = ("running", "finished", "failed")
PACKAGES = ("torch", "torchvision", "lightning", "torchmetrics", "hydra-core", "omegaconf", "numpy", "wandb")
PACKAGES += ("onnx", "onnxruntime", "safetensors")

Row = dict[str, float]


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a run, or None where there is none."""
    path = folder / "record.json"
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}; {AWAY}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UserError(f"{path} is not a run record of format {FORMAT}; {AWAY}")
    epochs = record.get("epochs")
    whole = record.get("status") in STATES and isinstance(epochs, dict) and isinstance(epochs.get("done"), int)
    if not whole:
        raise UserError(f"{path} lacks a run's status or epochs; {AWAY}")
    return record


def write_record(folder: Path, record: dict[str, Any]) -> None:
    write_atomically(folder / "record.json", json.dumps({"format": FORMAT} | record, indent=2, allow_nan=True) + "\n")


def read_metrics(folder: Path) -> dict[int, Row]:
    """metrics.csv as a row an epoch, by its number from 1; what a row does not have is left out."""
    path = folder / "metrics.csv"
    if not path.exists():
        return {}
    try:
        rows = list(csv.DictReader(io.StringIO(path.read_text())))
        return {int(row["epoch"]): {k: float(v) for k, v in row.items() if k != "epoch" and v != ""} for row in rows}
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def write_metrics(folder: Path, rows: dict[int, Row]) -> None:
    names = sorted({name for row in rows.values() for name in row})
    text = io.StringIO()
    table = csv.DictWriter(text, ["epoch", *names], lineterminator="\n")
    table.writeheader()
    for epoch in sorted(rows):
        table.writerow({"epoch": epoch} | {name: repr(float(value)) for name, value in rows[epoch].items()})
    write_atomically(folder / "metrics.csv", text.getvalue())


def accuracies(rows: dict[int, Row], at_budget: bool = False) -> dict[str, Any]:
    """Last and best validation accuracy, the epoch of the best (the first, if several), and the gates it had.

    With `at_budget` the epochs before prog(t) = 1 are no candidates, unless there is no other.
    """
    validated = {epoch: row for epoch, row in rows.items() if "val/acc" in row}
    if not validated:
        return {}
    candidates = [epoch for epoch, row in validated.items() if not at_budget or row.get("schedule/prog", 1.0) >= 1]
    best = max(candidates or validated, key=lambda epoch: (validated[epoch]["val/acc"], -epoch))
    found = {
        "last": validated[max(validated)]["val/acc"],
        "last_epoch": max(validated),
        "best": validated[best]["val/acc"],
        "best_epoch": best,
        "best_skip_percent": validated[best].get("gates/skip_percent"),
    }
    if 100 in validated:
        found["epoch_100"] = validated[100]["val/acc"]
        found["epoch_100_skip_percent"] = validated[100].get("gates/skip_percent")
    return found


def provenance() -> dict[str, Any]:
    """What made the run: package versions, the commit, the command line, and of a sweep's job its own overrides."""
    commit = subprocess.run(
        ["git", "rev-parse", "--verify", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "versions": {"python": sys.version.split()[0]} | {package: version(package) for package in PACKAGES},
        "git_commit": commit.stdout.strip() or None,
        "git_changed": bool(changed.stdout.strip()) if commit.returncode == 0 else None,
        "command": " ".join(sys.argv),
        "overrides": list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else None,
    }
