"""A gate as it is deployed: an eye, which sees something of a block's input, and a head, which decides by that.

They are apart, for an eye may look for the heads of later blocks too. Both can be described in JSON and built again.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from cosinegate import geometry
from cosinegate.errors import UserError
from cosinegate.gates import LEAK, STATISTICS, Gate, PredictiveGate, Seen
from cosinegate.gates.aig import AigGate
from cosinegate.gates.attention import AttentionGate, ChannelAttention
from cosinegate.gates.controller_only import ControllerGate
from cosinegate.gates.exit import ExitGate, doubt
from cosinegate.gates.random import RandomGate, fingerprint, uniform
from cosinegate.gates.skipnet import SkipNetGate
from cosinegate.gates.skipnet_recurrent import Cell, RecurrentGate


class Eye(nn.Module):
    """What is seen of a block's input x, and of what was seen before."""

    carries = False  # whether it needs what was seen before
    exports = True  # whether ONNX can say it

    def begin(self, images: Tensor) -> Seen:
        return None

    def forward(self, x: Tensor, seen: Seen) -> Seen:
        raise NotImplementedError

    def described(self) -> dict[str, Any]:
        return {"kind": KINDS[type(self)]}


class Statistics(Eye):
    def forward(self, x: Tensor, seen: Seen) -> Tensor:
        return geometry.pooled_statistics(x)


