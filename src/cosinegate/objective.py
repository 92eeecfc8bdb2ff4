"""The training objective: cross-entropy, consistency and the FLOPs penalty (Eq. 17-21)."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from cosinegate.networks import Output
from cosinegate.processes import Share, over_processes


class Losses(NamedTuple):
    """The total that is minimised and its three terms before their weights."""

    total: Tensor
    ce: Tensor
    cons: Tensor
    flops: Tensor


def prog(t: float, warmup_epochs: float) -> float:
    """min(1, t / T_warmup) (Eq. 19); 1 from the start without a warmup."""
    return 1.0 if warmup_epochs <= 0 else min(1.0, t / warmup_epochs)


class Objective(nn.Module):
    """L = L_CE + λ_cons·L_cons + λ_flops·prog·max(0, ḡ - τ_target)². A callback moves `prog`.

    With several processes each gives its `share` of the global batch's terms, so that their average is the global loss.
    """

    def __init__(
        self, lambda_flops: float, lambda_cons: float, tau_target: float, block_weights: Tensor | None = None
    ) -> None:
        super().__init__()
        self.lambda_flops = lambda_flops
        self.lambda_cons = lambda_cons
        self.tau_target = tau_target
        self.prog = 0.0
        self.share: Share | None = None
        weights = None if block_weights is None else block_weights / block_weights.sum()
        self.register_buffer("block_weights", weights, persistent=False)  # (N,), sums to 1; None: all alike

    def mean_gate(self, gates: Tensor) -> Tensor:
        """ḡ over the blocks and the global batch (Eq. 17) of gates (B, N)."""
        per_sample = gates.mean(1) if self.block_weights is None else gates @ self.block_weights
        return over_processes(self._weight * per_sample.mean())

    @property
    def _weight(self) -> float:
        return 1.0 if self.share is None else self.share.weight

    def forward(self, output: Output, target: Tensor) -> Losses:
        ce = self._weight * F.cross_entropy(output.logits, target)
        if output.routing is None:
            zero = ce.new_zeros(())
            return Losses(ce, ce, zero, zero)
        cons = self._weight * output.routing.consistency.sum(1).mean()
        excess = (self.mean_gate(output.routing.gates) - self.tau_target).clamp_min(0.0)
        flops = self.prog * excess.square()
        return Losses(ce + self.lambda_cons * cons + self.lambda_flops * flops, ce, cons, flops)
