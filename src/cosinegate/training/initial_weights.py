"""Starts a run from the weights of another one (`weights=`), on its own schedule."""

import hashlib
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from cosinegate.callbacks.checkpoints import LAST, PREVIOUS
from cosinegate.config.identity import leaves, primitives
from cosinegate.lit import LitCosineGate
from cosinegate.runs.checkpoint import read_checkpoint
from cosinegate.runs.record import Record, read_record
from cosinegate.runs.untrusted import first_line
from cosinegate.terminal.errors import UserError
from cosinegate.training.load import chosen_path, load_checkpoint, run_folder_of

ALIKE = ("network", "data.name", "data.validation", "data.holdout", "data.mean", "data.std")
ALIKE += ("data.size", "data.channels", "data.content")


def load_initial_weights(
    module: LitCosineGate, config: DictConfig, folder: Path, before: Record | None
) -> dict[str, Any]:
    """Loads the weights of `config.weights` into the module, and returns their source for the record.

    A run that resumes has them in its own checkpoint, and their source in its record `before`.
    """
    goes_on = any((folder / "checkpoints" / name).exists() for name in (LAST, PREVIOUS))
    if before is not None and goes_on and before.weights is not None:
        return before.weights.as_dict()
    run = config.weights
    try:
        path = _path(run)
        record = read_record(run_folder_of(path))
        is_finished = record is not None and record.status == "finished"
        if record is not None and not is_finished and Path(run).is_dir():
            raise UserError(f"is not trained to its end ({record.status}): train it, or give one of its checkpoints")
        source, trained_with = load_checkpoint(path)
        wanted, given = (leaves(primitives(each)) for each in (config, trained_with))
        for name, value in wanted.items():  # held-out images must be the same, or some were learned from
            if name.startswith(ALIKE) and given[name] != value:
                raise UserError(f"was trained with {name} = {given[name]}, and this run has {value}: must be the same")
        weights = source.network.state_dict()
        try:
            module.network.load_state_dict(weights)
        except RuntimeError as error:
            raise UserError(f"has other gates than this run: {first_line(error)}") from error
    except UserError as error:
        raise UserError(f"weights = {run}: {error}") from error
    digest = hashlib.sha256(b"".join(value.contiguous().numpy().tobytes() for value in weights.values()))
    facts = {"run": run, "checkpoint": path.stem, "sha256": digest.hexdigest()}
    facts |= {"identity": record and record.identity, "seed": trained_with.seed}
    return facts | {"epochs": record.epochs.done if is_finished else _epochs(path)}


def _epochs(path: Path) -> int:
    """Returns how many epochs a checkpoint was trained for."""
    stored = read_checkpoint(path).get("epoch")
    if not isinstance(stored, int) or not 0 <= stored < 10**9:
        raise UserError(f"{path} is not a checkpoint of this program: it has no epoch")
    return stored + 1


def _path(run: str) -> Path:
    try:
        return chosen_path(run, None)
    except UserError as error:  # which says whose run it is in its own words
        raise UserError(str(error).removeprefix(f"run = {run}: ")) from error
