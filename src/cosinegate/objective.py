"""The training objective: cross-entropy, consistency and the FLOPs penalty (Eq. 17-21).

The paper's penalty is on the mean gate of the whole network, from above. Other papers' are here beside it, by config.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn

from cosinegate.config.checks import with_values
from cosinegate.config.choices import Sided, Target
from cosinegate.config.schema import ObjectiveConfig
from cosinegate.hardware.processes import Share, over_processes
from cosinegate.networks import Output


class Losses(NamedTuple):
    """The total that is minimised, and its terms before their weights."""

    total: Tensor
    ce: Tensor
    cons: Tensor
    flops: Tensor


def prog(t: float, warmup_epochs: float) -> float:
    """min(1, t / T_warmup) (Eq. 19); 1 from the start without a warmup."""
    return 1.0 if warmup_epochs <= 0 else min(1.0, t / warmup_epochs)


class CosineGateLoss(nn.Module):
    """L = L_CE + λ_cons·L_cons + λ_flops·prog(t)·max(0, ḡ - τ_target)² (Eq. 21), where t is the epoch.

    With Sided.two a mean gate below the target costs as much as one above it. With Target.block every gated block has a
    mean gate of its own (ConvNet-AIG), and the penalty is the mean of theirs. `block_weights` (N,) are what the blocks
    count for in ḡ, `gated` (N,) which of them have a gate.

    With several processes each computes its part of the global batch's terms, so that their average is the global loss.
    """

    def __init__(
        self,
        *,
        lambda_flops: float,
        lambda_cons: float,
        tau_target: float,
        warmup_epochs: float = 0.0,
        sided: Sided | str = Sided.one,
        target: Target | str = Target.network,
        block_weights: Tensor | None = None,
        gated: Tensor | None = None,
    ) -> None:
        super().__init__()
        terms = {"lambda_flops": lambda_flops, "lambda_cons": lambda_cons, "tau_target": tau_target}
        choices = {"warmup_epochs": warmup_epochs, "sided": sided, "target": target}
        checked = with_values(OmegaConf.structured(ObjectiveConfig), terms | choices)
        self.lambda_flops, self.lambda_cons, self.tau_target = lambda_flops, lambda_cons, tau_target
        self.sided, self.target = checked.sided, checked.target
        self.warmup_epochs = warmup_epochs
        self.prog = 1.0  # prog(t) of the last call
        self.share: Share | None = None
        weights = None if block_weights is None else block_weights / block_weights.sum()
        self.register_buffer("block_weights", weights, persistent=False)  # (N,), sums to 1; None: all alike
        self.register_buffer("gated", gated, persistent=False)  # (N,) bool; None: all

    def mean_gate(self, gates: Tensor) -> Tensor:
        """ḡ over the blocks and the global batch (Eq. 17) of gates (B, N)."""
        per_sample = gates.mean(1) if self.block_weights is None else gates @ self.block_weights
        return over_processes(self._weight * per_sample.mean())

    def penalty(self, gates: Tensor) -> Tensor:
        """max(0, ḡ - τ_target)² (Eq. 18) of gates (B, N), before prog(t)."""
        if self.target is Target.network:
            return self._excess(self.mean_gate(gates)).square()
        open_fraction, weights = self._by_block(gates)
        return (weights * self._excess(open_fraction).square()).sum()

    def _excess(self, mean_gate: Tensor) -> Tensor:
        excess = mean_gate - self.tau_target
        return excess.clamp_min(0.0) if self.sided is Sided.one else excess

    def _by_block(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        """The mean gate of every gated block over the global batch, and what it counts for; both (G,)."""
        open_fraction = over_processes(self._weight * gates.mean(0))
        weights = torch.ones_like(open_fraction)
        if self.block_weights is not None:
            weights = self.block_weights.to(open_fraction.dtype)
        if self.gated is not None:
            open_fraction, weights = open_fraction[self.gated], weights[self.gated]
        return open_fraction, weights / weights.sum()

    @property
    def _weight(self) -> float:
        return 1.0 if self.share is None else self.share.weight

    def forward(self, output: Output, target: Tensor, epoch: float) -> Losses:
        """Returns the loss of class scores and routing (B, K), (B, N) for labels (B,); `epoch` counts from 0."""
        self.prog = prog(epoch, self.warmup_epochs)
        ce = self._weight * F.cross_entropy(output.logits, target)
        if output.routing is None:
            zero = ce.new_zeros(())
            return Losses(ce, ce, zero, zero)
        cons = self._weight * output.routing.consistency.sum(1).mean()  # Eq. 20
        flops = self.prog * self.penalty(output.routing.gates)
        return Losses(ce + self.lambda_cons * cons + self.lambda_flops * flops, ce, cons, flops)
