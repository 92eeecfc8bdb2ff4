"""The CIFAR ResNet of He et al. (2016), depth 6n+2: a 3x3 stem, three stages of n blocks, GAP, a linear head."""

from collections.abc import Callable

from torch import nn

from cosinegate.choices import Look, Shortcut
from cosinegate.gates import Gate
from cosinegate.networks.block import ResidualBlock, basic_residual, shortcut_path
from cosinegate.networks.network import GatedNetwork


class ResNet(GatedNetwork):
    """`make_gate(channels)` makes the next block's gate by the channels that it is shown, or None. `look` says where
    gates that decide first look, `consistency` whether that term is trained and `detach_target` how.
    """

    def __init__(
        self,
        blocks_per_stage: list[int],
        widths: list[int],
        in_channels: int,
        num_classes: int,
        shortcut: Shortcut,
        post_activation: bool,
        make_gate: Callable[[int], Gate | None],
        look: Look,
        consistency: bool,
        detach_target: bool,
    ) -> None:
        inputs = widths[0]
        stem = nn.Sequential(
            nn.Conv2d(in_channels, inputs, 3, padding=1, bias=False), nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)
        )
        blocks = []
        for stage, (number, outputs) in enumerate(zip(blocks_per_stage, widths, strict=True)):
            seen = 0  # channels of what a gate of this stage has looked at
            for index in range(number):
                stride = 2 if stage > 0 and index == 0 else 1
                shares = look is Look.stage and seen > 0
                gate = make_gate(seen if shares else inputs)
                looks = gate is not None and gate.decides_first and not shares
                seen = inputs if looks else seen
                path = shortcut_path(shortcut, inputs, outputs, stride)
                activation = nn.ReLU(inplace=True) if post_activation else nn.Identity()
                residual = basic_residual(inputs, outputs, stride)
                blocks.append(ResidualBlock(path, residual, activation, gate, looks, consistency))
                inputs = outputs
        super().__init__(stem, blocks, nn.Linear(inputs, num_classes), detach_target)
        for part in [stem, *(part for block in blocks for part in (block.shortcut, block.residual))]:
            for module in part.modules():  # of gates their makers know best
                if isinstance(module, nn.Conv2d):
                    nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
