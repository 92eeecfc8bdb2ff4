"""From a gate's logit to how open it is: Gumbel-Softmax in training (Eq. 13-15), a threshold in evaluation (Eq. 16)."""

import math

import torch
from torch import Tensor, nn

from cosinegate.config.choices import Annealing
from cosinegate.hardware.processes import Share


def gumbel_difference(like: Tensor, share: Share | None = None) -> Tensor:
    """Returns g_1 - g_0 of two Gumbel samples, a logistic variable, drawn from one uniform sample.

    With a `share` of a global batch (B,), all processes draw for the whole batch and each takes its part.
    """
    if share is None:
        return torch.logit(torch.rand_like(like), eps=1e-6)
    return torch.logit(torch.rand(share.total, dtype=like.dtype, device=like.device), eps=1e-6)[
        share.start : share.stop
    ]


def relax(logit: Tensor, noise: Tensor | float, temperature: float, hard: bool) -> Tensor:
    """Returns softmax(([0, ℓ] + g) / τ) of the residual class, where `noise` is g_1 - g_0. All are (B,).

    `hard` rounds the value to 0 or 1 and keeps the relaxed gradient (straight-through).
    """
    z = torch.sigmoid((logit + noise) / temperature)
    return z + ((z > 0.5).to(z.dtype) - z).detach() if hard else z


def threshold_gate(logit: Tensor, threshold: float) -> Tensor:
    """Returns 1 where σ(ℓ) > δ, else 0."""
    return (torch.sigmoid(logit) > threshold).to(logit.dtype)


def anneal(annealing: Annealing, start: float, end: float, progress: float) -> float:
    """Returns the temperature when the fraction `progress` of the run is over."""
    if annealing is Annealing.linear:
        return start + (end - start) * progress
    if annealing is Annealing.exponential:
        return start * (end / start) ** progress
    if annealing is Annealing.cosine:
        return end + (start - end) * 0.5 * (1 + math.cos(math.pi * progress))
    return start


class Relaxation(nn.Module):
    """Opens the gates of a network by their logits. Callbacks move temperature and noise; evaluation uses neither."""

    def __init__(self, *, temperature: float, hard: bool, threshold: float, noisy: bool = True) -> None:
        super().__init__()
        self.temperature = temperature
        self.hard = hard
        self.threshold = threshold
        self.noisy = noisy
        self.share: Share | None = None

    @property
    def threshold_logit(self) -> float:
        """Returns the logit above which the gate is open in evaluation."""
        return math.log(self.threshold / (1 - self.threshold))

    def forward(self, logit: Tensor) -> Tensor:
        """Returns how open each sample's gate is, (B,): z in training, 0 or 1 in evaluation."""
        if not self.training:
            return threshold_gate(logit, self.threshold)
        noise = gumbel_difference(logit, self.share) if self.noisy else 0.0
        return relax(logit, noise, self.temperature, self.hard)

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}, hard={self.hard}, threshold={self.threshold}"
