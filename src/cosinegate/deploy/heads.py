"""What a deployed gate decides by what its eye has seen."""

from typing import Any

import torch
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.choices import Measure
from cosinegate.gates import LEAK, Seen
from cosinegate.gates.attention import ChannelAttention
from cosinegate.gates.random import uniform
from cosinegate.geometry import Dots


class Head(nn.Module):
    """Open, (B, 1) bool, where the score of what was seen lies above `turn`."""

    kind: str  # its name in a card
    compares = False  # whether it needs F(x)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.zeros(()))

    def score(self, seen: Seen) -> Tensor:
        raise NotImplementedError

    def forward(self, seen: Seen) -> Tensor:
        return self.score(seen) > self.turn

    def described(self) -> dict[str, Any]:
        return {"kind": self.kind}


class GateHead(Head):
    """w2·ReLU(W1·seen + b1) + b2, with a slope `leak` below zero. Of a predictive gate: predictor and controller side
    by side, γ and the statistics' mean and deviation multiplied in.
    """

    kind = "layers"

    def __init__(self, features: int, hidden: int, leak: float = LEAK) -> None:
        super().__init__()
        self.leak = leak
        self.w1 = nn.Linear(features, hidden)
        self.w2 = nn.Linear(hidden, 1)

    def score(self, seen: Tensor) -> Tensor:
        return self.w2(nn.functional.leaky_relu(self.w1(seen), self.leak))

    def described(self) -> dict[str, Any]:
        sizes = {"features": self.w1.in_features, "hidden": self.w1.out_features}
        return super().described() | sizes | {"leak": self.leak}


class CompareHead(Head):
    """The paper's gate, which compares s and F(x): γ·measure + w2·ReLU(W1·GAP(x)), γ multiplied into w2."""

    kind = "compare"
    compares = True

    def __init__(self, measure: str, channels: int | None, hidden: int | None) -> None:
        super().__init__()
        self.measure = Measure[measure]
        self.sizes = {"measure": measure, "channels": channels, "hidden": hidden}
        self.register_buffer("gamma", torch.zeros(()))
        self.w1 = None if hidden is None else nn.Linear(channels, hidden, bias=False)
        self.w2 = None if hidden is None else nn.Linear(hidden, 1, bias=False)

    def compare(self, x: Tensor, s: Tensor, r: Tensor) -> Tensor:
        """Where it is open (B, 1), of a block's input, its identity path and F(x)."""
        logit = self.gamma * geometry.measured(self.measure, _dots(s, r))[:, None]
        if self.w1 is not None:
            logit = logit + self.w2(torch.relu(self.w1(geometry.global_average_pool(x))))
        return logit > self.turn

    def described(self) -> dict[str, Any]:
        return super().described() | self.sizes


def _dots(s: Tensor, r: Tensor) -> Dots:
    """The dot products of two maps; a compiler or an exporter is shown plain sums."""
    if not torch.compiler.is_compiling():
        return geometry.constant_dot_products(s, r)
    a, b, c = ((one * other).sum((1, 2, 3)) for one, other in ((s, s), (s, r), (r, r)))
    return Dots(a, b, c, torch.zeros_like(b))


class TurnHead(Head):
    """Of a score (B, 1) that an exit's eye has seen already."""

    kind = "turn"

    def score(self, seen: tuple[Tensor, Tensor]) -> Tensor:
        return seen[0]


class AttentionHead(Head):
    kind = "attention"

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.attention = ChannelAttention(channels, hidden)

    def score(self, seen: Tensor) -> Tensor:
        return self.attention(seen)

    def described(self) -> dict[str, Any]:
        channels, hidden = self.attention.w1.in_features, self.attention.w1.out_features
        return super().described() | {"channels": channels, "hidden": hidden}


class ConvolutionHead(Head):
    """SkipNet's, with its BatchNorm folded into the convolution."""

    kind = "convolution"

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.readout = nn.Linear(channels, 1)

    def score(self, seen: Tensor) -> Tensor:
        return self.readout(torch.relu(self.conv(seen)).mean((2, 3)))

    def described(self) -> dict[str, Any]:
        return super().described() | {"channels": self.conv.in_channels}


class MemoryHead(Head):
    """Reads the hidden part of an LSTM's state."""

    kind = "state"

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.readout = nn.Linear(hidden, 1)

    def score(self, seen: tuple[Tensor, Tensor]) -> Tensor:
        return self.readout(seen[0])

    def described(self) -> dict[str, Any]:
        return super().described() | {"hidden": self.readout.in_features}


class FingerprintHead(Head):
    kind = "hash"

    def __init__(self, place: int, rate: float) -> None:
        super().__init__()
        self.place, self.rate = place, rate

    def score(self, seen: Tensor) -> Tensor:
        return (self.rate - uniform(seen, self.place)).float()[:, None]

    def described(self) -> dict[str, Any]:
        return super().described() | {"place": self.place, "rate": self.rate}
