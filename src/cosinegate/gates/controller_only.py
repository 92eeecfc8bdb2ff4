"""An ablation: the paper's equation without CIR, ℓ = γ·c(x). It needs no F(x), so it decides before F."""

import torch
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.config.schema import CosineGateConfig
from cosinegate.gates.cosine import Controller, signed_gamma
from cosinegate.gates.decision import Decision, without_cir
from cosinegate.gates.gate import Gate, Slot


class ControllerGate(Gate):
    """Decides by the controller alone. W2 starts at zero, so the gate starts half open for every image."""

    def __init__(self, *, controller: Controller, gamma: float, learnable: bool, opening: nn.Module) -> None:
        super().__init__(opening)
        self.controller = controller
        self.gamma = nn.Parameter(torch.tensor(gamma), requires_grad=learnable)

    def decide(self, x: Tensor, images: Tensor) -> Decision:
        logit = self.gamma * self.controller(geometry.global_average_pool(x))
        return without_cir(self.opening(logit), logit)


def make(config: CosineGateConfig, slot: Slot) -> ControllerGate:
    return ControllerGate(
        controller=Controller(slot.channels, max(2, slot.channels // config.controller.reduction)),
        gamma=signed_gamma(config),
        learnable=config.gamma.learnable,
        opening=slot.opening(),
    )
