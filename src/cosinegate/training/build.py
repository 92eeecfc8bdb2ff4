"""From a config to the objects it names."""

import json
from collections.abc import Callable

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from cosinegate.config.choices import GateKind, Weighting
from cosinegate.config.identity import blocks_per_stage, primitives, reference, stage_widths
from cosinegate.data import image_set
from cosinegate.gates import Gate
from cosinegate.gates.make import GateMaker
from cosinegate.lit import LitCosineGate
from cosinegate.networks import GatedNetwork, ResNet
from cosinegate.networks.flops import block_flops, dense_flops
from cosinegate.objective import Objective
from cosinegate.terminal.secrets import masked


def first_of_stage(config: DictConfig) -> list[bool]:
    """(N,): whether each block is the first of its stage."""
    if config.network.torchvision is not None:
        import torchvision  # what few networks need

        from cosinegate.networks.torchvision import residual_blocks

        with torch.device("meta"):
            model = torchvision.models.get_model(config.network.torchvision, weights=None)
        return [is_first for _, is_first in residual_blocks(model)]
    return [index == 0 for number in blocks_per_stage(config.network) for index in range(number)]


def gated_blocks(config: DictConfig) -> list[bool]:
    """(N,): whether each block has a gate."""
    if config.gate.kind is GateKind.none:
        return [False] * len(first_of_stage(config))
    return [config.gate.first_blocks or not is_first for is_first in first_of_stage(config)]


def build_network(config: DictConfig, make_gate: Callable[[int], Gate | None] | None = None) -> GatedNetwork:
    """The network with gates as the config has them, or as `make_gate` makes them by a block's input channels."""
    images, network = image_set(config.data), config.network
    common = {
        "in_channels": images.shape[2],
        "num_classes": len(images.classes),
        "make_gate": make_gate or GateMaker(config.gate, gated_blocks(config)),
        "consistency": config.objective.lambda_cons > 0,
        "detach_target": config.objective.consistency.detach_target,
    }
    if network.torchvision is not None:
        from cosinegate.networks.torchvision import torchvision_resnet

        return torchvision_resnet(network.torchvision, **common)
    return ResNet(
        blocks_per_stage=blocks_per_stage(network),
        widths=stage_widths(network),
        shortcut=network.shortcut,
        post_activation=network.post_activation,
        **common,
    )


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
        objective=build_objective(config),
        optimizer=config.optimizer,
        num_classes=network.num_classes,
        hparams=kept,
    )


def build_objective(config: DictConfig) -> Objective:
    objective = config.objective
    return Objective(
        lambda_flops=objective.lambda_flops,
        lambda_cons=objective.lambda_cons,
        tau_target=objective.tau_target,
        sided=objective.sided,
        target=objective.target,
        block_weights=_block_weights(config) if objective.weighting is Weighting.flops else None,
        gated=torch.tensor(gated_blocks(config), device="cpu"),
    )


def _block_weights(config: DictConfig) -> Tensor:
    """(N,): the FLOPs of every block's residual."""
    with torch.device("meta"):
        network = dense_network(config)
    return block_flops(network, image_set(config.data).shape)
