"""A dense run's network under gates of another run: it is taken as it is, and the gates alone learn."""

import hashlib
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from cosinegate.config import leaves, primitives
from cosinegate.errors import UserError
from cosinegate.lit import LitCosineGate
from cosinegate.record import found, read_record
from cosinegate.saved import chosen_path, load_checkpoint

ALIKE = ("network", "data.name", "data.validation", "data.holdout", "data.mean", "data.std")


def take_trunk(module: LitCosineGate, config: DictConfig) -> dict[str, Any]:
    """Gives the module's network the weights of the dense run `config.trunk`, and holds them. Says whose they are.

    A run that held out other images would be judged by some that its trunk has learned.
    """
    try:
        record = read_record(Path(config.trunk)) if Path(config.trunk).is_dir() else None
        if record is not None and record["status"] != "finished":
            raise UserError(f"is not trained to its end ({record['status']}): train it, or give one of its checkpoints")
        path = chosen_path(config.trunk, None)
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
    module.network.hold_trunk()
    digest = hashlib.sha256(b"".join(value.contiguous().numpy().tobytes() for value in weights.values()))
    facts = {"run": config.trunk, "checkpoint": path.stem, "sha256": digest.hexdigest()}
    facts |= {"identity": found(record or {}, "identity"), "seed": trained_with.seed}
    return facts | {"epochs": trained_with.trainer.max_epochs}
