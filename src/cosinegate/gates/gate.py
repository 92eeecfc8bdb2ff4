"""The contract of a gate: it decides how open its block is, for each sample."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from cosinegate.gates.decision import Decision, without_cir
from cosinegate.geometry import Dots


@dataclass
class Slot:
    """The place of a gate in the network, and what the gate is made with."""

    channels: int  # of the block's input
    gate_index: int  # among the network's gates, from 0
    opening: Callable[[], nn.Module]  # makes the module from a logit to how open the gate is: a Relaxation


class Gate(nn.Module):
    """A base for gates. One that `decides_first` sees only its block's input; in evaluation F runs for open samples
    only.

    Other gates are called with the dot products of s and F(x), after F has run for every sample.
    """

    decides_first = True

    def __init__(self, opening: nn.Module) -> None:
        super().__init__()
        self.opening = opening

    @property
    def threshold_logit(self) -> float:
        """Returns the logit above which the gate is open in evaluation."""
        return self.opening.threshold_logit

    def decide(self, x: Tensor, images: Tensor) -> Decision:
        """Decides before F, by the block's input x (B, C, H, W) and the network's input images."""
        raise NotImplementedError

    def compare(self, x: Tensor, dots: Dots) -> Decision:
        """Decides after F, by the block's input and the dot products of s and F(x)."""
        raise NotImplementedError


class ScoreGate(Gate):
    """A gate that decides first: its logit is `score` of the `features` of its block's input."""

    def __init__(self, score: nn.Module, opening: nn.Module) -> None:
        super().__init__(opening)
        self.score = score

    def features(self, x: Tensor) -> Tensor:
        """Returns the input of the score."""
        raise NotImplementedError

    def decide(self, x: Tensor, images: Tensor) -> Decision:
        logit = self.score(self.features(x)).squeeze(1)
        return without_cir(self.opening(logit), logit)


def start_open(layer: nn.Linear, fraction: float | None) -> None:
    """Sets the bias of a gate's last layer so that it starts about this open; None keeps the bias as drawn."""
    if fraction is not None:
        nn.init.constant_(layer.bias, math.log(fraction / (1 - fraction)))
