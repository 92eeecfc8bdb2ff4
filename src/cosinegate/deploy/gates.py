"""A gate as it is deployed: an eye, which sees something of a block's input, and a head, which decides by that.

Both can be described in JSON and built again.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from cosinegate.deploy.eyes import ExitEye, Eye, Fingerprint, Mean, Memory, Statistics, Whole
from cosinegate.deploy.heads import (
    AttentionHead,
    CompareHead,
    ConvolutionHead,
    FingerprintHead,
    GateHead,
    Head,
    MemoryHead,
    TurnHead,
)
from cosinegate.errors import UserError
from cosinegate.gates import CosineGate, Gate, PredictiveGate
from cosinegate.gates.aig import AigGate
from cosinegate.gates.attention import AttentionGate
from cosinegate.gates.controller_only import ControllerGate
from cosinegate.gates.exit import ExitGate
from cosinegate.gates.pooled import PooledGate
from cosinegate.gates.random import RandomGate
from cosinegate.gates.skipnet import SkipNetGate
from cosinegate.gates.skipnet_recurrent import RecurrentGate

KINDS: dict[str, type[Eye | Head]] = {made.kind: made for base in (Eye, Head) for made in base.__subclasses__()}


def built(card: dict[str, Any]) -> nn.Module:
    """The eye or the head that was described."""
    if card["kind"] not in KINDS:
        raise UserError(f"a card of another version: {card['kind']} is none of {', '.join(KINDS)}; export again")
    return KINDS[card["kind"]](**{key: value for key, value in card.items() if key != "kind"})


@torch.no_grad()
def deployed(gate: Gate, compares: bool = False) -> tuple[Eye | None, Head]:
    """What a trained gate becomes. One that needs F(x) first cannot skip, and is taken only where it may compare."""
    if not gate.decides_first and not compares:
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
    [before], classifier, (_, head) = gate.before, gate.classifier, _predictive(gate)
    [network], own = gate.shared, gate.own and gate.own.w1.out_features
    eye = ExitEye(network.in_features, head.w1.out_features, network.out_features, own)
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


def _cosine(gate: CosineGate) -> tuple[None, Head]:
    controller = gate.controller
    sizes = (None, None) if controller is None else (controller.w1.in_features, controller.w1.out_features)
    head = CompareHead(gate.measure.name, *sizes)
    head.gamma.copy_(gate.gamma)
    if controller is not None:
        head.w1.weight.copy_(controller.w1.weight)
        head.w2.weight.copy_(gate.gamma * controller.w2.weight)
    return None, head


def _pooled(gate: PooledGate) -> tuple[Eye, Head]:
    first, _, last = gate.score
    head = GateHead(first.in_features, first.out_features, leak=0.0)
    head.w1, head.w2 = copy.deepcopy(first), copy.deepcopy(last)
    return Statistics(), head


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


FORMS: dict[type[Gate], Callable[[Any], tuple[Eye | None, Head]]] = {
    CosineGate: _cosine,
    PooledGate: _pooled,
    PredictiveGate: _predictive,
    ExitGate: _exit,
    ControllerGate: _controller,
    AigGate: _aig,
    AttentionGate: _attention,
    SkipNetGate: _skipnet,
    RecurrentGate: _recurrent,
    RandomGate: _random,
}
