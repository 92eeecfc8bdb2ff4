"""The training objective: cross-entropy, consistency and the FLOPs penalty (Eq. 17-21); a predictor's error; reward.

The paper's penalty is on the mean gate of the whole network, from above. Other papers' are here beside it, by config.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosinegate.choices import Sided, Target
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
    reward: Tensor
    full: Tensor
    exit: Tensor


def prog(t: float, warmup_epochs: float, start_epoch: float = 0.0) -> float:
    """min(1, t / T_warmup) (Eq. 19), with t counted from `start_epoch`; 1 from there without a warmup."""
    since = t - start_epoch
    if warmup_epochs <= 0:
        return float(since >= 0)
    return min(1.0, max(0.0, since) / warmup_epochs)


def bounds_at(done: float, over: float, target: float) -> tuple[float, float]:
    """Between which a block's mean gate costs nothing, when a share `done` of the run is over: at first the target
    alone, after a share `over` of the run anything (Verelst & Tuytelaars 2020, https://arxiv.org/abs/1912.03203).
    """
    held = math.cos(min(1.0, done / over) * math.pi / 2) ** 2 if over > 0 else 0.0
    return held * target, 1 - held * (1 - target)


class Objective(nn.Module):
    """L = L_CE + λ_cons·L_cons + λ_flops·prog·max(0, ḡ - τ_target)² + λ_predict·L_predict. A callback moves `prog`.

    L_predict is the squared error of the predicted measure, averaged over the blocks that predict, and the error of
    logits which learn what skipping costs (`skip_cost.priced`); it reaches nothing but the gates. With Sided.two a mean
    gate below the target costs as much as one above it. With Target.block every gated block has a mean gate and a
    target of its own (ConvNet-AIG), and the penalty is the mean of theirs. `bounds` adds DynConv's penalty on blocks
    outside of theirs. `block_weights` are what the N blocks count for, `gated` which of them have a gate.

    With λ_full the network learns from its own full path as well, on which every gate is open: L_CE is then the mean of
    both paths', weighted 1 and λ_full, so that a step is no longer than without it. See `full_loss`.

    Where images may leave early, λ_exit weights what the network would say there, in the same mean: see `exit_loss`.

    While gates are `sampled`, they learn by reward instead: see `reward_loss`.

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
        target: Target = Target.network,
        targets: list[float] | None = None,
        gated: Tensor | None = None,
        bounds: float = 0.0,
        reward: tuple[float, float] = (0.0, 0.0),
        lambda_full: float = 0.0,
        lambda_exit: float = 0.0,
    ) -> None:
        super().__init__()
        self.lambda_flops = lambda_flops
        self.lambda_cons = lambda_cons
        self.tau_target = tau_target
        self.sided, self.target, self.bounds = sided, target, bounds
        self.lambda_predict, self.lambda_full, self.lambda_exit = lambda_predict, lambda_full, lambda_exit
        self.reward_weight, self.alpha = reward
        self.prog = 0.0
        self.done = 0.0  # share of the run
        self.sampled = False
        self.share: Share | None = None
        weights = None if block_weights is None else block_weights / block_weights.sum()
        self.register_buffer("block_weights", weights, persistent=False)  # (N,), sums to 1; None: all alike
        self.register_buffer("gated", gated, persistent=False)  # (N,) bool; None: all
        own = None if targets is None else torch.tensor(targets)
        self.register_buffer("targets", own, persistent=False)  # (G,); None: tau_target

    def mean_gate(self, gates: Tensor) -> Tensor:
        """ḡ over the blocks and the global batch (Eq. 17) of gates (B, N)."""
        per_sample = gates.mean(1) if self.block_weights is None else gates @ self.block_weights
        return over_processes(self._weight * per_sample.mean())

    def penalty(self, gates: Tensor) -> Tensor:
        """What the gates (B, N) cost that are not at their target, before prog(t)."""
        if self.target is Target.network:
            cost = self._beyond(self.mean_gate(gates) - self.tau_target).square()
        else:
            opened, weights = self._by_block(gates)
            excess = opened - (self.tau_target if self.targets is None else self.targets)
            cost = (weights * self._beyond(excess).square()).sum()
        return cost + self._outside(gates) if self.bounds > 0 else cost

    def _beyond(self, excess: Tensor) -> Tensor:
        return excess.clamp_min(0.0) if self.sided is Sided.one else excess

    def _by_block(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        """The mean gate of every gated block over the global batch, and what it counts for; both (G,)."""
        opened = over_processes(self._weight * gates.mean(0))
        weights = torch.ones_like(opened) if self.block_weights is None else self.block_weights.to(opened.dtype)
        if self.gated is not None:
            opened, weights = opened[self.gated], weights[self.gated]
        return opened, weights / weights.sum()

    def _outside(self, gates: Tensor) -> Tensor:
        """The mean over gated blocks of the squared distance to the bounds."""
        opened, _ = self._by_block(gates)
        low, high = bounds_at(self.done, self.bounds, self.tau_target)
        return ((opened - high).clamp_min(0.0).square() + (low - opened).clamp_min(0.0).square()).mean()

    def reward_loss(self, routing: Routing, ce: Tensor) -> Tensor:
        """REINFORCE as SkipNet has it: a gate's reward is what it and later gates save, α/G for each closed one, less
        the sample's cross-entropy `ce` (B,); its loss is that times the negative logarithm of its decision's chance.
        """
        gated = slice(None) if self.gated is None else self.gated
        acted, logits = routing.gates[:, gated].detach(), routing.logits[:, gated]
        saved = (1 - acted) * (self.alpha / acted.shape[1])
        reward = saved.flip(1).cumsum(1).flip(1) - ce.detach()[:, None]  # (B, G)
        surprise = F.binary_cross_entropy_with_logits(logits, acted, reduction="none")  # -log of the chance
        return self._weight * (surprise * reward).sum(1).mean()

    @property
    def asks_full_path(self) -> bool:
        """While prog(t) asks gates to close: calibrated gates that begin open send every image along it until then."""
        return self.lambda_full > 0 and self.prog > 0

    def full_loss(self, scores: Tensor, target: Tensor, full: Tensor) -> Tensor:
        """The cross-entropy of the full path's scores (B, classes), and how far those of the routed images diverge from
        them: the full path teaches the routed ones, and images that skip a block still teach that block."""
        return self._weight * (F.cross_entropy(full, target) + divergence(scores, full.detach()))

    def exit_loss(self, exits: Tensor, target: Tensor, scores: Tensor) -> Tensor:
        """The mean over exits (E, B, classes) of their cross-entropy, and of how far they diverge from the whole
        network's scores (B, classes), which teach them."""
        taught = [F.cross_entropy(early, target) + divergence(early, scores.detach()) for early in exits]
        return self._weight * torch.stack(taught).mean()

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
        zero = ce.new_zeros(())
        if output.routing is None:
            return Losses(ce, ce, zero, zero, zero, zero, zero, zero, zero)
        cons = self._weight * output.routing.consistency.sum(1).mean()
        flops = self.prog * self.penalty(output.routing.gates)
        predict = self._weight * self.prediction_error(output.routing)
        price = zero if price_error is None else self._weight * price_error
        reward = zero
        if self.sampled:
            reward = self.reward_loss(output.routing, F.cross_entropy(output.logits, target, reduction="none"))
        of_full = zero if output.full is None else self.full_loss(output.logits, target, output.full)
        of_exits = zero if output.exits is None else self.exit_loss(output.exits, target, output.logits)
        weights = 1.0, self.lambda_full * (output.full is not None), self.lambda_exit * (output.exits is not None)
        learned = (ce + weights[1] * of_full + weights[2] * of_exits) / sum(weights)
        total = learned + self.lambda_cons * cons + self.lambda_flops * flops + self.lambda_predict * (predict + price)
        return Losses(total + self.reward_weight * reward, ce, cons, flops, predict, price, reward, of_full, of_exits)


def divergence(scores: Tensor, teacher: Tensor) -> Tensor:
    """Of the prediction from the teacher's, the mean over the batch."""
    own, taught_by = (_at_least_float32(some).log_softmax(1) for some in (scores, teacher))
    return F.kl_div(own, taught_by, reduction="batchmean", log_target=True)


def _at_least_float32(scores: Tensor) -> Tensor:
    """The divergence of two predictions that are nearly the same is lost in fewer digits."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
