"""A basic residual block with an optional gate: y = s(x) + z·F(x) (Eq. 8). Without a gate it is the dense baseline."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.choices import Shortcut
from cosinegate.gates import Decision, Gate, Seen
from cosinegate.geometry import Dots


class BlockRouting(NamedTuple):
    """What a gated block decided, and the dot products that say what it cost in consistency; each (B,)."""

    decision: Decision
    dots: Dots | None  # None where F did not run for every sample, and where nobody asks for them


class PadShortcut(nn.Module):
    """Every `stride`-th pixel, and new channels of zeros: no parameters."""

    def __init__(self, new_channels: int, stride: int) -> None:
        super().__init__()
        self.new_channels = new_channels
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))

    def extra_repr(self) -> str:
        return f"new_channels={self.new_channels}, stride={self.stride}"


def shortcut_path(kind: Shortcut, inputs: int, outputs: int, stride: int) -> nn.Module:
    """s(x): the identity wherever the shape allows it."""
    if inputs == outputs and stride == 1:
        return nn.Identity()
    if kind is Shortcut.pad:
        return PadShortcut(outputs - inputs, stride)
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def basic_residual(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """F = conv-BN-ReLU-conv-BN, of He et al.'s basic block."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
    )


class ResidualBlock(nn.Module):
    """Any s and F. A ReLU after the sum leaves a non-negative s(x) as it is when the gate is closed.

    Where `compile_gates` found the gate closed for all images, there is no F any more.
    """

    def __init__(
        self,
        shortcut: nn.Module,
        residual: nn.Module | None,
        activation: nn.Module,
        gate: Gate | None,
        looks: bool,
        consistency: bool,
    ) -> None:
        super().__init__()
        self.shortcut, self.residual, self.activation, self.gate = shortcut, residual, activation, gate
        self.looks = looks  # whether its gate looks at this block's input, or decides by what was seen before
        self.consistency = consistency  # whether the consistency term teaches s and F
        self.settled = False  # whether the gate is asked no more, and only looks for the gates of later blocks

    @property
    def asks(self) -> bool:
        """Whether a gate decides for each sample if F runs."""
        return self.gate is not None and not self.settled

    @property
    def is_closed(self) -> bool:
        """Whether training skips F for every sample now."""
        return self.gate is not None and self.gate.decides_first and self.gate.is_closed

    @property
    def may_part(self) -> bool:
        """Whether some samples may skip F in training now and others not."""
        return self.gate is not None and not self.is_closed and not self.gate.is_open

    @property
    def leaves(self) -> bool:
        """Whether an image may leave the last stage before it."""
        return self.gate is not None and self.gate.leaves

    def look(self, x: Tensor, seen: Seen) -> Seen:
        """What its gate is shown: what it sees of x, or what an earlier block of the stage saw."""
        return self.gate.look(x, seen) if self.looks else seen

    def forward(self, x: Tensor, seen: Seen = None) -> tuple[Tensor, BlockRouting | None]:
        """`seen` is what `look` gave."""
        if not self.asks:
            return self.plain(x), None
        if self.gate.decides_first and not self.training:
            decision = self.gate.decide(seen)
            return self.route(x, decision.gate), BlockRouting(decision, None)
        s = self.shortcut(x)
        if self.is_closed:
            nothing = sum(0.0 * weight.sum() for weight in self.residual.parameters())  # DDP wants every gradient
            return self.activation(s + nothing), BlockRouting(self.gate.decide(seen), None)
        r, dots = self.residual(x), None
        if self.consistency or not self.gate.decides_first:
            s, r, dots = geometry.dot_products(s, r)
        elif self.gate.compares:
            dots = geometry.constant_dot_products(s, r)
        decision = self.gate(seen if self.gate.decides_first else x, dots)
        y = torch.addcmul(s, decision.gate.view(-1, 1, 1, 1).to(r.dtype), r)
        return self.activation(y), BlockRouting(decision, dots)

    def plain(self, x: Tensor) -> Tensor:
        """The same for every sample."""
        s = self.shortcut(x)
        return self.activation(s if self.residual is None else s + self.residual(x))

    def decide(self, x: Tensor, seen: Seen) -> Decision:
        """What the gate decides, without the rest."""
        if self.gate.decides_first:
            return self.gate.decide(seen)
        return self.gate(x, geometry.constant_dot_products(self.shortcut(x), self.residual(x)))

    def route(self, x: Tensor, gate: Tensor) -> Tensor:
        """y of gates (B,) that are 0 or 1: F runs for the samples whose gate is open, and for no other."""
        s, computed = self.shortcut(x), gate.nonzero().squeeze(1)
        if len(computed) == len(x):
            y = s + self.residual(x)
        elif len(computed) > 0:
            y = s.index_add(0, computed, self.residual(x[computed]).to(s.dtype))
        else:
            y = s.clone()  # the activation writes in place
        return self.activation(y)
