"""The skipping runtime: F runs for the samples whose gate is open, and for no other.

Where the time goes, and what is done about it: a batch is cut into micro-batches whose feature maps stay in cache, so
that the gather and the scatter of open samples cost little; the convolution, the addition and the ReLU are one oneDNN
call each; a closed sample's map is not touched at all, because the result is written into the maps of the batch.
"""

import torch
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.deploy.folded import FoldedBlock, FoldedNetwork
from cosinegate.errors import UserError

MICRO_BATCH = 16


def conv(x: Tensor, layer: nn.Conv2d, relu: bool) -> Tensor:
    """A convolution and its ReLU as one oneDNN call, the one that torch's own compiler makes of them."""
    activation = "relu" if relu else "none"
    return torch.ops.mkldnn._convolution_pointwise(
        x, layer.weight, layer.bias, layer.padding, layer.stride, layer.dilation, 1, activation, [], ""
    )


def conv_add(x: Tensor, layer: nn.Conv2d, onto: Tensor, relu: bool) -> Tensor:
    """ReLU(onto + convolution), written over `onto`."""
    activation = "relu" if relu else None
    return torch.ops.mkldnn._convolution_pointwise_.binary(
        onto,
        x,
        layer.weight,
        layer.bias,
        layer.padding,
        layer.stride,
        layer.dilation,
        1,
        "add",
        None,
        activation,
        [],
        "",
    )


class SkippingNetwork:
    """Class scores of images (B, C, H, W); `gates` is what the last call decided, (B, N) over the blocks."""

    def __init__(self, network: FoldedNetwork, micro_batch: int = MICRO_BATCH) -> None:
        self.network = network.eval().to(memory_format=torch.channels_last)
        self.micro_batch = micro_batch
        self.gates: Tensor | None = None

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        self._check(images)
        images = images.to(memory_format=torch.channels_last)
        self.gates = torch.ones(len(images), len(self.network.blocks), dtype=torch.bool)
        parts = [
            self._run(images[start : start + self.micro_batch], self.gates[start : start + self.micro_batch])
            for start in range(0, len(images), self.micro_batch)
        ]
        return torch.cat(parts) if parts else images.new_zeros(0, self.network.head.out_features)

    def _run(self, images: Tensor, gates: Tensor) -> Tensor:
        x = conv(images, self.network.stem, relu=True)
        for place, block in enumerate(self.network.blocks):
            x = self._block(block, x, gates[:, place])
        return self.network.head(geometry.global_average_pool(x))

    def _block(self, block: FoldedBlock, x: Tensor, gates: Tensor) -> Tensor:
        if block.removed:
            gates.fill_(False)
            return block.identity(x)
        if block.head is None:
            return _full(block, x)
        is_open = block.head(x)
        gates.copy_(is_open)
        number = int(is_open.sum())
        if number == len(x):
            return _full(block, x)
        y = block.identity(x)
        if number == 0:
            return y
        computed = is_open.nonzero().squeeze(1)
        some = x[computed]
        return y.index_copy_(0, computed, _full(block, some))

    def _check(self, images: Tensor) -> None:
        channels = self.network.stem.in_channels
        if images.dim() != 4 or images.shape[1] != channels:
            raise UserError(f"images have shape {tuple(images.shape)}: must be (batch, {channels}, height, width)")


def _full(block: FoldedBlock, x: Tensor) -> Tensor:
    """relu(s(x) + F(x)); an identity path is written over, for nothing looks at it again."""
    inner = conv(x, block.conv1, relu=True)
    onto = block.shortcut(x).contiguous(memory_format=torch.channels_last)
    return conv_add(inner, block.conv2, onto, block.post_activation)
