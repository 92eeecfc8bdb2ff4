"""The training objective: cross-entropy, consistency and the FLOPs penalty (Eq. 17-21); a predictor's error."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosinegate.choices import Sided
from cosinegate.networks import Output, Routing
from cosinegate.processes import Share, over_processes


class Losses(NamedTuple):
    """The total that is minimised and its terms before their weights."""

    total: Tensor
    ce: Tensor
    cons: Tensor
    flops: Tensor
    predict: Tensor
    price: Tensor


def prog(t: float, warmup_epochs: float, start_epoch: float = 0.0) -> float:
    """min(1, t / T_warmup) (Eq. 19), with t counted from `start_epoch`; 1 from there without a warmup."""
    since = t - start_epoch
    if warmup_epochs <= 0:
        return float(since >= 0)
    return min(1.0, max(0.0, since) / warmup_epochs)


class Objective(nn.Module):
    """L = L_CE + λ_cons·L_cons + λ_flops·prog·max(0, ḡ - τ_target)² + λ_predict·L_predict. A callback moves `prog`.

    L_predict is the squared error of the predicted measure, averaged over the blocks that predict, and the error of
    logits which learn what skipping costs (`skip_cost.priced`); it reaches nothing but the gates. With Sided.two a mean
    gate below the target costs as much as one above it.

    With several processes each gives its `share` of the global batch's terms, so that their average is the global loss.
    """

    def __init__(
        self,
        lambda_flops: float,
        lambda_cons: float,
        tau_target: float,
        block_weights: Tensor | None = None,
        sided: Sided = Sided.one,
        lambda_predict: float = 0.0,
    ) -> None:
        super().__init__()
        self.lambda_flops = lambda_flops
        self.lambda_cons = lambda_cons
        self.tau_target = tau_target
        self.sided = sided
        self.lambda_predict = lambda_predict
        self.prog = 0.0
        self.share: Share | None = None
        weights = None if block_weights is None else block_weights / block_weights.sum()
        self.register_buffer("block_weights", weights, persistent=False)  # (N,), sums to 1; None: all alike

    def mean_gate(self, gates: Tensor) -> Tensor:
        """ḡ over the blocks and the global batch (Eq. 17) of gates (B, N)."""
        per_sample = gates.mean(1) if self.block_weights is None else gates @ self.block_weights
        return over_processes(self._weight * per_sample.mean())

    @staticmethod
    def prediction_error(routing: Routing) -> Tensor:
        """The mean squared error over the blocks that have a gate; of the others neither value is a number."""
        known = ~torch.isnan(routing.exact)
        error = torch.where(known, routing.cir - routing.exact, torch.zeros_like(routing.cir))
        return error.square().sum() / known.sum().clamp_min(1)

    @property
    def _weight(self) -> float:
        return 1.0 if self.share is None else self.share.weight

    def forward(self, output: Output, target: Tensor, price_error: Tensor | None = None) -> Losses:
        """`price_error` is that of logits as guesses of what skipping costs, where gates learn from it."""
        ce = self._weight * F.cross_entropy(output.logits, target)
        if output.routing is None:
            zero = ce.new_zeros(())
            return Losses(ce, ce, zero, zero, zero, zero)
        cons = self._weight * output.routing.consistency.sum(1).mean()
        excess = self.mean_gate(output.routing.gates) - self.tau_target
        flops = self.prog * (excess.clamp_min(0.0) if self.sided is Sided.one else excess).square()
        predict = self._weight * self.prediction_error(output.routing)
        price = ce.new_zeros(()) if price_error is None else self._weight * price_error
        total = ce + self.lambda_cons * cons + self.lambda_flops * flops + self.lambda_predict * (predict + price)
        return Losses(total, ce, cons, flops, predict, price)
