"""The CIFAR ResNet of He et al. (2016), depth 6n+2: a 3x3 stem, three stages of n blocks, GAP, a linear head."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cosinegate.choices import Look, Shortcut
from cosinegate.gates import Decision
from cosinegate.geometry import Dots, consistency, global_average_pool
from cosinegate.networks.block import BlockRouting, ResidualBlock


class Routing(NamedTuple):
    """What every block decided for a batch; each (B, N). A block without a gate is open."""

    gates: Tensor  # z in training, 0 or 1 in evaluation
    logits: Tensor
    cir: Tensor  # what stood in the equation: the exact measure, or the one that was predicted
    exact: Tensor  # the exact measure, where F ran for every sample
    agrees: Tensor  # 1 where the exact measure would have decided the same
    consistency: Tensor


class Output(NamedTuple):
    """Class scores, and the routing that led to them; None for a dense network."""

    logits: Tensor  # (B, classes)
    routing: Routing | None


class ResNet(nn.Module):
    """`make_gate(channels, is_first)` makes the gate of a block by the channels that it is shown and whether it is
    the first of its stage, or None. `look` says where gates that decide first take their statistics, `consistency`
    whether that term is trained and `detach_target` how.
    """

    def __init__(
        self,
        blocks_per_stage: list[int],
        width: int,
        in_channels: int,
        num_classes: int,
        shortcut: Shortcut,
        post_activation: bool,
        make_gate: Callable[[int, bool], nn.Module | None],
        look: Look,
        consistency: bool,
        detach_target: bool,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        blocks = []
        inputs = width
        for stage, number in enumerate(blocks_per_stage):
            seen = 0  # channels of what a gate of this stage has looked at
            for index in range(number):
                outputs = width * 2**stage
                stride = 2 if stage > 0 and index == 0 else 1
                shares = look is Look.stage and seen > 0
                gate = make_gate(seen if shares else inputs, index == 0)
                looks = gate is not None and gate.decides_first and not shares
                seen = inputs if looks else seen
                blocks.append(
                    ResidualBlock(inputs, outputs, stride, shortcut, post_activation, gate, looks, consistency)
                )
                inputs = outputs
        self.blocks = nn.ModuleList(blocks)
        self.detach_target = detach_target
        self.head = nn.Linear(inputs, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Output:
        x = self.stem(x)
        taken, seen = [], None
        for block in self.blocks:
            seen = block.look(x, seen)
            x, routing = block(x, seen)
            taken.append(routing)
        logits = self.classify(x)
        return Output(logits, self._routing(taken, logits) if any(taken) else None)

    def classify(self, x: Tensor) -> Tensor:
        """Class scores of what the last block gave."""
        return self.head(global_average_pool(x))

    def _routing(self, taken: list[BlockRouting | None], logits: Tensor) -> Routing:
        one, unknown, zero = (logits.new_full(logits.shape[:1], value) for value in (1.0, torch.nan, 0.0))
        always = Decision(one, unknown, unknown, unknown, unknown)
        nothing = Dots(one, zero, zero, zero)  # without a residual nothing is lost by a closed gate
        decided = Decision(*_stacked(routing.decision if routing else always for routing in taken))
        dots = Dots(*_stacked((routing and routing.dots) or nothing for routing in taken))
        return Routing(*decided, consistency(dots, decided.gate, self.detach_target))

    def extra_repr(self) -> str:
        return f"detach_target={self.detach_target}"


def _stacked(records: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    """The fields of N records, each (B,), as (B, N)."""
    return [torch.stack(field, dim=1) for field in zip(*records, strict=True)]
