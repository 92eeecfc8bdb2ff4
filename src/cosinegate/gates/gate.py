"""The slot's contract. Every gate answers one question: how open is the block, for each sample?"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from cosinegate.gates.decision import Decision, without_cir
from cosinegate.geometry import Dots


@dataclass
class Slot:
    """Where a gate goes, and what its maker may ask for."""

    channels: int  # of the block's input
    gate_index: int  # among the network's gates, from 0
    opening: Callable[[], nn.Module]  # makes the module from a logit to how open the gate is: a Relaxation


class Gate(nn.Module):
    """A gate that `decides_first` sees its block's input alone; in evaluation F then runs for the open samples only.

    One that does not is called with the dot products of s and F(x), once F has run for every sample.
    """

    decides_first = True

    def __init__(self, opening: nn.Module) -> None:
        super().__init__()
        self.opening = opening

    @property
    def threshold_logit(self) -> float:
        """The logit above which the gate is open in evaluation."""
        return self.opening.threshold_logit

    def decide(self, x: Tensor, images: Tensor) -> Decision:
        """Decides before F, by the block's input x (B, C, H, W) and the network's input images."""
        raise NotImplementedError

    def compare(self, x: Tensor, dots: Dots) -> Decision:
        """Decides after F, by the block's input and the dot products of s and F(x)."""
        raise NotImplementedError


class ScoreGate(Gate):
    """Decides first: its logit is `score` of what `features` takes from the block's input."""

    def __init__(self, score: nn.Module, opening: nn.Module) -> None:
        super().__init__(opening)
        self.score = score

    def features(self, x: Tensor) -> Tensor:
        """What the score is computed from."""
        raise NotImplementedError

    def decide(self, x: Tensor, images: Tensor) -> Decision:
        logit = self.score(self.features(x)).squeeze(1)
        return without_cir(self.opening(logit), logit)


def start_open(layer: nn.Linear, fraction: float | None) -> None:
    """Sets the bias of a gate's last layer so that it starts about this open; None leaves it as it was drawn."""
    if fraction is not None:
        nn.init.constant_(layer.bias, math.log(fraction / (1 - fraction)))
