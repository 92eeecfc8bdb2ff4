"""The paper's gate: ℓ = γ·(CIR + c(x)) (Eq. 11), relaxed in training and thresholded in evaluation."""

import torch
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.config.choices import Polarity
from cosinegate.config.schema import CosineGateConfig
from cosinegate.gates.decision import Decision
from cosinegate.gates.gate import Gate, Slot
from cosinegate.geometry import Dots


class Controller(nn.Module):
    """c(x) = W2 ReLU(W1 GAP(x)) (Eq. 12). W2 starts at zero, so that the logit starts as γ·CIR (Eq. 10)."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(channels, hidden, bias=False)
        self.w2 = nn.Linear(hidden, 1, bias=False)
        nn.init.zeros_(self.w2.weight)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.w2(torch.relu(self.w1(pooled))).squeeze(1)  # (B,)


class CosineGate(Gate):
    """Compares the residual with the identity path, so it needs F(x) before it can close the block."""

    decides_first = False

    def __init__(self, *, opening: nn.Module, gamma: float, learnable: bool, controller: Controller | None) -> None:
        super().__init__(opening)
        self.gamma = nn.Parameter(torch.tensor(gamma), requires_grad=learnable)
        self.controller = controller

    def compare(self, x: Tensor, dots: Dots) -> Decision:
        cir = geometry.cir(dots)
        offset = self.controller(geometry.global_average_pool(x)) if self.controller is not None else 0.0
        logit = self.gamma * (cir + offset)
        return Decision(self.opening(logit), logit, cir)


def signed_gamma(config: CosineGateConfig) -> float:
    """Returns γ_0 as printed, or +|γ_0| with the polarity in which high CIR opens."""
    return abs(config.gamma.init) if config.polarity is Polarity.novelty else config.gamma.init


def make(config: CosineGateConfig, slot: Slot) -> CosineGate:
    hidden = max(2, slot.channels // config.controller.reduction)
    controller = Controller(slot.channels, hidden) if config.controller.enabled else None
    return CosineGate(
        opening=slot.opening(),
        gamma=signed_gamma(config),
        learnable=config.gamma.learnable,
        controller=controller,
    )
