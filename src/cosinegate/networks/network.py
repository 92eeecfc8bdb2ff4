"""A network of gated residual blocks: a stem, the blocks, a head. Any architecture that is such a list can be one."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cosinegate.gates import Decision, Seen
from cosinegate.gates.exit import ExitClassifier
from cosinegate.geometry import Dots, consistency, global_average_pool, pooled_statistics
from cosinegate.networks.block import BlockRouting, ResidualBlock


class Routing(NamedTuple):
    """What every block decided for a batch; each (B, N). A block without a gate is open, one without F closed."""

    gates: Tensor  # z in training, 0 or 1 in evaluation
    logits: Tensor
    cir: Tensor  # what stood in the equation: the exact measure, or the one that was predicted
    exact: Tensor  # the exact measure, where F ran for every sample
    agrees: Tensor  # 1 where the exact measure would have decided the same
    consistency: Tensor


class Output(NamedTuple):
    """Class scores, and the routing that led to them; None for a dense network. In training what else is learned from:
    the full path's scores, if asked for, and those of every exit, if there are any.
    """

    logits: Tensor  # (B, classes)
    routing: Routing | None
    full: Tensor | None = None  # (B, classes)
    exits: Tensor | None = None  # (E, B, classes)


class GatedNetwork(nn.Module):
    """The head gives class scores of the last block's mean over the map."""

    def __init__(self, stem: nn.Module, blocks: list[ResidualBlock], head: nn.Linear, detach_target: bool) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.ModuleList(blocks)
        self.detach_target = detach_target  # of the consistency term
        self.head = head
        self.held = False  # whether all but the gates stay as they are
        for block in blocks:
            if block.leaves:
                block.gate.show(head)

    def hold_trunk(self) -> None:
        """From now on training moves nothing but the gates: neither weights nor BatchNorm's moments."""
        self.held = True
        for part in self._trunk():
            part.requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> "GatedNetwork":
        super().train(mode)
        for part in self._trunk() if self.held else ():
            part.eval()
        return self

    def _trunk(self) -> list[nn.Module]:
        parts = (part for block in self.blocks for part in (block.shortcut, block.residual) if part is not None)
        return [self.stem, self.head, *parts]

    def begin(self, images: Tensor) -> Seen:
        """What the gates know before the first block."""
        gate = next((block.gate for block in self.blocks if block.gate is not None), None)
        return None if gate is None else gate.begin(images)

    def forward(self, images: Tensor, full_path: bool = False) -> Output:
        """With `full_path` a second path leaves the routed one where routes part: see `_full_path`."""
        x, seen = self.stem(images), self.begin(images)
        taken, exits, parting = [], [], None
        for place, block in enumerate(self.blocks):
            if parting is None and block.may_part:
                parting = place, x
            if self.training and block.leaves:
                exits.append(self.classify(x))
            seen = block.look(x, seen)
            x, routing = block(x, seen)
            taken.append(routing)
        logits, asked = self.classify(x), [block.gate for block in self.blocks if block.asks]
        if asked and not self.training:
            logits = asked[-1].answer(seen, logits)
        full = None
        if full_path:
            full = logits if parting is None else self._full_path(*parting)
        routing = self._routing(taken, logits) if any(taken) else None
        return Output(logits, routing, full, torch.stack(exits) if exits else None)

    def _full_path(self, place: int, x: Tensor) -> Tensor:
        """Class scores of block `place`'s input, all blocks open but those that are closed for every image; no gate is
        asked. BatchNorm's moments stay those of the routed images.
        """
        with _moments_kept(self):
            for block in self.blocks[place:]:
                s = block.shortcut(x)
                x = block.activation(s.clone() if block.is_closed else s + block.residual(x))
        return self.classify(x)

    def classify(self, x: Tensor) -> Tensor:
        """Class scores of what the last block gave; the head is an exit's where no image passes that exit."""
        return self.head(pooled_statistics(x) if isinstance(self.head, ExitClassifier) else global_average_pool(x))

    def _routing(self, taken: list[BlockRouting | None], logits: Tensor) -> Routing:
        one, unknown, zero = (logits.new_full(logits.shape[:1], value) for value in (1.0, torch.nan, 0.0))
        always, never = (Decision(gate, unknown, unknown, unknown, unknown) for gate in (one, zero))
        without = [never if block.residual is None else always for block in self.blocks]
        nothing = Dots(one, zero, zero, zero)  # without a residual nothing is lost by a closed gate
        pairs = zip(taken, without, strict=True)
        decided = Decision(*_stacked(routing.decision if routing else alike for routing, alike in pairs))
        dots = Dots(*_stacked((routing and routing.dots) or nothing for routing in taken))
        return Routing(*decided, consistency(dots, decided.gate, self.detach_target))

    def extra_repr(self) -> str:
        return f"detach_target={self.detach_target}"


@contextmanager
def _moments_kept(network: nn.Module) -> Iterator[None]:
    """Training normalises a batch by its own moments as ever, but none are learned from it."""
    layers = {m: m.track_running_stats for m in network.modules() if isinstance(m, nn.modules.batchnorm._NormBase)}
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer, tracked in layers.items():
            layer.track_running_stats = tracked


def _stacked(records: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    """The fields of N records, each (B,), as (B, N)."""
    return [torch.stack(field, dim=1) for field in zip(*records, strict=True)]
