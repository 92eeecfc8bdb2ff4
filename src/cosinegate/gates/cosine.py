"""The paper's gate: ℓ = γ·(CIR + c(x)) (Eq. 11), relaxed in training and thresholded in evaluation."""

import torch
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.choices import Measure, Polarity
from cosinegate.gates.decision import Decision
from cosinegate.gates.gate import Gate, Slot
from cosinegate.geometry import Dots
from cosinegate.schema import GateConfig


class Controller(nn.Module):
    """c(x) = W2 ReLU(W1 GAP(x)) (Eq. 12). W2 starts at zero, so that the logit starts as γ·CIR (Eq. 10).

    A `leak`, the slope of the ReLU below zero, and a `bias` the paper's does not have.
    """

    def __init__(self, features: int, hidden: int, leak: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.leak = leak
        self.w1 = nn.Linear(features, hidden, bias)
        self.w2 = nn.Linear(hidden, 1, bias)
        for parameter in self.w2.parameters():
            nn.init.zeros_(parameter)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.w2(nn.functional.leaky_relu(self.w1(pooled), self.leak)).squeeze(1)  # (B,)


class CosineGate(Gate):
    """Compares the residual with the identity path; so it needs F(x) before it can say that F(x) was not needed."""

    decides_first = False
    compares = True

    def __init__(
        self,
        opening: nn.Module,
        measure: Measure,
        gamma: float,
        polarity: Polarity,
        learnable: bool,
        controller: Controller | None,
    ) -> None:
        super().__init__()
        start = torch.tensor(abs(gamma) if polarity is Polarity.novelty else gamma)
        self.gamma = nn.Parameter(start, requires_grad=learnable)
        self.controller = controller
        self.opening = opening  # from a logit to how open: a Relaxation or a Quantile
        self.measure = measure

    def forward(self, x: Tensor, dots: Dots) -> Decision:
        exact = geometry.measured(self.measure, dots)
        offset = self.controller(geometry.global_average_pool(x)) if self.controller is not None else 0.0
        logit = self.gamma * (exact + offset)
        return Decision(self.opening(logit).gate, logit, exact, exact.detach(), torch.ones_like(exact))


def make(config: GateConfig, slot: Slot) -> CosineGate:
    hidden = max(2, slot.channels // config.controller.reduction)
    controller = Controller(slot.channels, hidden) if config.controller.enabled else None
    return CosineGate(
        slot.opening(), config.measure, config.gamma.init, config.polarity, config.gamma.learnable, controller
    )
