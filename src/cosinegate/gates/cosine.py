"""The paper's gate: ℓ = γ·(CIR + c(x)) (Eq. 11), relaxed in training and thresholded in evaluation."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.choices import Polarity
from cosinegate.geometry import Dots
from cosinegate.relaxation import Relaxation


class Decision(NamedTuple):
    """What one gate decided for a batch; each (B,)."""

    gate: Tensor  # z in training, 0 or 1 in evaluation
    logit: Tensor
    cir: Tensor


class Controller(nn.Module):
    """c(x) = W2 ReLU(W1 GAP(x)) (Eq. 12). W2 starts at zero, so that the logit starts as γ·CIR (Eq. 10)."""

    def __init__(self, channels: int, reduction: int) -> None:
        super().__init__()
        hidden = max(2, channels // reduction)
        self.w1 = nn.Linear(channels, hidden, bias=False)
        self.w2 = nn.Linear(hidden, 1, bias=False)
        nn.init.zeros_(self.w2.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(torch.relu(self.w1(geometry.global_average_pool(x)))).squeeze(1)  # (B,)


class CosineGate(nn.Module):
    """Compares the residual with the identity path; so it needs F(x) before it can say that F(x) was not needed."""

    def __init__(
        self, relaxation: Relaxation, gamma: float, polarity: Polarity, learnable: bool, controller: Controller | None
    ) -> None:
        super().__init__()
        start = torch.tensor(abs(gamma) if polarity is Polarity.novelty else gamma)
        self.gamma = nn.Parameter(start, requires_grad=learnable)
        self.controller = controller
        self.relaxation = relaxation

    def forward(self, x: Tensor, dots: Dots) -> Decision:
        cir = geometry.cir(dots)
        offset = self.controller(x) if self.controller is not None else 0.0
        logit = self.gamma * (cir + offset)
        return Decision(self.relaxation(logit), logit, cir)