class ExitEye(Eye):
    """The score of the channels' statistics and of the doubt about the class; that of an image which has left is minus
    infinity, as no block is open to it. It has left if what the eye before saw lay below `past`, the threshold there.
    """

    carries = True

    def __init__(self, channels: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(channels, classes)  # a copy of the network's
        self.layers = GateHead(STATISTICS * channels + 1, hidden)
        self.register_buffer("past", torch.tensor(-math.inf))

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        return self.scored(geometry.pooled_statistics(x).chunk(STATISTICS, dim=1), seen)

    def scored(self, statistics: tuple[Tensor, ...], seen: Tensor | None) -> Tensor:
        """Of the channels' means (B, C) first, and the other statistics."""
        score = self.layers.score(torch.cat((*statistics, doubt(self.classifier(statistics[0]))), dim=1))
        return score if seen is None else torch.where(seen > self.past, score, -math.inf)

    def described(self) -> dict[str, Any]:
        sizes = {"channels": self.classifier.in_features, "classes": self.classifier.out_features}
        return super().described() | sizes | {"hidden": self.layers.w1.out_features}


class Mean(Eye):
    def forward(self, x: Tensor, seen: Seen) -> Tensor:
        return geometry.global_average_pool(x)


class Whole(Eye):
    def forward(self, x: Tensor, seen: Seen) -> Tensor:
        return x


class Memory(Eye):
    """A step of the LSTM whose state went through the blocks before."""

    carries = True

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.embed, self.cell = nn.Linear(channels, hidden), Cell(hidden, hidden)

    def begin(self, images: Tensor) -> tuple[Tensor, Tensor]:
        zero = images.new_zeros(images.shape[0], self.cell.hidden)  # a length would be fixed by tracing
        return zero, zero

    def forward(self, x: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        return self.cell(self.embed(x.mean((2, 3))), seen)

    def described(self) -> dict[str, Any]:
        return super().described() | {"channels": self.embed.in_features, "hidden": self.cell.hidden}


class Fingerprint(Eye):
    """Of the image itself, taken before the first block."""

    carries = True
    exports = False

    def begin(self, images: Tensor) -> Tensor:
        return fingerprint(images)

    def forward(self, x: Tensor, seen: Seen) -> Seen:
        return seen


class Head(nn.Module):
    """Open, (B, 1) bool, where the score of what was seen lies above `turn`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.zeros(()))

    def score(self, seen: Seen) -> Tensor:
        raise NotImplementedError

    def forward(self, seen: Seen) -> Tensor:
        return self.score(seen) > self.turn

    def described(self) -> dict[str, Any]:
        return {"kind": KINDS[type(self)]}


class GateHead(Head):
    """w2·ReLU(W1·seen + b1) + b2, with a slope `leak` below zero. Of a predictive gate: predictor and controller side
    by side, γ and the statistics' mean and deviation multiplied in.
    """

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


class TurnHead(Head):
    """Of a score that was seen already, (B, 1)."""

    def score(self, seen: Tensor) -> Tensor:
        return seen


class AttentionHead(Head):
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

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.readout = nn.Linear(hidden, 1)

    def score(self, seen: tuple[Tensor, Tensor]) -> Tensor:
        return self.readout(seen[0])

    def described(self) -> dict[str, Any]:
        return super().described() | {"hidden": self.readout.in_features}


class FingerprintHead(Head):
    def __init__(self, place: int, rate: float) -> None:
        super().__init__()
        self.place, self.rate = place, rate

    def score(self, seen: Tensor) -> Tensor:
        return (self.rate - uniform(seen, self.place)).float()[:, None]

    def described(self) -> dict[str, Any]:
        return super().described() | {"place": self.place, "rate": self.rate}


KINDS = {
    Statistics: "statistics",
    ExitEye: "exit",
    Mean: "mean",
    Whole: "whole",
    Memory: "memory",
    Fingerprint: "fingerprint",
    GateHead: "layers",
    TurnHead: "turn",
    AttentionHead: "attention",
    ConvolutionHead: "convolution",
    MemoryHead: "state",
    FingerprintHead: "hash",
}


def built(card: dict[str, Any]) -> nn.Module:
    """The eye or the head that was described."""
    kinds = {word: made for made, word in KINDS.items()}
    if card["kind"] not in kinds:
        raise UserError(f"a card of another version: {card['kind']} is none of {', '.join(kinds)}; export again")
    return kinds[card["kind"]](**{key: value for key, value in card.items() if key != "kind"})


@torch.no_grad()
def deployed(gate: Gate) -> tuple[Eye, Head]:
    """What a trained gate becomes. One that needs F(x) first has no such form."""
    if not gate.decides_first:
        raise UserError(
            "its gates look at F(x) before they decide, so nothing can be skipped; "
            "train with gate=predictive (gate.signal=predicted)"
        )
    eye, head = FORMS[type(gate)](gate)
    head.turn.fill_(gate.turn)
    return eye, head


def _predictive(gate: PredictiveGate) -> tuple[Eye, Head]:
    parts = [gate.predictor] if gate.controller is None else [gate.predictor, gate.controller]
    hidden = sum(part.w1.out_features for part in parts)
    head = GateHead(gate.predictor.w1.in_features, hidden)
    mean, deviation = gate.standardise.mean, gate.standardise.deviation
    head.w1.weight.copy_(torch.cat([part.w1.weight for part in parts]) / deviation)
    head.w1.bias.copy_(torch.cat([part.w1.bias for part in parts]) - head.w1.weight @ mean)
    head.w2.weight.copy_(gate.gamma * torch.cat([part.w2.weight for part in parts], dim=1))
    head.w2.bias.copy_(gate.gamma * sum(part.w2.bias for part in parts))
    return Statistics(), head


def _exit(gate: ExitGate) -> tuple[Eye, Head]:
    [before], [classifier], (_, head) = gate.before, gate.classifier, _predictive(gate)
    eye = ExitEye(classifier.in_features, head.w1.out_features, classifier.out_features)
    eye.layers, eye.classifier = head, copy.deepcopy(classifier)
    if before is not None:
        eye.past.fill_(before.turn)
    return eye, TurnHead()


def _controller(gate: ControllerGate) -> tuple[Eye, Head]:
    w1, w2 = gate.controller.w1, gate.controller.w2
    head = GateHead(w1.in_features, w1.out_features, leak=0.0)
    head.w1.weight.copy_(w1.weight)
    head.w2.weight.copy_(gate.gamma * w2.weight)
    for layer in (head.w1, head.w2):
        layer.bias.zero_()
    return Mean(), head


def _aig(gate: AigGate) -> tuple[Eye, Head]:
    first, bn, _, last = gate.score.eval()
    head = GateHead(first.in_features, first.out_features, leak=0.0)
    head.w1, head.w2 = fuse_linear_bn_eval(first, bn), copy.deepcopy(last)
    return Mean(), head


def _attention(gate: AttentionGate) -> tuple[Eye, Head]:
    head = AttentionHead(gate.score.w1.in_features, gate.score.w1.out_features)
    head.attention.load_state_dict(gate.score.state_dict())
    return Mean(), head


def _skipnet(gate: SkipNetGate) -> tuple[Eye, Head]:
    conv, bn, *_, last = gate.score.eval()
    head = ConvolutionHead(conv.in_channels)
    head.conv, head.readout = fuse_conv_bn_eval(conv, bn), copy.deepcopy(last)
    return Whole(), head


def _recurrent(gate: RecurrentGate) -> tuple[Eye, Head]:
    eye, head = Memory(gate.embed.in_features, gate.cell.hidden), MemoryHead(gate.cell.hidden)
    eye.embed.load_state_dict(gate.embed.state_dict())
    eye.cell.load_state_dict(gate.cell.state_dict())
    head.readout.load_state_dict(gate.readout.state_dict())
    return eye, head


def _random(gate: RandomGate) -> tuple[Eye, Head]:
    return Fingerprint(), FingerprintHead(gate.place, gate.rate)


FORMS: dict[type[Gate], Callable[[Any], tuple[Eye, Head]]] = {
    PredictiveGate: _predictive,
    ExitGate: _exit,
    ControllerGate: _controller,
    AigGate: _aig,
    AttentionGate: _attention,
    SkipNetGate: _skipnet,
    RecurrentGate: _recurrent,
    RandomGate: _random,
}
