"""The slot's contract. Every gate answers the same question: how open, for each sample?"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from cosinegate.gates.decision import Decision
from cosinegate.geometry import Dots

Seen = Tensor | tuple[Tensor, ...] | None  # what a gate decides by, passed on from block to block


@dataclass
class Slot:
    """Where a gate goes, and what its maker may ask for."""

    channels: int  # of what the gate is shown
    place: int  # among the blocks that have a gate, from 0
    number: int  # of blocks that have a gate
    opening: Callable[[], nn.Module]  # from a logit to how open: a Relaxation or a Quantile
    shared: dict[str, nn.Module] = field(default_factory=dict)  # what all gates of a network have together


class Gate(nn.Module):
    """A gate that `decides_first` looks at its block's input and decides, and in evaluation F runs for the open samples
    alone. One that does not is asked when F(x) is there.

    What gates have seen goes from block to block with the images, and lies in no module.
    """

    decides_first = True
    compares = False  # whether it is shown the dot products of s and F(x)
    ranks = True  # whether its logit orders samples, so that a threshold can part them as a budget wants

    def __init__(self, opening: nn.Module | None = None) -> None:
        super().__init__()
        self.opening = opening

    @property
    def turn(self) -> float:
        """The logit above which it is open in evaluation."""
        return 0.0 if self.opening is None else self.opening.turn

    @property
    def carries(self) -> bool:
        """Whether it looks at what earlier gates have seen."""
        return False

    @property
    def constant(self) -> bool | None:
        """Whether it is open or closed for every image of an evaluation; None where that depends on the image."""
        return None

    @property
    def is_closed(self) -> bool:
        """Whether training skips F for every sample now."""
        return getattr(self.opening, "is_closed", False)

    @property
    def is_open(self) -> bool:
        """Whether training runs F for every sample now."""
        return getattr(self.opening, "is_open", False)

    @property
    def leaves(self) -> bool:
        """Whether an image that finds it closed skips all that is left of the last stage: an exit."""
        return getattr(self.opening, "leaves", False)

    def begin(self, images: Tensor) -> Seen:
        """What is known before the first block, of the images (B, C, H, W)."""
        return None

    def look(self, x: Tensor, seen: Seen) -> Seen:
        """What it decides by, of its block's input x and what was seen before."""
        raise NotImplementedError

    def decide(self, seen: Seen) -> Decision:
        """Without F: what evaluation and deployment do."""
        raise NotImplementedError

    def answer(self, seen: Seen, scores: Tensor) -> Tensor:
        """Class scores (B, K), of which those of the network's end are `scores`. The last gate is asked."""
        return scores

    def forward(self, seen: Seen, dots: Dots | None) -> Decision:
        """In training, where F runs for every sample. A gate that does not decide first is given x."""
        return self.decide(seen)


class ScoreGate(Gate):
    """Its logit is the `score` of what it has seen, (B, 1), and opens it as the others' do."""

    def __init__(self, score: nn.Module, opening: nn.Module) -> None:
        super().__init__(opening)
        self.score = score

    def decide(self, seen: Seen) -> Decision:
        logit = self.score(seen).squeeze(1)
        return decided(self.opening(logit).gate, logit)


class StaticGate(Gate):
    """A control that does not look at the image: of it, it knows that it is there."""

    ranks = False

    def look(self, x: Tensor, seen: Seen) -> Tensor:
        return x.new_empty(len(x), 0)


def decided(gate: Tensor, logit: Tensor) -> Decision:
    """Of a gate that looks at no measure of F."""
    unknown = torch.full_like(logit, torch.nan)
    return Decision(gate, logit.expand_as(gate), unknown, unknown, unknown)


def start_open(layer: nn.Linear, share: float | None) -> None:
    """Sets the bias of a gate's last layer so that it begins about this open; None leaves it as it was drawn."""
    if share is not None:
        nn.init.constant_(layer.bias, math.log(share / (1 - share)))
