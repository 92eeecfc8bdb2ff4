"""A budget that is met by construction: per block, a running quantile of the logits is the threshold."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosinegate.choices import Sharing
from cosinegate.processes import Share

MOMENTUM = 0.05  # of the running threshold


class Budget(nn.Module):
    """One for all gates of a network: which share of the samples each of the G gated blocks computes.

    The shares' mean, weighted by `costs`, is what makes the mean gate over all blocks `tau_target`; `free` is what the
    blocks without a gate cost. It goes from all open to that by `prog`, which a callback moves. With Sharing.network
    each block has a learned worth, whose gradient is what opening the block more is worth to the loss, and the shares
    lie between `low` and `high`, so that no block becomes a constant.
    """

    def __init__(
        self, tau_target: float, costs: Tensor, free: float, sharing: Sharing, low: float, high: float
    ) -> None:
        super().__init__()
        self.tau_target, self.free, self.low, self.high = tau_target, free, low, high
        self.prog = 0.0
        self.share: Share | None = None  # of a global batch over several processes
        self.costs = costs.tolist()
        self.worth = nn.Parameter(torch.zeros(len(costs))) if sharing is Sharing.network else None

    def gated_share(self, tau_target: float) -> float:
        """The mean share of the gated blocks that gives this mean over all blocks."""
        total = sum(self.costs)
        return (tau_target * (total + self.free) - self.free) / total

    def shares(self, tau_target: float | None = None) -> list[float]:
        """(G,); with a `tau_target` what the trained network gives each block at that budget."""
        prog = self.prog if tau_target is None else 1.0
        mean = 1 - prog * (1 - self.gated_share(self.tau_target if tau_target is None else tau_target))
        if self.worth is None:
            return [mean] * len(self.costs)
        low, high = (1 - prog * (1 - bound) for bound in (min(self.low, mean), max(self.high, mean)))
        worth = self.worth.tolist()

        def at(level: float) -> list[float]:
            return [low + (high - low) / (1 + math.exp(min(max(level - w, -60.0), 60.0))) for w in worth]

        below, above = min(worth) - 60.0, max(worth) + 60.0  # levels between which the budget is met
        for _ in range(60):
            level = (below + above) / 2
            spent = sum(cost * share for cost, share in zip(self.costs, at(level), strict=True))
            below, above = (level, above) if spent > mean * sum(self.costs) else (below, level)
        return at(level)

    def slope(self, share: float) -> float:
        """How fast a block's share moves with its worth: not at all near the bounds."""
        low, high = (1 - self.prog * (1 - bound) for bound in (self.low, self.high))
        return max(0.0, (share - low) * (high - share) / (high - low))

    def extra_repr(self) -> str:
        return f"tau_target={self.tau_target}, low={self.low}, high={self.high}"


class RunningQuantile(nn.Module):
    """Opens for the share of samples that the budget gives block `place`, those with the highest logits.

    Training compares with the batch's own quantile, straight-through around it; evaluation with the running one, which
    the checkpoint keeps: it is the same for every batch.
    """

    def __init__(self, budget: Budget, place: int, temperature: float) -> None:
        super().__init__()
        self.budget, self.place, self.temperature = budget, place, temperature
        self.register_buffer("threshold", torch.tensor(-math.inf))

    @property
    def turn(self) -> float:
        """The logit above which the gate is open."""
        return self.threshold.item()

    def is_open(self, logit: Tensor) -> Tensor:
        return logit > self.threshold

    def forward(self, logit: Tensor) -> Tensor:
        if not self.training:
            return self.is_open(logit).to(logit.dtype)
        share = self.budget.shares()[self.place]
        if share >= 1:
            self.threshold.fill_(-math.inf)
            return torch.ones_like(logit)
        logits = _of_all_processes(logit.detach(), self.budget.share)
        threshold = torch.quantile(logits, 1 - share)
        running = threshold if self.turn == -math.inf else self.threshold.lerp(threshold, MOMENTUM)
        self.threshold.copy_(running)
        scale = self.temperature * logits.std(correction=0).clamp_min(1e-6)
        soft = torch.sigmoid((logit - threshold) / scale)
        z = (logit > threshold).to(logit.dtype) + soft - soft.detach()
        if self.budget.worth is not None:
            slope = soft.detach() * (1 - soft.detach())  # the samples near the threshold speak for the block
            of_all = torch.sigmoid((logits - threshold) / scale)
            worth = self.budget.slope(share) * self.budget.worth[self.place]
            z = z + slope / (of_all * (1 - of_all)).mean() * (worth - worth.detach())
        return z

    def extra_repr(self) -> str:
        return f"place={self.place}, temperature={self.temperature}"


def _of_all_processes(logit: Tensor, share: Share | None) -> Tensor:
    if share is None:
        return logit
    whole = logit.new_zeros(share.total)
    whole[share.start : share.stop] = logit
    dist.all_reduce(whole)
    return whole
