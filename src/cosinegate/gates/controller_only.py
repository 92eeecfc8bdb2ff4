"""An ablation: the paper's equation without CIR, ℓ = γ·c(x). What is left needs no F, so it decides before it."""

import torch
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.choices import Polarity
from cosinegate.gates.cosine import Controller
from cosinegate.gates.decision import Decision
from cosinegate.gates.gate import Gate, Seen, Slot, decided
from cosinegate.schema import GateConfig


class ControllerGate(Gate):
    """W2 starts at zero, so that it starts half open, wherever CosineGate starts."""

    def __init__(self, controller: Controller, gamma: float, learnable: bool, opening: nn.Module) -> None:
        super().__init__(opening)
        self.controller = controller
        self.gamma = nn.Parameter(torch.tensor(gamma), requires_grad=learnable)

    def look(self, x: Tensor, seen: Seen) -> Tensor:
        return geometry.global_average_pool(x)

    def decide(self, seen: Seen) -> Decision:
        logit = self.gamma * self.controller(seen)
        return decided(self.opening(logit).gate, logit)


def make(config: GateConfig, slot: Slot) -> ControllerGate:
    controller = Controller(slot.channels, max(2, slot.channels // config.controller.reduction))
    gamma = abs(config.gamma.init) if config.polarity is Polarity.novelty else config.gamma.init
    return ControllerGate(controller, gamma, config.gamma.learnable, slot.opening())
