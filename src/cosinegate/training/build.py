"""From a config to the objects it names."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from cosinegate.config.choices import GateKind, Library, Weighting
from cosinegate.config.identity import blocks_per_stage, convolution_weights, primitives, reference, stage_widths
from cosinegate.data import image_set
from cosinegate.gates import Gate
from cosinegate.gates.make import GateMaker
from cosinegate.lit import LitCosineGate
from cosinegate.networks import GatedNetwork, ResNet
from cosinegate.networks.adapt import AdaptedNetwork, adapted, fill_slots
from cosinegate.networks.flops import block_flops, dense_flops
from cosinegate.networks.library import library_model, parameter_count
from cosinegate.objective import CosineGateLoss
from cosinegate.terminal.secrets import masked


def build_network(config: DictConfig, make_gate: Callable[[int], Gate | None] | None = None) -> GatedNetwork:
    """The network with gates as the config has them, or as `make_gate` makes them by a block's input channels."""
    if config.network.library is not None:
        with torch.device("cpu"):  # it runs once, which needs numbers
            return _library_network(config, make_gate)
    network, images = config.network, image_set(config.data)
    first = [index == 0 for number in blocks_per_stage(network) for index in range(number)]
    return ResNet(
        blocks_per_stage=blocks_per_stage(network),
        widths=stage_widths(network),
        in_channels=images.shape[2],
        num_classes=len(images.classes),
        shortcut=network.shortcut,
        post_activation=network.post_activation,
        make_gate=make_gate or GateMaker(config.gate, _gated(config, first)),
        consistency=config.objective.lambda_cons > 0,
        detach_target=config.objective.consistency.detach_target,
    )


def _library_network(config: DictConfig, make_gate: Callable[[int], Gate | None] | None) -> AdaptedNetwork:
    height, width, channels = image_set(config.data).shape
    model = library_model(*_library_arguments(config))
    example = torch.rand(2, channels, height, width, generator=torch.Generator().manual_seed(0))
    gated = adapted(
        model,
        example,
        consistency=config.objective.lambda_cons > 0,
        detach_target=config.objective.consistency.detach_target,
    )
    shapes = [torch.Size(), *(part.output_shape for part in gated.blocks)]
    first = [before != after for before, after in pairwise(shapes)]
    fill_slots(gated, make_gate or GateMaker(config.gate, _gated(config, first)))
    return gated


def weights_of(config: DictConfig) -> int:
    """How many weights the network has at least, known before any memory is taken for them."""
    if config.network.library is None:
        return convolution_weights(config.network)
    return parameter_count(*_library_arguments(config)) or 0


def _library_arguments(config: DictConfig) -> tuple[Library, str, dict[str, Any], int, int]:
    images, network = image_set(config.data), config.network
    options = {} if network.options is None else OmegaConf.to_container(network.options, resolve=True)
    return network.library, network.model, options, images.shape[2], len(images.classes)


def _gated(config: DictConfig, first_of_stage: list[bool]) -> list[bool]:
    """(N,): whether each block has a gate."""
    if config.gate.kind is GateKind.none:
        return [False] * len(first_of_stage)
    return [config.gate.first_blocks or not is_first for is_first in first_of_stage]


def dense_network(config: DictConfig) -> GatedNetwork:
    """The same network without gates."""
    return build_network(config, make_gate=lambda channels: None)


def reference_network(config: DictConfig) -> GatedNetwork:
    """The dense network of the config's depth and width, which FLOPs and times of deployment are ratios to.

    It does not depend on how the run distributes blocks and channels over the stages. Untrained: neither a counter nor
    a clock depends on weights.
    """
    with torch.random.fork_rng(devices=[]):
        return dense_network(OmegaConf.merge(config, {"network": reference(config.network)}))


def reference_flops(config: DictConfig) -> int:
    """FLOPs of the reference network for one image."""
    with torch.device("meta"):
        return dense_flops(reference_network(config), image_set(config.data).shape)


def build_module(config: DictConfig) -> LitCosineGate:
    """The network with the weights that `config.seed` gives it, and its objective."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = build_network(config)
    kept = json.loads(masked(json.dumps(primitives(config))))  # checkpoints hold it, and loggers send it
    return LitCosineGate(
        network=network,
        objective=build_objective(config, network),
        optimizer=config.optimizer,
        num_classes=network.num_classes,
        hparams=kept,
    )


def build_objective(config: DictConfig, network: GatedNetwork) -> CosineGateLoss:
    """The loss of a network's training, before the warmup callback sets its warmup."""
    objective, by_flops = config.objective, config.objective.weighting is Weighting.flops
    return CosineGateLoss(
        lambda_flops=objective.lambda_flops,
        lambda_cons=objective.lambda_cons,
        tau_target=objective.tau_target,
        sided=objective.sided,
        target=objective.target,
        block_weights=block_flops(network, image_set(config.data).shape) if by_flops else None,
        gated=torch.tensor([block.gate is not None for block in network.blocks], device="cpu"),
    )
