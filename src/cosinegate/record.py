"""A run's folder: the config, metrics.csv (a row an epoch) and record.json, which holds what a table needs."""

import csv
import io
import json
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from cosinegate.config import is_number
from cosinegate.errors import UserError
from cosinegate.files import write_atomically
from cosinegate.foreign import first_line, read_json, read_text
from cosinegate.schema import is_plain_name

FORMAT = 1
AWAY = "move its folder away to train the run again"
STATES = ("running", "finished", "stopped", "failed")
PACKAGES = ("torch", "torchvision", "lightning", "torchmetrics", "hydra-core", "omegaconf", "numpy", "wandb")
PACKAGES += ("onnx", "onnxruntime", "safetensors")
LARGEST_METRICS = 64 * 2**20  # bytes

Row = dict[str, float]


# what a record's numbers can be, by their keys
NUMBERS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("accuracy.test", "accuracy.last", "accuracy.best", "mean_gate", "tau_target"), (0, 1)),
    **dict.fromkeys(("epochs.done", "weights.epochs", "accuracy.last_epoch", "accuracy.best_epoch"), (0, 10**9)),
    **dict.fromkeys(("flops.counted", "flops.executed", "flops.compiled", "dynamic_blocks"), (0, 10**6)),
    **dict.fromkeys(("compiled.executed", "compiled.blocks", "compiled.dynamic_blocks"), (0, 10**6)),
    **dict.fromkeys(("compiled.same_class", "compiled.images"), (0, 10**9)),
    **dict.fromkeys(("latency_ms", "images_per_second", "seconds", "paths"), (0, 1e12)),
    **dict.fromkeys(("epochs.planned", "trunk.epochs"), (1, 10**9)),
    "flops.dense_per_image": (0, 1e18),
    "latency.time_ratio": (0, 1e6),
    "seed": (0, 2**32 - 1),
    "skip_percent": (-1, 101),  # with room for rounding
}
NAMES = ("identity", "data", "gate", "selected_on", "network")  # some of them name files
PARTS = ("epochs", "accuracy", "flops", "versions", "cut", "compiled")
KINDS = {**dict.fromkeys(NUMBERS, (int, float)), **dict.fromkeys(NAMES, str), **dict.fromkeys(PARTS, dict)}


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a run, or None where there is none."""
    path = folder / "record.json"
    try:
        record = read_json(path)
    except FileNotFoundError:
        return None
    except UserError as error:
        if isinstance(error.__cause__, NotADirectoryError):
            raise UserError(f"{folder}: cannot be a run's folder, for a part of that path is a file") from error
        raise UserError(f"{error}; {AWAY}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UserError(f"{path} is not a run record of format {FORMAT}; {AWAY}")
    if record.get("status") not in STATES or not isinstance(found(record, "epochs.done"), int):
        raise UserError(f"{path} lacks a run's status or epochs; {AWAY}")
    for key, kind in KINDS.items():
        value = found(record, key)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise UserError(f"{path}: {key} = {str(value)[:80]}; {AWAY}")
    return record


def require(record: dict[str, Any], path: Path, *keys: str) -> None:
    """Ends with one line where one of the keys has no value, or one that no run can have."""
    for key in keys:
        value = found(record, key)
        if key in NUMBERS:
            low, high = NUMBERS[key]
            good = value is not None and low <= value <= high
        elif key == "blocks_open":
            good = isinstance(value, list) and all(is_number(share) and 0 <= share <= 1 for share in value)
        else:
            good = isinstance(value, str) and (is_plain_name(value) if key in NAMES else value.isprintable())
        if not good:
            raise UserError(f"{path}: {key} = {str(value)[:80]}")


def check_values(record: dict[str, Any], path: Path) -> None:
    """Ends with one line where a record that a run goes on from holds what no run can have."""
    require(record, path, *(key for key in NUMBERS if found(record, key) is not None))
    first_step_at, trained_by = record.get("first_step_at"), record.get("trained_by", [])
    if not isinstance(record.get("started", ""), str) or not (first_step_at is None or is_number(first_step_at)):
        raise UserError(f"{path}: started = {record.get('started')}, first_step_at = {first_step_at}; {AWAY}")
    spans = trained_by if isinstance(trained_by, list) else [None]
    if not all(isinstance(span, dict) and _is_span(span.get("epochs")) for span in spans):
        raise UserError(f"{path}: trained_by = {str(trained_by)[:80]}; {AWAY}")


def _is_span(epochs: Any) -> bool:
    return isinstance(epochs, list) and len(epochs) == 2 and all(type(epoch) is int and epoch >= 1 for epoch in epochs)


def found(record: dict[str, Any], key: str) -> Any:
    """The value of a dotted key, or None."""
    for part in key.split("."):
        record = record.get(part) if isinstance(record, dict) else None
    return record


def write_record(folder: Path, record: dict[str, Any]) -> None:
    write_atomically(folder / "record.json", json.dumps({"format": FORMAT} | record, indent=2, allow_nan=True) + "\n")


def read_metrics(folder: Path) -> dict[int, Row]:
    """metrics.csv as a row an epoch, by its number from 1; what a row does not have is left out."""
    path = folder / "metrics.csv"
    try:
        text = read_text(path, LARGEST_METRICS)
    except FileNotFoundError:
        return {}
    try:
        names, *lines = list(csv.reader(io.StringIO(text))) or [["epoch"]]
        read: dict[int, Row] = {}
        for number, line in enumerate(lines, 2):
            if len(line) != len(names):
                raise ValueError(f"line {number} has {len(line)} values for {len(names)} columns")
            row = dict(zip(names, line, strict=True))
            epoch = int(row.pop("epoch"))
            if epoch in read or not 1 <= epoch <= NUMBERS["epochs.done"][1]:
                raise ValueError(f"line {number} is of epoch {epoch}: epochs count from 1, each once")
            read[epoch] = {name: float(value) for name, value in row.items() if value != ""}
    except (KeyError, ValueError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from error
    return read


def write_metrics(folder: Path, rows: dict[int, Row]) -> None:
    names = sorted({name for row in rows.values() for name in row})
    text = io.StringIO()
    table = csv.DictWriter(text, ["epoch", *names], lineterminator="\n")
    table.writeheader()
    for epoch in sorted(rows):
        table.writerow({"epoch": epoch} | {name: repr(float(value)) for name, value in rows[epoch].items()})
    write_atomically(folder / "metrics.csv", text.getvalue())


def accuracies(rows: dict[int, Row]) -> dict[str, Any]:
    """Last and best validation accuracy, the epoch of the best (the first, if several), and the gates it had."""
    validated = {epoch: row for epoch, row in rows.items() if "val/acc" in row}
    if not validated:
        return {}
    best = max(validated, key=lambda epoch: (validated[epoch]["val/acc"], -epoch))
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


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def ended_early(record: dict[str, Any]) -> str | None:
    """What ended a finished run before its schedule did, in words."""
    done, planned = record["epochs"]["done"], found(record, "epochs.planned")
    by = record.get("ended_early")
    if record["status"] != "finished" or (by is None and done == (planned or done)):
        return None
    return f"{done} of {planned} epochs, ended by {by or 'what its record does not name'}"


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
