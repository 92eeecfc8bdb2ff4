"""From a config to the objects it names."""

import functools

import torch
from omegaconf import DictConfig

from cosinegate.choices import GateKind, Weighting
from cosinegate.config import GateConfig, primitives
from cosinegate.data import IMAGE_SETS
from cosinegate.deploy.flops import block_flops
from cosinegate.gates import Controller, CosineGate
from cosinegate.lit import LitCosineGate
from cosinegate.networks import ResNet
from cosinegate.objective import Objective
from cosinegate.relaxation import Relaxation


def build_gate(config: GateConfig, relaxation: Relaxation, channels: int) -> CosineGate:
    """A gate for a block whose input has `channels` channels."""
    controller = Controller(channels, config.controller.reduction) if config.controller.enabled else None
    return CosineGate(relaxation, config.gamma.init, config.polarity, config.gamma.learnable, controller)


def build_network(config: DictConfig) -> ResNet:
    image_set = IMAGE_SETS[config.data.name.name]
    make_gate = None
    if config.gate.kind is GateKind.cosine:
        relaxation = Relaxation(config.gate.relaxation.temperature, config.gate.relaxation.hard, config.gate.threshold)
        make_gate = functools.partial(build_gate, config.gate, relaxation)
    return ResNet(
        blocks_per_stage=config.network.blocks or [(config.network.depth - 2) // 6] * 3,
        width=config.network.width,
        in_channels=image_set.shape[2],
        num_classes=len(image_set.classes),
        shortcut=config.network.shortcut,
        post_activation=config.network.post_activation,
        make_gate=make_gate,
        detach_target=config.objective.consistency.detach_target,
    )


def build_module(config: DictConfig) -> LitCosineGate:
    """The network with the weights that `config.seed` gives it, and its objective."""
    image_set = IMAGE_SETS[config.data.name.name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = build_network(config)
    weights = block_flops(network, image_set.shape) if config.objective.weighting is Weighting.flops else None
    objective = Objective(
        config.objective.lambda_flops, config.objective.lambda_cons, config.objective.tau_target, weights
    )
    return LitCosineGate(network, objective, config.optimizer, len(image_set.classes), primitives(config))
