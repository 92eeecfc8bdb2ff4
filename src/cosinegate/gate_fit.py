"""Fits gates to what skipping costs whole images, between epochs: step by step they learn it slowly and badly."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cosinegate.calibration import CHUNK, RECENT
from cosinegate.gates.exit import ExitGate
from cosinegate.gates.predictive import PredictiveGate
from cosinegate.networks import ResNet
from cosinegate.processes import sum_over_processes
from cosinegate.skip_cost import learned, skip_cost

Error = Callable[[Tensor, Tensor], Tensor]

PASSES, BATCH, RATE = 93.75, 512, 0.01  # over the images by Adam, its rate falling to zero along a cosine
EXIT_PASSES = 10  # of exits, where every image is as many maps as there are exits


def fit(network: ResNet, places: list[int], images: Tensor, target: Tensor) -> None:
    """Of each of these blocks c(x), until ĉ(x) + c(x) is what its gate learns of the images; ĉ stays a guess of CIR."""
    was_training = network.training
    network.eval()
    if network.blocks[places[0]].leaves:
        gate = network.blocks[places[0]].gate  # whose policy is that of all
        seen, flips = _at_exits(network, places, images)  # (E, B, F), (E, B)
        _regress(gate, seen.flatten(0, 1), flips.flatten(), F.binary_cross_entropy_with_logits, EXIT_PASSES)
        _remember_exits(gate, seen[:, -RECENT:])
    else:
        for place, (seen, cost) in _measured(network, places, images, target).items():
            gate = network.blocks[place].gate
            _regress(gate, seen, learned(cost, gate.opening.budget.credit), F.smooth_l1_loss, PASSES)
            gate.opening.budget.remember(gate.opening.place, gate.decide(seen[-RECENT:]).logit.detach())
    network.train(was_training)


@torch.no_grad()
def _at_exits(network: ResNet, places: list[int], images: Tensor) -> tuple[Tensor, Tensor]:
    """What the policy sees of the images before each of these E blocks (E, B, F), and what it is to say there: whether
    the whole network would call them something else (E, B)."""
    shown, flips = [], []
    for part in images.split(CHUNK):
        x, seen, classes = network.stem(part), [], []
        for place, block in enumerate(network.blocks):
            if place in places:
                seen.append(block.gate.seen_of(x))
                classes.append(network.classify(x).argmax(1))
            x = block.route(x, torch.ones(len(x), device=x.device))
        shown.append(torch.stack(seen))
        flips.append((torch.stack(classes) != network.classify(x).argmax(1)).to(seen[0].dtype))
    return torch.cat(shown, dim=1), torch.cat(flips, dim=1)


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


def _regress(gate: PredictiveGate, seen: Tensor, wanted: Tensor, error: Error, passes: float) -> None:
    parameters = list(gate.controller.parameters())
    adam = torch.optim.Adam(parameters, RATE)
    batch = min(BATCH, len(seen))
    steps = round(passes * len(seen) / batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    drawn = torch.Generator().manual_seed(0)  # not the run's own: an epoch's noise does not depend on this
    for _ in range(steps):
        some = torch.randint(len(seen), (batch,), generator=drawn).to(seen.device)
        adam.zero_grad()
        error(gate.price(seen[some]), wanted[some]).backward()
        adam.step()
        schedule.step()
    for parameter in parameters:
        parameter.grad = None
        parameter.data = sum_over_processes(parameter.data) / sum_over_processes(parameter.new_ones(())).detach()
