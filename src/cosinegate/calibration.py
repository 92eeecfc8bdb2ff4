"""A budget that is met by construction: per block, a quantile of the logits is the threshold."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosinegate.choices import Credit, Sharing
from cosinegate.networks import ResNet
from cosinegate.processes import Share
from cosinegate.relaxation import Opened

CHUNK = 256  # images at a time
RECENT = 2048  # images, whose logits the price is found from
NOTHING = 1e-9  # a share that opens no image
LEAST_SPREAD = 1.0  # of the logits, below which the straight-through gradient grows no further


class Budget(nn.Module):
    """One for all gates of a network: which share of the samples each of the G gated blocks computes.

    The shares' mean, weighted by `costs`, is what makes the mean gate over all blocks `tau_target`; `free` is what the
    blocks without a gate cost. Shares go from what they `begin` with, else from all open, to that by `prog`, which a
    callback moves.

    With Sharing.network the shares lie between `low` and `high`; within 0 and 1 none is a constant. With Credit.slope
    each block has a learned worth, whose gradient is what opening the block more is worth to the loss. With the others
    logits are prices, so that one price, over those of the last RECENT training images, parts all samples of all
    blocks. A given `worth` is not learned.
    """

    recent: Tensor | None

    def __init__(
        self,
        tau_target: float,
        costs: Tensor,
        free: float,
        sharing: Sharing,
        credit: Credit,
        low: float,
        high: float,
        worth: list[float] | None = None,
        begin: list[float] | None = None,
        fitted: bool = False,
        exits: bool = False,
    ) -> None:
        super().__init__()
        self.tau_target, self.free, self.low, self.high = tau_target, free, low, high
        self.prog = 0.0
        self.share: Share | None = None  # of a global batch over several processes
        self.costs = costs.tolist()
        self.begin = [1.0] * len(costs) if begin is None else begin
        self.credit, self.fitted = credit, fitted  # fitted: between epochs, instead of learning step by step
        self.exits = exits  # training skips nothing, and teaches every image at every exit
        learns = sharing is Sharing.network and worth is None
        prices = learns and credit is not Credit.slope
        first = torch.zeros(len(costs)) if worth is None else torch.tensor(worth)
        known = sharing is Sharing.block or prices
        self.worth = None if known else nn.Parameter(first, requires_grad=learns)
        self.register_buffer("recent", torch.zeros(len(costs), RECENT) if prices else None)
        self.register_buffer("seen", torch.zeros(len(costs), dtype=torch.long) if prices else None)

    @property
    def by_chance(self) -> bool:
        """Whether gates know nothing yet: until they are fitted training skips any samples, and learns to bear it."""
        return self.fitted and self.prog == 0

    def gated_share(self, tau_target: float) -> float:
        """The mean share of the gated blocks that gives this mean over all blocks."""
        total = sum(self.costs)
        return (tau_target * (total + self.free) - self.free) / total

    def shares(self, tau_target: float | None = None, bounded: bool = True) -> list[float]:
        """(G,); with a `tau_target` what the trained network gives each block at that budget.

        Where nothing is `bounded`, worth or prices alone decide: bounds are for training, in which a constant would not
        learn. A block that training never opened stays closed.
        """
        if tau_target is None:
            settled = self.shares(self.tau_target)
            return [first + self.prog * (last - first) for first, last in zip(self.begin, settled, strict=True)]
        mean = self.gated_share(tau_target)
        low, high = (min(self.low, mean), max(self.high, mean)) if bounded else (0.0, 1.0)
        may_open = [True] * len(self.costs) if bounded else [not never for never in self.never_opened()]
        if self.recent is not None and self.seen.min() > 0:
            return self._by_price(mean, low, high, may_open)
        if self.worth is None:
            return [mean] * len(self.costs)
        worth = self.worth.tolist()

        def at(level: float) -> list[float]:
            opened = (1 / (1 + math.exp(min(max(level - w, -60.0), 60.0))) for w in worth)
            return [may * (low + (high - low) * share) for may, share in zip(may_open, opened, strict=True)]

        below, above = min(worth) - 60.0, max(worth) + 60.0  # levels between which the budget is met
        for _ in range(60):
            level = (below + above) / 2
            spent = sum(cost * share for cost, share in zip(self.costs, at(level), strict=True))
            below, above = (level, above) if spent > mean * sum(self.costs) else (below, level)
        return at(level)

    def never_opened(self) -> list[bool]:
        """(G,): blocks that are closed from first to last, so that their F is what chance gave it; with exits none."""
        if self.exits:
            return [False] * len(self.costs)
        settled = self.shares(self.tau_target)
        return [first == 0 and last < NOTHING for first, last in zip(self.begin, settled, strict=True)]

    def _by_price(self, mean: float, low: float, high: float, may_open: list[bool]) -> list[float]:
        known = self.recent[:, : self.seen.min()].double().cpu()
        costs = torch.tensor(self.costs, dtype=known.dtype)
        dear = (costs / costs.mean())[:, None]  # of what F costs: by its FLOPs, where those are what counts
        prices = known - dear.log() if self.credit is Credit.change else known / dear

        def at(price: Tensor) -> Tensor:
            return (prices > price).double().mean(1).clamp(low, high) * torch.tensor(may_open)

        below, above = prices.min() - 1, prices.max()  # prices between which the budget is met
        for _ in range(40):
            price = (below + above) / 2
            below, above = (price, above) if at(price) @ costs > mean * costs.sum() else (below, price)
        more, less = at(below), at(above)  # of equal prices, a part
        part = (mean * costs.sum() - less @ costs) / ((more - less) @ costs).clamp_min(1e-12)
        return (less + part.clamp(0, 1) * (more - less)).tolist()

    @torch.no_grad()
    def remember(self, place: int, logits: Tensor) -> None:
        if self.recent is not None:
            where = (self.seen[place] + torch.arange(len(logits), device=logits.device)) % RECENT
            self.recent[place, where] = logits.to(self.recent.dtype)
            self.seen[place] += len(logits)

    def slope(self, place: int) -> float:
        """How fast a block's share moves with its worth: not at all near the bounds."""
        share = self.shares(self.tau_target)[place]
        return self.prog * max(0.0, (share - self.low) * (self.high - share) / (self.high - self.low))

    def extra_repr(self) -> str:
        return f"tau_target={self.tau_target}, low={self.low}, high={self.high}"


