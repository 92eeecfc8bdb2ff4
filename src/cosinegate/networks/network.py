"""A network of gated residual blocks: a stem, the blocks, a head. Any architecture that is such a list can be one."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cosinegate.gates import Decision
from cosinegate.geometry import Dots, consistency, global_average_pool
from cosinegate.networks.block import BlockRouting, ResidualBlock


class Routing(NamedTuple):
    """What every block decided for a batch; each (B, N). A block without a gate is open, one without F closed."""

    gates: Tensor  # z in training, 0 or 1 in evaluation
    logits: Tensor
    cir: Tensor  # not a number where the gate does not look at F(x)
    consistency: Tensor


class Output(NamedTuple):
    """Class scores, and the routing that led to them; None for a network without gates."""

    logits: Tensor  # (B, K)
    routing: Routing | None


class Step(NamedTuple):
    """One block of a pass through a network."""

    index: int
    block: ResidualBlock
    x: Tensor  # the block's input
    y: Tensor  # its output
    routing: BlockRouting | None


AfterBlock = Callable[[Step], Tensor | None]  # returns the indices of the samples that go on; None: all


class GatedNetwork(nn.Module):
    """A stem, blocks one after the other, and a head that computes class scores from the mean over the last map."""

    def __init__(self, *, stem: nn.Module, blocks: list[ResidualBlock], head: nn.Linear, detach_target: bool) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.ModuleList(blocks)
        self.detach_target = detach_target  # of the consistency term
        self.head = head

    @property
    def num_classes(self) -> int:
        return self.head.out_features

    @property
    def has_gates(self) -> bool:
        return any(block.gate is not None for block in self.blocks)

    def run(self, images: Tensor, after_block: AfterBlock | None = None) -> Tensor | None:
        """Returns the class scores (B, K) of the samples that are left at the end; None if none is.

        `after_block` is called after every block, and may say which samples go on.
        """
        x = self.stem(images)
        for index, block in enumerate(self.blocks):
            y, routing = block(x, images)
            stays = None if after_block is None else after_block(Step(index, block, x, y, routing))
            x = y
            if stays is not None:
                x, images = y[stays], images[stays]
                if not torch.compiler.is_compiling() and len(x) == 0:
                    return None
        return self.classify(x)

    def classify(self, x: Tensor) -> Tensor:
        """Class scores (B, K) of the last block's output."""
        return self.head(global_average_pool(x))

    def forward(self, images: Tensor) -> Output:
        taken: list[BlockRouting | None] = []
        logits = self.run(images, lambda step: taken.append(step.routing))
        return Output(logits, self._routing(taken, logits) if any(taken) else None)

    def _routing(self, taken: list[BlockRouting | None], logits: Tensor) -> Routing:
        one, unknown, zero = (logits.new_full(logits.shape[:1], value) for value in (1.0, torch.nan, 0.0))
        always, never = (Decision(gate, unknown, unknown) for gate in (one, zero))
        without = [never if block.residual is None else always for block in self.blocks]
        nothing = Dots(one, zero, zero, zero)  # without a residual nothing is lost by a closed gate
        pairs = zip(taken, without, strict=True)
        decided = Decision(*_stacked(routing.decision if routing else alike for routing, alike in pairs))
        dots = Dots(*_stacked((routing and routing.dots) or nothing for routing in taken))
        return Routing(*decided, consistency(dots, decided.gate, self.detach_target))

    def extra_repr(self) -> str:
        return f"detach_target={self.detach_target}"


def _stacked(records: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    """The fields of N records, each (B,), as (B, N)."""
    return [torch.stack(field, dim=1) for field in zip(*records, strict=True)]
