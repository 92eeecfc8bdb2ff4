"""The CIFAR ResNet of He et al. (2016), depth 6n+2: a 3x3 stem, three stages of n blocks, GAP, a linear head."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cosinegate.choices import Shortcut
from cosinegate.geometry import Dots, consistency, global_average_pool
from cosinegate.networks.block import ResidualBlock


class Routing(NamedTuple):
    """What every gate decided for a batch; each (B, N) over the N gated blocks."""

    gates: Tensor  # z in training, 0 or 1 in evaluation
    logits: Tensor
    cir: Tensor
    consistency: Tensor


class Output(NamedTuple):
    """Class scores, and the routing that led to them; None for a dense network."""

    logits: Tensor  # (B, classes)
    routing: Routing | None


class ResNet(nn.Module):
    """`make_gate(channels)` makes a gate for a block whose input has that many channels; None leaves it dense."""

    def __init__(
        self,
        blocks_per_stage: list[int],
        width: int,
        in_channels: int,
        num_classes: int,
        shortcut: Shortcut,
        post_activation: bool,
        make_gate: Callable[[int], nn.Module] | None,
        detach_target: bool,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        blocks = []
        inputs = width
        for stage, number in enumerate(blocks_per_stage):
            for index in range(number):
                outputs = width * 2**stage
                stride = 2 if stage > 0 and index == 0 else 1
                gate = make_gate(inputs) if make_gate is not None else None
                blocks.append(ResidualBlock(inputs, outputs, stride, shortcut, post_activation, gate))
                inputs = outputs
        self.blocks = nn.ModuleList(blocks)
        self.detach_target = detach_target
        self.head = nn.Linear(inputs, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Output:
        x = self.stem(x)
        taken = []
        for block in self.blocks:
            x, routing = block(x)
            if routing is not None:
                taken.append(routing)
        logits = self.head(global_average_pool(x))
        if not taken:
            return Output(logits, None)
        gates, gate_logits, cir = _stacked(routing.decision for routing in taken)
        dots = Dots(*_stacked(routing.dots for routing in taken))
        return Output(logits, Routing(gates, gate_logits, cir, consistency(dots, gates, self.detach_target)))

    def extra_repr(self) -> str:
        return f"detach_target={self.detach_target}"


def _stacked(records: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    """The fields of N records, each (B,), as (B, N)."""
    return [torch.stack(field, dim=1) for field in zip(*records, strict=True)]
