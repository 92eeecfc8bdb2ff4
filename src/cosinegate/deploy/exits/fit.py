"""Fits exits to a frozen network: each exit's classifier first, then its policy."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.deploy.exits.network import Exit, uncertainty
from cosinegate.networks import GatedNetwork
from cosinegate.networks.network import Step
from cosinegate.terminal.errors import UserError

CHUNK = 250  # images at a time
BATCH, RATE, DECAY = 512, 0.01, 1e-4  # Adam, its rate annealed to zero along a cosine
PASSES, LEAST_STEPS = 10, 300
MOST = 4  # exits where nobody names them


class Passed(NamedTuple):
    """What images are after each of E blocks, and at the network's end."""

    statistics: dict[int, Tensor]  # by block, (B, 3C)
    scores: Tensor  # (B, K) of the whole network


@torch.no_grad()
def pass_through(network: GatedNetwork, after: list[int], images: Tensor) -> Passed:
    """One pass of the images through the network: pooled statistics after these blocks, and the class scores."""
    was_training = network.training
    network.eval()
    statistics: dict[int, list[Tensor]] = {index: [] for index in after}
    like = next(network.parameters())

    def pool(step: Step) -> None:
        if step.index in statistics:
            statistics[step.index].append(geometry.pooled_statistics(step.block.as_map(step.y)))

    scores = [network.run(part.to(like), pool) for part in images.split(CHUNK)]
    network.train(was_training)
    return Passed({index: torch.cat(parts) for index, parts in statistics.items()}, torch.cat(scores))


@torch.no_grad()
def default_exits(network: GatedNetwork, image: Tensor) -> list[int]:
    """Blocks of the last stage after which another one follows, at most MOST of them, evenly spread.

    For images like this one (1, C, H, W).
    """
    shapes: list[torch.Size] = []
    network.run(image.to(next(network.parameters())), lambda step: shapes.append(step.y.shape))
    last_stage = [index for index, shape in enumerate(shapes) if shape == shapes[-1]]
    possible = [index for index in last_stage if may_exit_after(network, index)]
    if len(possible) <= MOST:
        return possible
    return [possible[round((place + 1) * len(possible) / (MOST + 1))] for place in range(MOST)]


def may_exit_after(network: GatedNetwork, index: int) -> bool:
    """Whether the block runs, and one that follows it does too."""
    runs = [block.residual is not None for block in network.blocks]
    return runs[index] and any(runs[index + 1 :])


def new_exits(network: GatedNetwork, after: list[int], image: Tensor) -> dict[int, Exit]:
    """An exit after each of these blocks that is not fitted yet, for images like this one (1, C, H, W)."""
    possible = [index for index in range(len(network.blocks)) if may_exit_after(network, index)]
    if not after or not set(after) <= set(possible):
        raise UserError(f"after = {after}: must be blocks that run and that another one follows, of {possible}")
    exits = {}
    for index, statistics in pass_through(network, after, image).statistics.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            exits[index] = Exit(channels=statistics.shape[1] // 3, num_classes=network.num_classes).to(statistics)
    return exits


def fit_exits(network: GatedNetwork, after: list[int], images: Tensor, labels: Tensor) -> dict[int, Exit]:
    """An exit after each of these blocks, fitted to images (B, C, H, W) and their labels (B,)."""
    exits, passed = new_exits(network, after, images[:1]), pass_through(network, after, images)
    labels = labels.to(passed.scores.device)
    for index, at in exits.items():
        _fit_classifier(at.classifier, passed.statistics[index], passed.scores, labels)
        _fit_policy(at, passed.statistics[index], passed.scores)
        at.eval().requires_grad_(False)
    return exits


def _fit_classifier(classifier: nn.Sequential, statistics: Tensor, scores: Tensor, labels: Tensor) -> None:
    """To the labels, and to the scores of the whole network."""
    teacher = scores.log_softmax(1)

    def error(inputs: Tensor, chosen: Tensor) -> Tensor:
        own = classifier(inputs)
        taught = F.kl_div(own.log_softmax(1), teacher[chosen], reduction="batchmean", log_target=True)
        return F.cross_entropy(own, labels[chosen]) + taught

    _minimise(classifier, statistics, error, DECAY)


def _fit_policy(at: Exit, statistics: Tensor, scores: Tensor) -> None:
    """To whether the whole network answers otherwise than the exit."""
    with torch.no_grad():
        own = at.classifier(statistics)
    features = torch.cat((statistics, uncertainty(own)), dim=1)
    changes = (own.argmax(1) != scores.argmax(1)).to(features.dtype)

    def error(inputs: Tensor, chosen: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(at.policy(inputs).squeeze(1), changes[chosen])

    _minimise(at.policy, features, error, 0.0)


def _minimise(layers: nn.Sequential, features: Tensor, error: Callable[[Tensor, Tensor], Tensor], decay: float) -> None:
    """Fits on features of mean 0 and deviation 1; afterwards the first layer does the scaling itself."""
    mean, deviation = features.mean(0), features.std(0, correction=0).clamp_min(1e-3)
    batch = min(BATCH, len(features))
    steps = max(LEAST_STEPS, round(PASSES * len(features) / batch))
    adam = torch.optim.Adam(layers.parameters(), RATE, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(len(features), (batch,), generator=generator).to(features.device)
        adam.zero_grad()
        error((features[chosen] - mean) / deviation, chosen).backward()
        adam.step()
        schedule.step()
    first = layers[0]
    with torch.no_grad():
        first.weight /= deviation
        first.bias -= first.weight @ mean
