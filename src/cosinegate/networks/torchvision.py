"""A gate in every residual block of torchvision's ResNets: the slot asks nothing of the architecture around it."""

from collections.abc import Callable

import torchvision
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from cosinegate.gates import Gate
from cosinegate.networks.block import ResidualBlock
from cosinegate.networks.network import GatedNetwork


def residual_blocks(model: nn.Module) -> list[tuple[BasicBlock | Bottleneck, bool]]:
    """Its residual blocks in the order that images meet them, each with whether it is the first of its stage."""
    kinds = (BasicBlock, Bottleneck)
    stages = [[block for block in stage if isinstance(block, kinds)] for stage in model.children() if _is_list(stage)]
    return [(block, index == 0) for stage in stages for index, block in enumerate(stage)]


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential)


class TorchvisionResNet(GatedNetwork):
    """`model` with the same weights, and a gate in every block for which `make_gate` makes one."""

    def __init__(
        self,
        model: torchvision.models.ResNet,
        *,
        make_gate: Callable[[int], Gate | None],
        consistency: bool,
        detach_target: bool,
    ) -> None:
        stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
        blocks = []
        for block, _ in residual_blocks(model):
            one = ResidualBlock(
                shortcut=nn.Identity() if block.downsample is None else block.downsample,
                residual=residual(block),
                activation=block.relu,
                gate=make_gate(block.conv1.in_channels),
                consistency=consistency,
            )
            blocks.append(one)
        super().__init__(stem=stem, blocks=blocks, head=model.fc, detach_target=detach_target)


def residual(block: BasicBlock | Bottleneck) -> nn.Sequential:
    """F: the block's convolutions, each with its BatchNorm, ReLUs between them."""
    pairs = [(block.conv1, block.bn1), (block.conv2, block.bn2)]
    pairs += [(block.conv3, block.bn3)] if isinstance(block, Bottleneck) else []
    parts: list[nn.Module] = []
    for conv, bn in pairs:
        parts += [*([nn.ReLU(inplace=True)] if parts else []), conv, bn]
    return nn.Sequential(*parts)


def torchvision_resnet(
    name: str,
    *,
    in_channels: int,
    num_classes: int,
    make_gate: Callable[[int], Gate | None],
    consistency: bool,
    detach_target: bool,
) -> TorchvisionResNet:
    """By torchvision's name for it, untrained; its first convolution takes images of any number of channels."""
    model = torchvision.models.get_model(name, weights=None, num_classes=num_classes)
    if in_channels != model.conv1.in_channels:
        first = model.conv1
        model.conv1 = nn.Conv2d(in_channels, first.out_channels, 7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    return TorchvisionResNet(model, make_gate=make_gate, consistency=consistency, detach_target=detach_target)
