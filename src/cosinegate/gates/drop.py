"""A control: stochastic depth (Huang et al. 2016, https://arxiv.org/abs/1603.09382), in training only."""

import torch
from torch import nn

from cosinegate.gates.decision import Decision
from cosinegate.gates.gate import Seen, Slot, StaticGate, decided
from cosinegate.relaxation import gumbel_difference
from cosinegate.schema import GateConfig


class DropGate(StaticGate):
    """In training F is dropped with a chance that grows with depth; in evaluation every block is open.

    As timm has it: drawn for each sample, not for the batch, and what is kept is divided by its chance, so that
    evaluation needs no factor.
    """

    def __init__(self, keep: float, opening: nn.Module) -> None:
        super().__init__(opening)  # not asked: it knows this process's share of a batch
        self.keep = keep

    @property
    def turn(self) -> float:
        return 0.0

    @property
    def constant(self) -> bool:
        return True

    def decide(self, seen: Seen) -> Decision:
        logit = seen.new_ones(len(seen))
        if not self.training or self.keep == 1:
            return decided(torch.ones_like(logit), logit)
        chance = torch.logit(seen.new_full((len(seen),), self.keep))
        kept = (chance + gumbel_difference(chance, self.opening.share) > 0).to(logit.dtype)
        return decided(kept / self.keep, logit)

    def extra_repr(self) -> str:
        return f"keep={self.keep:.3f}"


def make(config: GateConfig, slot: Slot) -> DropGate:
    """`rate` is what the last block keeps; the chance falls linearly to it, as in the original."""
    return DropGate(1 - (slot.place + 1) / slot.number * (1 - config.rate), slot.opening())
