"""Folds BatchNorm into the convolutions before it, as every deployed form has it."""

import copy
from typing import TypeVar

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from cosinegate.deploy.exits import EarlyExitNetwork
from cosinegate.networks import GatedNetwork
from cosinegate.networks.adapt import AdaptedNetwork

Network = TypeVar("Network", GatedNetwork, EarlyExitNetwork)


def folded(network: Network) -> Network:
    """A copy without BatchNorm in stem, blocks and shortcuts. Gates, exits and models of others stay as they are."""
    copied = copy.deepcopy(network).eval().requires_grad_(False)
    inner = copied.network if isinstance(copied, EarlyExitNetwork) else copied
    if isinstance(inner, AdaptedNetwork):  # which layers follow each other is the model's own affair
        return copied
    inner.stem = _folded(inner.stem)
    for block in inner.blocks:
        block.shortcut = _folded(block.shortcut)
        block.residual = None if block.residual is None else _folded(block.residual)
        if isinstance(block.activation, nn.ReLU):
            block.activation = nn.ReLU()  # a compiler fuses it; written in place it would only confuse an exporter
    return copied.to(memory_format=torch.channels_last)


def _folded(layers: nn.Module) -> nn.Module:
    if not isinstance(layers, nn.Sequential):
        return layers
    kept: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, nn.BatchNorm2d) and kept and isinstance(kept[-1], nn.Conv2d):
            kept[-1] = fuse_conv_bn_eval(kept[-1], layer)
        else:
            kept.append(nn.ReLU() if isinstance(layer, nn.ReLU) else layer)
    return nn.Sequential(*kept)
