"""Fits gates to what skipping costs whole images, between epochs: step by step they learn it slowly and badly."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.calibration import CHUNK, RECENT
from cosinegate.gates.exit import ExitClassifier, ExitGate, doubt
from cosinegate.gates.predictive import STATISTICS, PredictiveGate
from cosinegate.networks import ResNet
from cosinegate.objective import divergence
from cosinegate.processes import sum_over_processes
from cosinegate.skip_cost import learned, skip_cost

Error = Callable[[Tensor, Tensor], Tensor]

PASSES, BATCH, RATE = 93.75, 512, 0.01  # over the images by Adam, its rate falling to zero along a cosine
EXIT_PASSES = 10  # of exits, where every image is as many maps as there are exits
OWN_PASSES, LEAST_STEPS, DECAY = 10, 300, 1e-4  # of what exits with classifiers of their own learn anew, and of these


def fit(network: ResNet, places: list[int], images: Tensor, target: Tensor) -> None:
    """Of each of these blocks c(x), until ĉ(x) + c(x) is what its gate learns of the images; ĉ stays a guess of CIR."""
    was_training = network.training
    network.eval()
    if network.blocks[places[0]].leaves:
        _fit_exits([network.blocks[place].gate for place in places], at_exits(network, places, images), target)
    else:
        for place, (seen, cost) in _measured(network, places, images, target).items():
            gate = network.blocks[place].gate
            _regress(gate, seen, learned(cost, gate.opening.budget.credit), F.smooth_l1_loss, PASSES)
            gate.opening.budget.remember(gate.opening.place, gate.decide(seen[-RECENT:]).logit.detach())
    network.train(was_training)


class AtExits(NamedTuple):
    """What images are before each of E exits that nobody takes, and at the network's end."""

    statistics: Tensor  # (E, B, 3C)
    exact: Tensor  # (E, B): the measure of the exit's own block, which ĉ is to know
    whole: Tensor  # (B, K): class scores


@torch.no_grad()
def at_exits(network: ResNet, places: list[int], images: Tensor) -> AtExits:
    """Before each of these blocks, of a network that evaluates."""
    found: list[AtExits] = []
    for part in images.split(CHUNK):
        x, statistics, exact = network.stem(part), [], []
        for place, block in enumerate(network.blocks):
            s, r = block.shortcut(x), block.residual(x)
            if place in places:
                statistics.append(block.gate.statistics(x))
                exact.append(geometry.measured(block.gate.measure, geometry.constant_dot_products(s, r)))
            x = block.activation(s + r)
        found.append(AtExits(torch.stack(statistics), torch.stack(exact), network.classify(x)))
    statistics, exact, whole = zip(*found, strict=True)
    return AtExits(torch.cat(statistics, dim=1), torch.cat(exact, dim=1), torch.cat(whole))


def _fit_exits(gates: list[ExitGate], at: AtExits, target: Tensor) -> None:
    """The exits' own classifiers, if they have any, to the images' classes and to what the whole network says, and ĉ to
    the exact measure; then the policy to whether it would call an image something else than the exit does."""
    statistics, exact, whole = at
    for gate, of_exit in zip(gates, statistics, strict=True):
        if gate.own is not None:
            _fit_classifier(gate.own, of_exit, whole, target)
    scores = torch.stack([gate.scores(of_exit) for gate, of_exit in zip(gates, statistics, strict=True)])
    seen = torch.cat((statistics, torch.stack([doubt(of_exit) for of_exit in scores])), dim=2)
    flips = (scores.argmax(2) != whole.argmax(1)).to(seen.dtype)
    first = gates[0]  # whose policy is that of all
    if first.own is not None:
        first.standardise.learn_anew(seen.flatten(0, 1), slice(-1, None))  # they tell another doubt than before
        _fit_predictor(first, seen.flatten(0, 1), exact.flatten())
    _regress(first, seen.flatten(0, 1), flips.flatten(), F.binary_cross_entropy_with_logits, EXIT_PASSES)
    _remember_exits(first, seen[:, -RECENT:])


