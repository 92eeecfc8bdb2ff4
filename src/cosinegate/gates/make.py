"""Makes the gate of every block: a table from `gate.kind` to the file that makes it."""

from collections.abc import Callable
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from cosinegate.config.checks import check_gate, no_such_key, with_values
from cosinegate.config.choices import GateKind
from cosinegate.config.schema import GATES, GateConfig, OpeningConfig
from cosinegate.gates import controller_only, cosine
from cosinegate.gates.controls import constant, random
from cosinegate.gates.gate import Gate, Slot
from cosinegate.gates.peers import aig, skipnet
from cosinegate.relaxation import Relaxation
from cosinegate.terminal.errors import UserError

MAKERS: dict[GateKind, Callable[[Any, Slot], Gate]] = {
    GateKind.cosine: cosine.make,
    GateKind.controller: controller_only.make,
    GateKind.skipnet: skipnet.make,
    GateKind.aig: aig.make,
    GateKind.random: random.make,
    GateKind.constant: constant.make,
}


def gate_config(kind: str, /, **options: Any) -> DictConfig:
    """Returns the config of a gate by its kind and keys of its schema; `gamma` may be the number γ_0."""
    if kind not in GateKind.__members__ or kind == GateKind.none.name:
        kinds = ", ".join(name for name in GateKind.__members__ if name != GateKind.none.name)
        raise UserError(f"gate = {kind!r}: must be one of {kinds}")
    if isinstance(options.get("gamma"), int | float):
        options["gamma"] = {"init": float(options["gamma"])}
    schema = OmegaConf.structured(GATES[GateKind[kind]])
    schema.kind = GateKind[kind]
    known = [key for key in schema if key != "kind"]
    for key in options:
        if key not in known:
            raise UserError(no_such_key(f"gate.{key}", known))
    config = with_values(schema, options, "gate.")
    check_gate(config)
    return config


class GateMaker:
    """Makes the gates of a network's blocks in order; `gated` tells which blocks have one."""

    def __init__(self, config: GateConfig, gated: list[bool]) -> None:
        self.config, self.gated, self.count = config, iter(gated), 0
        self.relaxation = _relaxation(config)  # one for all gates

    def __call__(self, channels: int) -> Gate | None:
        """Returns the gate of the next block, whose input has `channels` channels, or None.

        Its weights are drawn from a forked generator: the rest of the network starts the same with any gate, or none.
        """
        if not next(self.gated):
            return None
        slot = Slot(channels=channels, gate_index=self.count, opening=lambda: self.relaxation)
        self.count += 1
        with torch.random.fork_rng(devices=[]):
            return MAKERS[self.config.kind](self.config, slot)


def _relaxation(config: OpeningConfig | GateConfig) -> Relaxation | None:
    if config.kind is GateKind.none:
        return None
    if config.kind is GateKind.random:  # it draws 0 or 1, and takes of it which part of the batch this process has
        return Relaxation(temperature=1.0, hard=True, threshold=0.5)
    relaxation = config.relaxation
    return Relaxation(
        temperature=relaxation.temperature,
        hard=relaxation.hard,
        threshold=config.threshold,
        noisy=relaxation.noise_until > 0,
    )
