"""Which gate goes into a block's slot: a table from `gate.kind` to the file that makes it."""

from collections.abc import Callable

import torch
from torch import nn

from cosinegate.calibration import Budget, Quantile
from cosinegate.choices import Calibration, GateKind, Signal
from cosinegate.errors import UserError
from cosinegate.gates import (
    aig,
    attention,
    constant,
    controller_only,
    cosine,
    drop,
    exit,
    fixed,
    predictive,
    random,
    skipnet,
)
from cosinegate.gates import skipnet_recurrent as recurrent
from cosinegate.gates.gate import Gate, Slot
from cosinegate.relaxation import Relaxation
from cosinegate.schema import GateConfig

MAKERS: dict[GateKind, Callable[[GateConfig, Slot], Gate]] = {
    GateKind.cosine: cosine.make,
    GateKind.skipnet: skipnet.make,
    GateKind.skipnet_recurrent: recurrent.make,
    GateKind.aig: aig.make,
    GateKind.attention: attention.make,
    GateKind.controller: controller_only.make,
    GateKind.random: random.make,
    GateKind.constant: constant.make,
    GateKind.fixed: fixed.make,
    GateKind.drop: drop.make,
}
UNRANKED = (GateKind.random, GateKind.constant, GateKind.fixed, GateKind.drop)  # no logit that orders samples


def is_predicted(config: GateConfig) -> bool:
    """Whether CIR is predicted; only the paper's equation has a signal."""
    return config.kind is GateKind.cosine and config.signal is Signal.predicted


def check(config: GateConfig, number: int) -> None:
    """Ends with one line where `number` gates of this kind cannot be as the config asks."""
    if config.calibration is Calibration.quantile and config.kind in UNRANKED:
        raise UserError(f"gate.calibration = quantile: a gate of kind {config.kind.name} has no logit to calibrate")
    if config.kind is GateKind.fixed and (config.pattern is None or len(config.pattern) != number):
        raise UserError(f"gate.pattern = {config.pattern}: must be {number} of 0 and 1, one for each gated block")


class GateMaker:
    """Makes the gate of every block of a network; what its gates share is made once."""

    def __init__(self, config: GateConfig, gated: list[bool], budget: Budget | None = None) -> None:
        """`gated` says which blocks have a gate; a `budget` calibrates them."""
        self.config, self.gated, self.number, self.budget = config, iter(gated), sum(gated), budget
        relaxation = config.relaxation
        self.relaxation = Relaxation(
            relaxation.temperature, relaxation.hard, config.threshold, noisy=relaxation.noise_until > 0
        )
        self.shared: dict[str, nn.Module] = {}
        self.made = 0
        if config.kind is not GateKind.none:
            check(config, self.number)

    def __call__(self, channels: int) -> Gate | None:
        """Of the next block, whose gate is shown `channels` channels.

        It draws its weights aside, so that the network around it begins as it would with other gates, or with none.
        """
        if not next(self.gated) or self.config.kind is GateKind.none:
            return None
        make = MAKERS[self.config.kind]
        if is_predicted(self.config):
            make = exit.make if self.config.exits else predictive.make
        place = self.made
        self.made += 1
        with torch.random.fork_rng(devices=[]):
            return make(self.config, Slot(channels, place, self.number, lambda: self._opening(place), self.shared))

    def _opening(self, place: int) -> nn.Module:
        if self.budget is None:
            return self.relaxation
        return Quantile(self.budget, place, self.config.quantile.temperature)
