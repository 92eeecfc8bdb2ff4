"""A dense run's network under gates of another run: it is taken as it is, and the gates alone learn."""

import hashlib
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from cosinegate.checkpoint import read_checkpoint
from cosinegate.config import leaves, primitives
from cosinegate.errors import UserError
from cosinegate.lit import LitCosineGate
from cosinegate.record import found, read_record
from cosinegate.saved import chosen_path, load_checkpoint, run_folder_of

ALIKE = ("network", "data.name", "data.validation", "data.holdout", "data.mean", "data.std")


def hold_trunk(module: LitCosineGate, config: DictConfig, earlier: dict[str, Any] | None) -> dict[str, Any]:
    """Holds all of the module's network but its gates, and says whose weights it has: those of the dense run
    `config.trunk`, or of a run that goes on, which has them in its own checkpoint and was told so `earlier`.
    """
    module.network.hold_trunk()
    if not any(parameter.requires_grad for parameter in module.network.parameters()):
        raise UserError(f"trunk = {config.trunk}: only gates learn then, and these have nothing that learns")
    return earlier or _taken(module, config)


def _taken(module: LitCosineGate, config: DictConfig) -> dict[str, Any]:
    """A run that held out other images would be judged by some that its trunk has learned."""
    try:
        path = _path(config.trunk)
        record = read_record(run_folder_of(path))
        is_finished = record is not None and record["status"] == "finished"
        if record is not None and not is_finished and Path(config.trunk).is_dir():
            raise UserError(f"is not trained to its end ({record['status']}): train it, or give one of its checkpoints")
        dense, trained_with = load_checkpoint(path)
        if any(block.gate is not None for block in dense.network.blocks):
            raise UserError("has gates of its own: give a run with gate=none")
        wanted, given = (leaves(primitives(one)) for one in (config, trained_with))
        for key, value in wanted.items():
            if key.startswith(ALIKE) and given[key] != value:
                raise UserError(f"was trained with {key} = {given[key]}, and this run has {value}: must be the same")
    except UserError as error:
        raise UserError(f"trunk = {config.trunk}: {error}") from error
    weights = dense.network.state_dict()
    module.network.load_state_dict(module.network.state_dict() | weights)
    digest = hashlib.sha256(b"".join(value.contiguous().numpy().tobytes() for value in weights.values()))
    facts = {"run": config.trunk, "checkpoint": path.stem, "sha256": digest.hexdigest()}
    facts |= {"identity": found(record or {}, "identity"), "seed": trained_with.seed}
    return facts | {"epochs": trained_with.trainer.max_epochs if is_finished else _epochs(path)}


def _epochs(path: Path) -> int:
    """How many a checkpoint was trained for."""
    stored = read_checkpoint(path).get("epoch")
    if not isinstance(stored, int) or not 0 <= stored < 10**9:
        raise UserError(f"{path} is not a checkpoint of this program: it has no epoch")
    return stored + 1


def _path(trunk: str) -> Path:
    try:
        return chosen_path(trunk, None)
    except UserError as error:  # which says whose run it is in its own words
        raise UserError(str(error).removeprefix(f"run = {trunk}: ")) from error
