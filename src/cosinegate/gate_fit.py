"""Fits gates to what skipping costs whole images, between epochs: step by step they learn it slowly and badly."""

import torch
import torch.nn.functional as F
from torch import Tensor

from cosinegate import geometry
from cosinegate.calibration import CHUNK, RECENT
from cosinegate.choices import Credit
from cosinegate.gates.predictive import PredictiveGate
from cosinegate.networks import ResNet
from cosinegate.processes import sum_over_processes
from cosinegate.skip_cost import learned, skip_cost

PASSES, BATCH, RATE = 93.75, 512, 0.01  # over the images by Adam, its rate falling to zero along a cosine


def fit(network: ResNet, places: list[int], images: Tensor, target: Tensor) -> None:
    """Of each of these blocks c(x), until ĉ(x) + c(x) is what its gate learns of the images; ĉ stays a guess of CIR."""
    was_training = network.training
    network.eval()
    if network.blocks[places[0]].leaves:
        seen, wanted = _at_exits(network, places, images)
        _regress(network.blocks[places[0]].gate, seen, wanted)  # the policy of all
    else:
        for place, (seen, cost) in _measured(network, places, images, target).items():
            gate = network.blocks[place].gate
            _regress(gate, seen, learned(cost, gate.opening.budget.credit))
            gate.opening.budget.remember(gate.opening.place, gate.decide(seen[-RECENT:]).logit.detach())
    network.train(was_training)


@torch.no_grad()
def _at_exits(network: ResNet, places: list[int], images: Tensor) -> tuple[Tensor, Tensor]:
    """What the policy sees of the images before each of these blocks, and what it is to say there: how much leaving
    would change their prediction."""
    shown, wanted = [], []
    for part in images.split(CHUNK):
        x, exits = network.stem(part), []
        for place, block in enumerate(network.blocks):
            if place in places:
                shown.append(geometry.pooled_statistics(x))
                exits.append(network.classify(x).float().log_softmax(1))
            x = block.route(x, torch.ones(len(x), device=x.device))
        whole = network.classify(x).float().log_softmax(1)
        changes = [F.kl_div(early, whole, reduction="none", log_target=True).sum(1) for early in exits]
        wanted += [learned(change, Credit.change).to(x.dtype) for change in changes]
    return torch.cat(shown), torch.cat(wanted)


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


def _regress(gate: PredictiveGate, seen: Tensor, wanted: Tensor) -> None:
    parameters = list(gate.controller.parameters())
    adam = torch.optim.Adam(parameters, RATE)
    batch = min(BATCH, len(seen))
    steps = round(PASSES * len(seen) / batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    drawn = torch.Generator().manual_seed(0)  # not the run's own: an epoch's noise does not depend on this
    for _ in range(steps):
        some = torch.randint(len(seen), (batch,), generator=drawn).to(seen.device)
        adam.zero_grad()
        F.smooth_l1_loss(gate.price(seen[some]), wanted[some]).backward()
        adam.step()
        schedule.step()
    for parameter in parameters:
        parameter.grad = None
        parameter.data = sum_over_processes(parameter.data) / sum_over_processes(parameter.new_ones(())).detach()
