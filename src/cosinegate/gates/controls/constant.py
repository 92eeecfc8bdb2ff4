"""A control: one learned constant for each block. A block that it closes is closed for every image: learned pruning."""

import torch
from torch import Tensor, nn

from cosinegate.config.schema import ConstantGateConfig
from cosinegate.gates.decision import Decision, without_cir
from cosinegate.gates.gate import Gate, Slot


class ConstantGate(Gate):
    """A learned logit, relaxed in training like those of other gates."""

    def __init__(self, *, start: float, opening: nn.Module) -> None:
        super().__init__(opening)
        self.logit = nn.Parameter(torch.logit(torch.tensor(start)))

    def decide(self, x: Tensor, images: Tensor) -> Decision:
        logit = self.logit + self.logit.new_zeros(len(x))  # a view of a parameter would confuse the FLOP counter
        return without_cir(self.opening(logit), logit)


def make(config: ConstantGateConfig, slot: Slot) -> ConstantGate:
    return ConstantGate(start=config.start, opening=slot.opening())
