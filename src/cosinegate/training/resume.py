"""Where a run goes on from. Its record, config, metrics and checkpoints are held against each other first.

A kill leaves each file as it was before or after a write, and an epoch is written in this order: metrics.csv,
record.json, best.ckpt, last.ckpt. So metrics and record may be ahead of a checkpoint, and never behind it.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from cosinegate.callbacks.checkpoints import BEST, LAST, PREVIOUS
from cosinegate.lit import LitCosineGate
from cosinegate.runs.checkpoint import load_weights, read_checkpoint
from cosinegate.runs.checksum import is_intact
from cosinegate.runs.folder import differences, run_stamp, stored_config
from cosinegate.runs.record import Record, Row, accuracies
from cosinegate.runs.untrusted import value_at
from cosinegate.terminal.errors import UserError

AWAY = "move the run's folder away to train again"
AHEAD = 2  # epochs that metrics.csv may have more than a checkpoint: last.ckpt is lost, or not written yet


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint or none, the epochs that it was trained for, and whether it lies inside the next epoch."""

    path: Path | None = None
    epochs: int = 0
    inside: bool = False
    last_is_damaged: bool = False

    def __str__(self) -> str:
        return f"{self.path} ends with epoch {self.epochs}" if self.path else "there is no checkpoint"


def find_resume_point(
    folder: Path, config: DictConfig, record: Record | None, rows: dict[int, Row], module: LitCosineGate
) -> ResumePoint:
    """Returns the last intact checkpoint. Raises UserError, and changes nothing, if a file is of another run."""
    _check_config(folder, config)
    for name in ("checkpoints", "figures"):
        if os.path.lexists(folder / name) and not (folder / name).is_dir():
            raise UserError(f"{folder / name}: must be a folder; move it away")
    places = {name: folder / "checkpoints" / name for name in (LAST, PREVIOUS, BEST)}
    for path in places.values():
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: must be a file; move it away")
    whole = {path: _progress_of(path, config, module) for path in places.values() if path.exists() and is_intact(path)}
    chosen = next((path for path in (places[LAST], places[PREVIOUS]) if path in whole), None)
    last_is_damaged = places[LAST].exists() and places[LAST] not in whole
    if last_is_damaged and chosen is None:
        raise UserError(f"{places[LAST]} is damaged and there is no earlier one; {AWAY}")
    point = ResumePoint() if chosen is None else ResumePoint(chosen, *whole[chosen], last_is_damaged)
    _check_epochs(folder, point, rows, record, config.trainer.max_epochs)
    if places[BEST] in whole:
        _check_best(places[BEST], whole[places[BEST]][0], point, rows)
    return point


def best_checkpoint(folder: Path, rows: dict[int, Row], module: LitCosineGate) -> Path | None:
    """Returns the checkpoint to test where the epoch is chosen on held-out images."""
    best, epoch = folder / "checkpoints" / BEST, _best_epoch(rows)
    if epoch is None:
        return None
    if not best.exists() or not is_intact(best):
        what = f"is {'damaged' if best.exists() else 'gone'}, and epoch {epoch} is the one to test"
        raise UserError(f"{best} {what}; {AWAY}")
    stored = read_checkpoint(best)
    epochs, _ = _progress(stored, best)
    if epochs != epoch:
        raise UserError(f"{best} is of epoch {epochs}, and epoch {epoch} is the one to test; {AWAY}")
    load_weights(module, stored, best)
    return best


def _best_epoch(rows: dict[int, Row]) -> int | None:
    """Returns the epoch of best.ckpt; None before the first validation."""
    return accuracies(rows).get("best_epoch")


def _check_config(folder: Path, config: DictConfig) -> None:
    for key, (theirs, ours) in differences(stored_config(folder), config).items():
        path = folder / "config.yaml"
        raise UserError(f"{path} is of another run: {key} = {theirs}, and this one has {ours}; move it away")


def _progress_of(path: Path, config: DictConfig, module: LitCosineGate) -> tuple[int, bool]:
    """Returns the progress of a checkpoint of this run. An earlier version's is compared by its config."""
    stored = read_checkpoint(path)
    run, differ = stored.get("run"), differences(stored["hyper_parameters"], config)
    if run != run_stamp(config) and (run is not None or differ):
        words = [f"{key} = {theirs}, and this one has {ours}" for key, (theirs, ours) in differ.items()]
        raise UserError(f"{path} is of another run: {(words or ['its identity is another'])[0]}; move it away")
    if path.name != BEST:  # a run that has no other starts from scratch, or from `weights`
        load_weights(module, stored, path)  # the trainer does it again; here another network is answered with a line
    return _progress(stored, path)


def _progress(stored: dict[str, Any], path: Path) -> tuple[int, bool]:
    """Returns the epochs that a checkpoint was trained for, and whether it has made steps of the next."""
    loop = value_at(stored, "loops.fit_loop") or {}
    epochs, steps = value_at(loop, "epoch_progress.current.processed"), stored.get("global_step")
    inside = loop.get("epoch_loop.batch_progress", {})
    if not (isinstance(epochs, int) and isinstance(steps, int) and 0 <= epochs <= steps):
        raise UserError(f"{path} is not a checkpoint of this program: it does not say how many epochs it is of")
    return epochs, stored.get("epoch") == epochs and bool(value_at(inside, "current.processed"))


def _check_epochs(folder: Path, point: ResumePoint, rows: dict[int, Row], record: Record | None, planned: int) -> None:
    """Raises UserError unless metrics.csv and the record have the checkpoint's epochs, and hardly any more."""
    metrics, most = folder / "metrics.csv", min(point.epochs + (AHEAD if point.path else 1), planned)
    if point.epochs > planned:
        raise UserError(f"{point}, and this run has {planned}; move it away")
    lacking = next((epoch for epoch in range(1, point.epochs + 1) if epoch not in rows), None)
    if lacking is not None:
        what = f"has no row of epoch {lacking}" if metrics.exists() else "is gone"
        raise UserError(f"{metrics} {what}, and {point}; put it back, or {AWAY}")
    if max(rows, default=0) > most:
        raise UserError(f"{metrics} has a row of epoch {max(rows)}, but {point}; put back what is missing, or {AWAY}")
    done = record.epochs.done if record else 0
    if not point.epochs <= done <= most:
        path = folder / "record.json"
        raise UserError(f"{path} has {done} epochs done, but {point}; put back what is missing, or {AWAY}")


def _check_best(path: Path, epoch: int, point: ResumePoint, rows: dict[int, Row]) -> None:
    """Raises UserError unless best.ckpt is of the best epoch, or of one after the checkpoint."""
    best = _best_epoch({number: row for number, row in rows.items() if number <= point.epochs})
    if epoch > point.epochs + AHEAD or (epoch <= point.epochs and epoch != (best or epoch)):
        words = f"epoch {best} is the best in metrics.csv" if epoch <= point.epochs else str(point)
        raise UserError(f"{path} is of epoch {epoch}, and {words}; move it away")