def _fit_classifier(own: ExitClassifier, statistics: Tensor, whole: Tensor, target: Tensor) -> None:
    """From the start, of statistics that have mean 0 and deviation 1, which the weights then do themselves."""
    mean, deviation = statistics.mean(0), statistics.std(0, correction=0).clamp_min(1e-3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        channels, (hidden, _) = len(mean) // STATISTICS, own.w1.weight.shape
        learner = ExitClassifier(channels, hidden, own.w2.out_features).to(statistics)

    def error(drawn: Tensor) -> Tensor:
        with torch.autocast(statistics.device.type, enabled=False):
            scores = learner((statistics[drawn] - mean) / deviation)
            return F.cross_entropy(scores, target[drawn]) + divergence(scores, whole[drawn])

    _minimise(list(learner.parameters()), error, len(statistics), _enough(len(statistics)), DECAY)
    with torch.no_grad():
        learner.w1.weight /= deviation
        learner.w1.bias -= learner.w1.weight @ mean
    own.load_state_dict(learner.state_dict())


@torch.no_grad()
def _measured(network: ResNet, places: list[int], images: Tensor, target: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """Of each block what its gate sees of the images and what skipping costs them, other blocks as they are now."""
    found: dict[int, list[tuple[Tensor, Tensor]]] = {place: [] for place in places}
    for part, labels in zip(images.split(CHUNK), target.split(CHUNK), strict=True):
        x, seen, shown = network.stem(part), network.begin(part), {}
        gates = torch.ones(len(part), len(network.blocks), device=x.device)
        for place, block in enumerate(network.blocks):
            seen = block.look(x, seen)
            shown[place] = x, seen
            x, routing = block(x, seen)
            if routing is not None:
                gates[:, place] = routing.decision.gate
        for place, parts in found.items():
            x, seen = shown[place]
            credit = network.blocks[place].gate.opening.budget.credit
            parts.append((seen, skip_cost(network, place, x, gates, labels, credit)))
    return {place: tuple(map(torch.cat, zip(*parts, strict=True))) for place, parts in found.items()}


@torch.no_grad()
def _remember_exits(gate: ExitGate, seen: Tensor) -> None:
    """One price for all exits: an image is still there whose logit lay above it at every exit so far."""
    logits = torch.stack([gate.gamma.abs() * gate.price(of_exit) for of_exit in seen])
    for place, least in enumerate(logits.cummin(0).values):
        gate.opening.budget.remember(place, least)


def _fit_predictor(gate: PredictiveGate, seen: Tensor, exact: Tensor) -> None:
    def error(drawn: Tensor) -> Tensor:
        return F.mse_loss(gate.predicted(seen[drawn]), exact[drawn].to(seen.dtype))

    _minimise(list(gate.predictor.parameters()), error, len(seen), _enough(len(seen)))


def _enough(number: int) -> float:
    """Passes over so many images, in not too few steps."""
    return max(OWN_PASSES, LEAST_STEPS * min(BATCH, number) / number)


def _regress(gate: PredictiveGate, seen: Tensor, wanted: Tensor, error: Error, passes: float) -> None:
    parameters = list(gate.controller.parameters())
    _minimise(parameters, lambda drawn: error(gate.price(seen[drawn]), wanted[drawn]), len(seen), passes)


def _minimise(
    parameters: list[nn.Parameter], error: Callable[[Tensor], Tensor], number: int, passes: float, decay: float = 0.0
) -> None:
    """The error of images, of which it is given some of so many."""
    adam = torch.optim.Adam(parameters, RATE, weight_decay=decay)
    batch = min(BATCH, number)
    steps = round(passes * number / batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    drawn = torch.Generator().manual_seed(0)  # not the run's own: an epoch's noise does not depend on this
    for _ in range(steps):
        some = torch.randint(number, (batch,), generator=drawn).to(parameters[0].device)
        adam.zero_grad()
        error(some).backward()
        adam.step()
        schedule.step()
    for parameter in parameters:
        parameter.grad = None
        parameter.data = sum_over_processes(parameter.data) / sum_over_processes(parameter.new_ones(())).detach()
