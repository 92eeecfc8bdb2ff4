"""A control: one learned constant a block. What it closes is closed for every image: pruning, learned by gradient."""

import torch
from torch import nn

from cosinegate.gates.decision import Decision
from cosinegate.gates.gate import Seen, Slot, StaticGate, decided
from cosinegate.schema import GateConfig


class ConstantGate(StaticGate):
    """One learned logit, relaxed in training as the others' are."""

    def __init__(self, start: float, opening: nn.Module) -> None:
        super().__init__(opening)
        self.logit = nn.Parameter(torch.logit(torch.tensor(start)))

    @property
    def constant(self) -> bool:
        return self.logit.item() > self.turn

    def decide(self, seen: Seen) -> Decision:
        logit = self.logit + self.logit.new_zeros(len(seen))  # a view of a parameter would confuse the FLOP counter
        return decided(self.opening(logit).gate, logit)


def make(config: GateConfig, slot: Slot) -> ConstantGate:
    return ConstantGate(0.5 if config.start is None else config.start, slot.opening())
