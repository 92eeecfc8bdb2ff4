"""A basic residual block with an optional gate: y = s(x) + z·F(x) (Eq. 8). Without a gate it is the dense baseline."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.config.choices import Shortcut
from cosinegate.gates import Decision, Gate
from cosinegate.geometry import Dots


class BlockRouting(NamedTuple):
    """What a gated block decided, and the dot products that the consistency term needs."""

    decision: Decision
    dots: Dots | None  # None where the consistency term is not asked for


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
    """act(s + z·F) of any s and F. With a ReLU, a closed gate leaves a non-negative s(x) as it is.

    A block without F, which `compile_gates` makes of one that is closed for all images, computes act(s).
    """

    def __init__(
        self,
        *,
        shortcut: nn.Module,
        residual: nn.Module | None,
        activation: nn.Module,
        gate: Gate | None,
        consistency: bool,
    ) -> None:
        super().__init__()
        self.shortcut, self.residual, self.activation, self.gate = shortcut, residual, activation, gate
        self.consistency = consistency  # whether the consistency term is part of the objective

    def forward(self, x: Tensor, images: Tensor) -> tuple[Tensor, BlockRouting | None]:
        """The block's output, and what its gate decided; `images` are the network's input."""
        if self.gate is None:
            return self.plain(x), None
        if self.gate.decides_first and not self.training:
            decision = self.gate.decide(self.as_map(x), images)
            return self.route(x, decision.gate), BlockRouting(decision, None)
        s, r, dots = self.shortcut(x), self.residual(x), None
        if self.consistency or not self.gate.decides_first:
            s, r, dots = geometry.dot_products(s, r)
        first, maps = self.gate.decides_first, self.as_map(x)
        decision = self.gate.decide(maps, images) if first else self.gate.compare(maps, dots)
        z = decision.gate.view(-1, *(1 for _ in r.shape[1:]))
        y = torch.addcmul(s, z.to(r.dtype), r)
        return self.activation(y), BlockRouting(decision, dots)

    @property
    def channels(self) -> int:
        """The number of channels of the block's input."""
        return next(layer for layer in self.residual.modules() if isinstance(layer, nn.Conv2d)).in_channels

    def as_map(self, x: Tensor) -> Tensor:
        """A block's input or output as gates and exits pool it, (B, C, H, W)."""
        return x

    def plain(self, x: Tensor) -> Tensor:
        """The output without a gate, the same for every sample."""
        s = self.shortcut(x)
        return self.activation(s if self.residual is None else s + self.residual(x))

    def route(self, x: Tensor, gate: Tensor) -> Tensor:
        """The output for gates (B,) of 0 or 1: F runs for the open samples alone."""
        s, computed = self.shortcut(x), gate.nonzero().squeeze(1)
        if torch.compiler.is_compiling():  # any number of open samples in one graph
            y = s.index_add(0, computed, self.residual(x[computed]).to(s.dtype))
        elif len(computed) == len(x):
            y = s + self.residual(x)
        elif len(computed) > 0:
            y = s.index_add(0, computed, self.residual(x[computed]).to(s.dtype))
        else:
            y = s.clone()  # the activation writes in place
        return self.activation(y)
