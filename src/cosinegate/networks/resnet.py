"""The CIFAR ResNet of He et al. (2016), depth 6n+2: a 3x3 stem, three stages of n blocks, GAP, a linear head."""

from collections.abc import Callable

from torch import nn

from cosinegate.config.choices import Shortcut
from cosinegate.gates import Gate
from cosinegate.networks.block import ResidualBlock, basic_residual, shortcut_path
from cosinegate.networks.network import GatedNetwork


class ResNet(GatedNetwork):
    """`make_gate(channels)` makes the next block's gate, or None, by the channels of the block's input."""

    def __init__(
        self,
        *,
        blocks_per_stage: list[int],
        widths: list[int],
        in_channels: int,
        num_classes: int,
        shortcut: Shortcut,
        post_activation: bool,
        make_gate: Callable[[int], Gate | None],
        consistency: bool,
        detach_target: bool,
    ) -> None:
        inputs = widths[0]
        stem = nn.Sequential(
            nn.Conv2d(in_channels, inputs, 3, padding=1, bias=False), nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)
        )
        blocks = []
        for stage, (number, outputs) in enumerate(zip(blocks_per_stage, widths, strict=True)):
            for index in range(number):
                stride = 2 if stage > 0 and index == 0 else 1
                gate = make_gate(inputs)
                block = ResidualBlock(
                    shortcut=shortcut_path(shortcut, inputs, outputs, stride),
                    residual=basic_residual(inputs, outputs, stride),
                    activation=nn.ReLU(inplace=True) if post_activation else nn.Identity(),
                    gate=gate,
                    consistency=consistency,
                )
                blocks.append(block)
                inputs = outputs
        super().__init__(stem=stem, blocks=blocks, head=nn.Linear(inputs, num_classes), detach_target=detach_target)
        for part in [stem, *(part for block in blocks for part in (block.shortcut, block.residual))]:
            for module in part.modules():  # gates draw their own weights
                if isinstance(module, nn.Conv2d):
                    nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