class Quantile(nn.Module):
    """Opens for the share of samples that the budget gives block `place`, those with the highest logits.

    Training compares with the batch's own quantile, with Credit.slope straight-through around it; exits let nobody go
    there. Evaluation compares with `threshold`, which `calibrate` sets from whole images after every epoch: the
    checkpoint keeps it, and a sample's route does not depend on its batch.
    """

    def __init__(self, budget: Budget, place: int, temperature: float) -> None:
        super().__init__()
        self.budget, self.place, self.temperature = budget, place, temperature
        self.register_buffer("threshold", torch.tensor(-math.inf))

    @property
    def turn(self) -> float:
        """The logit above which the gate is open in evaluation."""
        return self.threshold.item()

    @property
    def is_closed(self) -> bool:
        """Whether training skips every sample now."""
        return self.training and not self.leaves and self.budget.shares()[self.place] < NOTHING

    @property
    def is_open(self) -> bool:
        """Whether training skips no sample now."""
        return self.training and (self.leaves or self.budget.shares()[self.place] >= 1)

    @property
    def leaves(self) -> bool:
        return self.budget.exits

    def forward(self, logit: Tensor) -> Opened:
        if not self.training:
            return Opened((logit > self.threshold).to(logit.dtype), self.threshold)
        if self.leaves:
            return Opened(1.0 + 0.0 * logit, self.threshold)  # DDP wants every parameter to have a gradient
        share = self.budget.shares()[self.place]
        logits = _of_all_processes(logit.detach(), self.budget.share)
        self.budget.remember(self.place, logits)
        if share >= 1:
            nothing = 0.0 * logit if self.budget.worth is None else 0.0 * (logit + self.budget.worth.sum())
            return Opened(1.0 + nothing, logit.new_tensor(-math.inf))
        turn = logit.new_tensor(turn_for(logits, share))
        ranked = torch.rand_like(logits) if self.budget.by_chance else logits
        z = _highest(ranked, share, self.budget.share).to(logit.dtype)  # exactly 0 or 1
        if self.budget.credit is not Credit.slope:
            return Opened(z, turn)
        scale = self.temperature * logits.std(correction=0).clamp_min(LEAST_SPREAD)
        soft = torch.sigmoid((logit - turn) / scale)
        z = z + (soft - soft.detach())
        if self.budget.worth is not None:
            near = soft.detach() * (1 - soft.detach())  # the samples near the threshold speak for the block
            of_all = torch.sigmoid((logits - turn) / scale)
            worth = self.budget.slope(self.place) * self.budget.worth[self.place]
            z = z + near / (of_all * (1 - of_all)).mean().clamp_min(1e-6) * (worth - worth.detach())
        return Opened(z, turn)

    def extra_repr(self) -> str:
        return f"place={self.place}, temperature={self.temperature}"


@torch.no_grad()
def calibrate(network: ResNet, shares: list[float], images: Tensor) -> list[float]:
    """Sets every gate's threshold so that a given share of the images opens it, from the first block to the last.

    What a block sees depends on what the blocks before it decided, so they are settled in order. Gives the shares that
    came of it: images with equal logits are opened or closed together.
    """
    was_training = network.training
    network.eval()
    maps, wanted, reached = [network.stem(part) for part in images.split(CHUNK)], iter(shares), []
    seen = [network.begin(part) for part in images.split(CHUNK)]
    for block in network.blocks:
        seen = [block.look(x, before) for x, before in zip(maps, seen, strict=True)]
        if block.gate is not None:
            logits = torch.cat([block.decide(x, what).logit for x, what in zip(maps, seen, strict=True)])
            block.gate.opening.threshold.fill_(turn_for(logits, next(wanted)))
            reached.append((logits > block.gate.opening.threshold).float().mean().item())
        maps = [block(x, what)[0] for x, what in zip(maps, seen, strict=True)]
    network.train(was_training)
    return reached


def turn_for(logits: Tensor, share: float) -> float:
    """The threshold above which a share of the logits lies, halfway between its neighbours."""
    number = round(share * len(logits))
    if number == 0:
        return math.inf
    if number == len(logits):
        return -math.inf
    falling = logits.sort(descending=True).values
    return ((falling[number - 1] + falling[number]) / 2).item()


def _highest(logits: Tensor, share: float, own: Share | None) -> Tensor:
    """Whether each of this process's samples is among the share of all with the highest logits; of equals, any."""
    is_open = torch.zeros_like(logits, dtype=torch.bool)
    is_open[logits.argsort(descending=True, stable=True)[: round(share * len(logits))]] = True
    return is_open if own is None else is_open[own.start : own.stop]


def _of_all_processes(logit: Tensor, share: Share | None) -> Tensor:
    if share is None:
        return logit
    whole = logit.new_zeros(share.total)
    whole[share.start : share.stop] = logit
    dist.all_reduce(whole)
    return whole
