"""Small networks to deploy: BatchNorm moments of their own, gates that have settled or that route, real images."""

import copy
import functools
from pathlib import Path

import torch
from conftest import config
from omegaconf import DictConfig
from same_routes import assert_same_routes, assert_same_scores
from torch import Tensor

from cosinegate.data.module import ImageData
from cosinegate.deploy.card import WEIGHTS, described, sha256, write_card, write_weights
from cosinegate.deploy.exits import EarlyExitNetwork
from cosinegate.deploy.exits.budget import set_budget
from cosinegate.deploy.exits.fit import fit_exits
from cosinegate.gates.controls.constant import ConstantGate
from cosinegate.gates.controls.random import RandomGate
from cosinegate.gates.cosine import Controller
from cosinegate.networks import GatedNetwork, Output
from cosinegate.networks.compile import Action
from cosinegate.networks.network import Step
from cosinegate.training.build import build_network

FEW = ("data=digits", "network.depth=14", "network.width=4")
LAST_STAGE = ("data=digits", "gate=none", "objective=plain", "network.blocks=[1,1,3]", "network.width=4")
CLOSED, ROUTES, OPEN = "closed", "routes", "open"
LOSS = {"aig": "per_block", "random": "plain", "none": "plain", "skipnet": "two_sided", "constant": "two_sided"}


@functools.cache
def data() -> ImageData:
    made = ImageData(config("+experiment=digits").data, seed=0)
    made.setup()
    return made


def digits(split: str) -> Tensor:
    return data().whole_images(split)[0].contiguous(memory_format=torch.channels_last)


def labels(split: str) -> Tensor:
    return data().whole_images(split)[1]


def images(number: int = 200) -> Tensor:
    return digits("train")[:number]


def chosen(gate: str, *overrides: str) -> DictConfig:
    return config(f"gate={gate}", f"objective={LOSS.get(gate, 'cosinegate')}", *FEW, *overrides)


def network_of(of: DictConfig) -> GatedNetwork:
    """With moments of BatchNorm and controllers that are not those it was born with."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        network = build_network(of).train()
        for module in network.modules():
            if isinstance(module, Controller):
                module.w2.weight.normal_()
        for _ in range(3):
            network(images())
    return network.eval()


@torch.no_grad()
def settled(network: GatedNetwork, pattern: list[str]) -> GatedNetwork:
    """The gates' thresholds moved, block after block, so that each is closed, open, or open for half of the images."""
    x = images().to(next(network.parameters()))
    for index, (block, wanted) in enumerate(zip(network.blocks, pattern, strict=True)):
        if isinstance(block.gate, ConstantGate):
            block.gate.logit.fill_(-2.0 if wanted == CLOSED else 2.0)
        elif isinstance(block.gate, RandomGate):
            block.gate.rate = {CLOSED: 0.0, ROUTES: 0.5, OPEN: 1.0}[wanted]
        elif block.gate is not None:
            logits = steps_of(network, x)[index].routing.decision.logit.sort().values
            apart = (logits[1:] - logits[:-1])[50:150].argmax() + 50  # where no two programs decide otherwise
            between = (logits[apart] + logits[apart + 1]) / 2
            at = {CLOSED: logits[-1] + 1, OPEN: logits[0] - 1, ROUTES: between}[wanted]
            block.gate.opening = copy.deepcopy(block.gate.opening)
            block.gate.opening.threshold = at.double().sigmoid().item()
    return network


@functools.cache
def _cosine(overrides: tuple[str, ...]) -> GatedNetwork:
    return network_of(chosen("cosine", *overrides))


def cosine(pattern: list[str], *overrides: str) -> GatedNetwork:
    return settled(copy.deepcopy(_cosine(overrides)), pattern)


@torch.no_grad()
def steps_of(network: GatedNetwork, x: Tensor) -> list[Step]:
    """Every block of one pass."""
    steps: list[Step] = []
    network.run(x, steps.append)
    return steps


@torch.no_grad()
def classifying(network: GatedNetwork) -> GatedNetwork:
    """Its head set so that it tells digits apart, by the mean features of every class."""
    x, y = digits("train"), labels("train")
    features = steps_of(network.eval(), x)[-1].y.mean((2, 3))
    means = torch.stack([features[y == k].mean(0) for k in range(10)]) / features.var(0)
    network.head.weight.copy_(means)
    network.head.bias.copy_(-(means.square() * features.var(0)).sum(1) / 2)
    return network


@functools.cache
def _with_exits(after: tuple[int, ...]) -> EarlyExitNetwork:
    network = classifying(network_of(config(*LAST_STAGE)))
    return EarlyExitNetwork(network, fit_exits(network, list(after), digits("train"), labels("train")))


def with_exits(budget: float = 0.75, after: tuple[int, ...] = (2, 3)) -> EarlyExitNetwork:
    """Blocks [1, 1, 3] that were not trained, and exits that were fitted to them."""
    early = copy.deepcopy(_with_exits(after)).eval().requires_grad_(False)
    set_budget(early, budget, digits("train")[:500])
    return early


@torch.no_grad()
def eager(network: GatedNetwork | EarlyExitNetwork, x: Tensor) -> Output:
    return network(x.to(next(network.parameters()).dtype))


def write(network: GatedNetwork | EarlyExitNetwork, of: DictConfig, actions: list[Action] | None, folder: Path) -> dict:
    """Weights and card, as the commands write them; returns the card."""
    folder.mkdir(exist_ok=True)
    write_weights(network, folder / WEIGHTS)
    card = {"network": described(network, of, actions), "files": {WEIGHTS: sha256(folder / WEIGHTS)}}
    write_card(card, folder)
    return card


def assert_same(scores: Tensor, gates: Tensor, network, expected: Output, near: Tensor | None = None) -> None:
    """Another program of the network takes its routes, and has its scores and classes wherever it took them."""
    same = assert_same_routes(gates, network, expected.routing, near)
    assert_same_scores(scores[same], expected.logits[same])
