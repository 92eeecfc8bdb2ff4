"""The files of a run: its config, metrics.csv (a row for each epoch) and record.json, from which tables are made."""

import copy
import csv
import functools
import io
import json
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from hydra.core.hydra_config import HydraConfig
from pydantic import Field, ValidationError, model_validator

from cosinegate.runs.files import write_atomically
from cosinegate.runs.record_parts import (
    MOST_EPOCHS,
    Accuracy,
    Amount,
    Compiled,
    Cut,
    Epochs,
    Exits,
    Flops,
    Fraction,
    FractionOrNan,
    Latency,
    Number,
    OrNan,
    Percent,
    PlainName,
    Printable,
    Program,
    Seed,
    Source,
    Span,
    wrong_value,
)
from cosinegate.runs.untrusted import first_line, read_json, read_text
from cosinegate.terminal.errors import UserError

FORMAT = 1
AWAY = "move its folder away to train the run again"
PACKAGES = ("torch", "torchvision", "lightning", "torchmetrics", "hydra-core", "omegaconf", "numpy", "wandb")
PACKAGES += ("onnx", "onnxruntime", "safetensors")
LARGEST_METRICS = 64 * 2**20  # bytes

Row = dict[str, float]


class Record(Program):
    """The content of record.json. An earlier version, and a run that is not finished, has fewer keys."""

    format: int = FORMAT
    status: Literal["running", "finished", "stopped", "failed"]
    error: str | None = None
    experiment: Printable | None = None
    identity: PlainName | None = None
    data: PlainName | None = None
    seed: Seed | None = None
    gate: PlainName | None = None
    signal: str | None = None
    polarity: str | None = None
    tau_target: Fraction | None = None
    lambda_flops: float | None = None
    selected_on: PlainName | None = None
    network: PlainName | None = None
    sweep: str | None = None
    trunk: Source | None = None
    weights: Source | None = None
    epochs: Epochs
    accuracy: Accuracy = Accuracy()
    mean_gate: FractionOrNan | None = None
    skip_percent: Percent | None = None
    routed_percent: Percent | None = None
    blocks_open: list[Fraction] | None = None
    dynamic_blocks: Number | None = None
    paths: Number | None = None
    flops: Flops = Flops()
    compiled: Compiled | None = None
    exits: Exits | None = None
    latency_ms: Amount | None = None
    latency: Latency | None = None
    parameters: Annotated[int, Field(ge=0)] | None = None
    gate_parameters: Annotated[int, Field(ge=0)] | None = None
    images_per_second: Annotated[Amount, OrNan] | None = None
    seconds: Amount | None = None
    peak_memory_mib: float | None = None
    started: str | None = None
    first_step_at: float | None = None
    updated: str | None = None
    ended_early: Printable | None = None
    cut: Cut | None = None
    trained_by: list[Span] | None = None
    command: str | None = None
    overrides: list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty_parts(cls, content: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in content.items() if value is not None or key not in ("accuracy", "flops")}


def read_record(folder: Path) -> Record | None:
    """Returns the record of a run, or None where there is none."""
    path = folder / "record.json"
    try:
        content = read_json(path)
    except FileNotFoundError:
        return None
    except UserError as error:
        if isinstance(error.__cause__, NotADirectoryError):
            raise UserError(f"{folder}: cannot be a run's folder, for a part of that path is a file") from error
        raise UserError(f"{error}; {AWAY}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path} is not a run record of format {FORMAT}; {AWAY}")
    try:
        record = Record.model_validate(content)
    except ValidationError as error:
        wrong = {detail["loc"] for detail in error.errors() if not detail["type"].endswith("_than_equal")}
        if wrong & {("status",), ("epochs",), ("epochs", "done")}:
            raise UserError(f"{path} lacks a run's status or epochs; {AWAY}") from error
        raise UserError(f"{path}: {wrong_value(error, content)}; {AWAY}") from error
    if record.epochs.done is None and record.exits is None:
        raise UserError(f"{path} lacks a run's status or epochs; {AWAY}")
    return record


def require(record: Record, path: Path, *keys: str) -> None:
    """Raises UserError if one of the keys has no value."""
    for key in keys:
        value = attrgetter(key)(record)
        if value is None or value != value:
            raise UserError(f"{path}: {key} = {value}")


def write_record(folder: Path, record: Record) -> None:
    """Writes record.json, whole or not at all."""
    content = {"format": FORMAT} | record.as_dict()
    write_atomically(folder / "record.json", json.dumps(content, indent=2, allow_nan=True) + "\n")


def read_metrics(folder: Path) -> dict[int, Row]:
    """Returns the rows of metrics.csv by epoch, from 1; a row lacks the values that are empty."""
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
            if epoch in read or not 1 <= epoch <= MOST_EPOCHS:
                raise ValueError(f"line {number} is of epoch {epoch}: epochs count from 1, each once")
            read[epoch] = {name: float(value) for name, value in row.items() if value != ""}
    except (KeyError, ValueError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from error
    return read


def write_metrics(folder: Path, rows: dict[int, Row]) -> None:
    """Writes metrics.csv, whole or not at all."""
    names = sorted({name for row in rows.values() for name in row})
    text = io.StringIO()
    table = csv.DictWriter(text, ["epoch", *names], lineterminator="\n")
    table.writeheader()
    for epoch in sorted(rows):
        table.writerow({"epoch": epoch} | {name: repr(float(value)) for name, value in rows[epoch].items()})
    write_atomically(folder / "metrics.csv", text.getvalue())


def accuracies(rows: dict[int, Row]) -> dict[str, Any]:
    """Returns last and best validation accuracy, the best's epoch (the first, if several) and its gates."""
    validated = {epoch: row for epoch, row in rows.items() if "val/acc" in row}
    if not validated:
        return {}
    best = max(validated, key=lambda epoch: (validated[epoch]["val/acc"], -epoch))
    figures = {
        "last": validated[max(validated)]["val/acc"],
        "last_epoch": max(validated),
        "best": validated[best]["val/acc"],
        "best_epoch": best,
        "best_skip_percent": validated[best].get("gates/skip_percent"),
    }
    if 100 in validated:
        figures["epoch_100"] = validated[100]["val/acc"]
        figures["epoch_100_skip_percent"] = validated[100].get("gates/skip_percent")
    return figures


def now() -> str:
    """Returns the time as the record has it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def ended_early(record: Record) -> str | None:
    """Returns what ended a finished run before its schedule did, in words."""
    done, planned, by = record.epochs.done, record.epochs.planned, record.ended_early
    if record.status != "finished" or (by is None and done == (planned or done)):
        return None
    return f"{done} of {planned} epochs, ended by {by or 'what its record does not name'}"


def provenance() -> dict[str, Any]:
    """Returns package versions, commit, command line and, for a job of a sweep, its own overrides."""
    overrides = list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else None
    return copy.deepcopy(_program()) | {"command": " ".join(sys.argv), "overrides": overrides}


@functools.cache
def _program() -> dict[str, Any]:
    """The program that this process runs, whatever is installed or committed while it does."""
    folder = Path(__file__).parent
    commit, changed = (
        subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
        for words in (["rev-parse", "--verify", "HEAD"], ["status", "--porcelain"])
    )
    return {
        "versions": {"python": sys.version.split()[0]} | {package: version(package) for package in PACKAGES},
        "git_commit": commit.stdout.strip() or None,
        "git_changed": bool(changed.stdout.strip()) if commit.returncode == 0 else None,
    }
