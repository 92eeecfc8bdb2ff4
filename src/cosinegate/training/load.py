"""Loads a trained network from a run's folder, a checkpoint, or a folder of an export or of exits."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cosinegate.config.checks import validate
from cosinegate.config.choices import Checkpoint, GateKind
from cosinegate.config.legacy import upgraded
from cosinegate.config.schema import GATES, Config
from cosinegate.lit import LitCosineGate
from cosinegate.runs.checkpoint import load_weights, read_checkpoint
from cosinegate.runs.record import read_record
from cosinegate.runs.untrusted import first_line
from cosinegate.terminal.errors import UserError
from cosinegate.training.build import build_module, weights_of

SMALLEST_WEIGHT = 2  # bytes, in half precision


def chosen_path(run: str, checkpoint: Checkpoint | None) -> Path:
    """Returns the given checkpoint or, by default, the one that the record's test accuracy is of."""
    if checkpoint is not None or not Path(run).is_dir():
        return checkpoint_path(Path(run), (checkpoint or Checkpoint.last).name)
    record = read_record(Path(run))
    tested = record and record.accuracy.test_of
    return checkpoint_path(Path(run), tested if tested in Checkpoint.__members__ else Checkpoint.last.name)


def checkpoint_path(run: Path, which: str) -> Path:
    """Returns the checkpoint that a run's folder or a file's path names."""
    if run.is_file():
        return run
    if not run.is_dir():
        raise UserError(f"run = {run}: no such folder or file")
    path = run / "checkpoints" / f"{which}.ckpt"
    if not path.is_file():
        raise UserError(f"run = {run}: has no checkpoints/{which}.ckpt; give a run's folder or a checkpoint file")
    return path


def run_folder_of(checkpoint: Path) -> Path:
    """Returns the folder of the run that a checkpoint belongs to, or the checkpoint's own folder."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent


def _require_own_run(stored: dict[str, Any], path: Path) -> None:
    """Raises UserError if a checkpoint in a run's folder is another run's."""
    run, folder = stored.get("run"), path.parent.parent
    if path.parent.name != "checkpoints" or not isinstance(run, dict):  # an earlier version did not say
        return
    record = read_record(folder)
    for key in ("identity", "seed"):
        theirs, ours = run.get(key), getattr(record, key, None)
        if None not in (theirs, ours) and theirs != ours:  # what is not recorded contradicts nothing
            raise UserError(f"{path} is of another run: its {key} is {theirs}, that of {folder} is {ours}")


def load_checkpoint(path: Path) -> tuple[LitCosineGate, DictConfig]:
    """Returns the module with the checkpoint's weights, and the config that it was trained with."""
    stored = read_checkpoint(path)
    _require_own_run(stored, path)
    config = checked_config(stored["hyper_parameters"], path, path.stat().st_size)
    module = build_module(config)
    load_weights(module, stored, path)
    return module, config


def checked_config(stored: Any, path: Path, size: int) -> DictConfig:
    """Returns a stored config if it is valid and its network fits into a file of `size` bytes."""
    try:
        config = OmegaConf.merge(OmegaConf.structured(Config), _typed(upgraded(stored)))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (OmegaConfBaseException, AttributeError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"{path} was written by another version: {first_line(error)}") from error
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise UserError(f"{path} was written by another version: it has no {missing[0]}")
    config.callbacks, config.logger = {}, {}  # a file's `_target_` is nothing to call
    try:
        validate(config)
    except UserError as error:
        raise UserError(f"{path}: changed, or written by another version: {error}") from error
    if weights_of(config) * SMALLEST_WEIGHT > size:
        raise UserError(f"{path}: a file of {size} bytes does not hold the network that it asks for")
    return config


def _typed(stored: dict[str, Any]) -> dict[str, Any]:
    """Returns the config with the schema of its gate's kind."""
    schema = GATES[GateKind[stored["gate"]["kind"]]]
    return stored | {"gate": OmegaConf.merge(OmegaConf.structured(schema), stored["gate"])}
