"""Weights of another run: a dense one's network under gates, taken as it is, or all of a network to begin with."""

import hashlib
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from cosinegate.checkpoint import read_checkpoint
from cosinegate.config import leaves, primitives
from cosinegate.errors import UserError
from cosinegate.foreign import first_line
from cosinegate.lit import LitCosineGate
from cosinegate.record import read_record
from cosinegate.saved import chosen_path, load_checkpoint, run_folder_of

ALIKE = ("network", "data.name", "data.validation", "data.holdout", "data.mean", "data.std")


def hold_trunk(module: LitCosineGate, config: DictConfig, earlier: dict[str, Any] | None) -> dict[str, Any]:
    """Holds all of the module's network but its gates, and says whose weights it has: those of the dense run
    `config.trunk`, or of a run that goes on, which has them in its own checkpoint and was told so `earlier`.
    """
    module.network.hold_trunk()
    if not any(parameter.requires_grad for parameter in module.network.parameters()):
        raise UserError(f"trunk = {config.trunk}: only gates learn then, and these have nothing that learns")
    return earlier or _taken("trunk", module, config)


def begin_with_weights(module: LitCosineGate, config: DictConfig, earlier: dict[str, Any] | None) -> dict[str, Any]:
    """Gives the module's network the weights of `config.weights`, and says whose they are; `earlier` as above."""
    return earlier or _taken("weights", module, config)


def _taken(key: str, module: LitCosineGate, config: DictConfig) -> dict[str, Any]:
    """A run that held out other images would be judged by some that the other has learned."""
    run = config[key]
    try:
        path = _path(run)
        record = read_record(run_folder_of(path))
        is_finished = record is not None and record.status == "finished"
        if record is not None and not is_finished and Path(run).is_dir():
            raise UserError(f"is not trained to its end ({record.status}): train it, or give one of its checkpoints")
        source, trained_with = load_checkpoint(path)
        if key == "trunk" and any(block.gate is not None for block in source.network.blocks):
            raise UserError("has gates of its own: give a run with gate=none")
        wanted, given = (leaves(primitives(one)) for one in (config, trained_with))
        for name, value in wanted.items():
            if name.startswith(ALIKE) and given[name] != value:
                raise UserError(f"was trained with {name} = {given[name]}, and this run has {value}: must be the same")
        weights = source.network.state_dict()
        own = module.network.state_dict() if key == "trunk" else {}  # gates that are not in it
        try:
            module.network.load_state_dict(own | weights)
        except RuntimeError as error:
            raise UserError(f"has other gates than this run: {first_line(error)}") from error
    except UserError as error:
        raise UserError(f"{key} = {config[key]}: {error}") from error
    digest = hashlib.sha256(b"".join(value.contiguous().numpy().tobytes() for value in weights.values()))
    facts = {"run": run, "checkpoint": path.stem, "sha256": digest.hexdigest()}
    facts |= {"identity": record and record.identity, "seed": trained_with.seed}
    return facts | {"epochs": record.epochs.done if is_finished else _epochs(path)}


def _epochs(path: Path) -> int:
    """How many a checkpoint was trained for."""
    stored = read_checkpoint(path).get("epoch")
    if not isinstance(stored, int) or not 0 <= stored < 10**9:
        raise UserError(f"{path} is not a checkpoint of this program: it has no epoch")
    return stored + 1


def _path(run: str) -> Path:
    try:
        return chosen_path(run, None)
    except UserError as error:  # which says whose run it is in its own words
        raise UserError(str(error).removeprefix(f"run = {run}: ")) from error
