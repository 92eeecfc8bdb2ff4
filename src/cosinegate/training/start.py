"""Starts a run: its facts, its folder, and the epoch from which it resumes."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from cosinegate.callbacks.checkpoints import LAST, PREVIOUS
from cosinegate.callbacks.kept import KeptCallbacks
from cosinegate.config.choices import Dataset
from cosinegate.config.identity import identity, run_folder
from cosinegate.data import image_set
from cosinegate.data.folder import described
from cosinegate.lit import LitCosineGate
from cosinegate.networks.name import network_name
from cosinegate.runs.files import write_atomically
from cosinegate.runs.folder import link_latest, remove_scraps
from cosinegate.runs.lock import locked
from cosinegate.runs.record import Record, read_record
from cosinegate.terminal import console
from cosinegate.terminal.errors import UserError
from cosinegate.terminal.signals import StopRequest, taking_signals
from cosinegate.training.resume import ResumePoint, find_resume_point

MOST_LOOKED_AT = 1000
NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


def run_facts(config: DictConfig) -> dict[str, Any]:
    """Returns what the record says of a run before it starts."""
    gate = config.gate
    return {
        "experiment": config.name,
        "identity": identity(config),
        "data": image_set(config.data).name,
        "seed": config.seed,
        "gate": gate.kind.name,
        "polarity": gate.polarity.name if "polarity" in gate else None,
        "tau_target": config.objective.tau_target,
        "lambda_flops": config.objective.lambda_flops,
        "selected_on": config.data.validation.name,
        "network": network_name(config.network),
        "sweep": config.sweep,
    }


@contextlib.contextmanager
def holding(folder: Path, stop: StopRequest, wait: bool) -> Iterator[None]:
    """Holds the run's folder and handles signals while it trains. A job of a sweep waits for an earlier one."""
    lock = contextlib.nullcontext() if rank_zero_only.rank > 0 else locked(folder, wait=wait)
    with lock, taking_signals(stop), writing_in(folder):
        yield


def go_on(
    folder: Path,
    config: DictConfig,
    before: Record | None,
    module: LitCosineGate,
    trainer: L.Trainer,
    kept: KeptCallbacks,
    job: str | None,
) -> Path | None:
    """Returns the checkpoint from which the run resumes, or None, and marks the folder as this run's."""
    kept.metrics.read()
    point = find_resume_point(folder, config, before, kept.metrics.rows, module)
    if rank_zero_only.rank == 0:
        _clear(folder, point)
    kept.metrics.rows = {epoch: row for epoch, row in kept.metrics.rows.items() if epoch <= point.epochs}
    changed = kept.record.start(trainer, before, point.epochs, point.inside)
    write_atomically(folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
    if rank_zero_only.rank == 0 and folder.parent == Path(config.runs_dir) / config.name:
        link_latest(folder)
    if job is None:
        if config.data.name is Dataset.folder:
            console.say(described(config.data))
        console.say(f"{'resuming' if point.path else 'training'} {config.name} in {folder}")
    if changed:
        console.say(f"{folder}: from epoch {point.epochs + 1} on another program trains it: {changed}")
    return point.path


@contextlib.contextmanager
def writing_in(folder: Path) -> Iterator[None]:
    """Raises UserError if the disk is full or read-only. Files that were written before are whole."""
    try:
        yield
    except OSError as error:
        if error.errno not in NOT_WRITTEN:
            raise
        words = "the earlier files are as they were; make room and start the same command again to resume"
        raise UserError(f"{folder}: cannot be written: {error.strerror}; {words}") from error


def _clear(folder: Path, point: ResumePoint) -> None:
    """Puts away what earlier starts left: a damaged checkpoint, a traceback, a temporary file."""
    if point.last_is_damaged:
        last = folder / "checkpoints" / LAST
        console.say(f"{last} is damaged: resuming from {PREVIOUS}, the one before it")
        last.replace(last.with_name("damaged.ckpt"))
    (folder / "traceback.txt").unlink(missing_ok=True)
    remove_scraps(folder)


def is_finished(record: Record | None) -> bool:
    return record is not None and record.status == "finished"


def name_another_schedule(config: DictConfig, folder: Path) -> None:
    """Prints a line if a finished run differs only in its number of epochs: this run starts anew."""
    if config.weights is not None:
        return
    others = sorted(folder.parent.glob(f"*-s{config.seed}"))[:MOST_LOOKED_AT]
    planned = {record.epochs.planned for other in others if (record := _finished_record(other))}
    for epochs in planned - {config.trainer.max_epochs, None}:
        other = run_folder(OmegaConf.merge(config, {"run_dir": None, "trainer": {"max_epochs": epochs}}))
        if _finished_record(other):
            words = f"{config.trainer.max_epochs} are another schedule, hence another run, which starts from scratch"
            console.say(f"{other} is this run on {epochs} epochs; {words}, or with those weights by weights={other}")
            return


def _finished_record(folder: Path) -> Record | None:
    try:
        record = read_record(folder)
    except UserError:
        return None
    return record if is_finished(record) else None
