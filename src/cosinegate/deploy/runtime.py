"""A deployed network on torch: each convolution with the addition and the ReLU after it as one oneDNN call."""

import copy

import torch
from torch import Tensor, nn

from cosinegate.deploy.card import Network
from cosinegate.deploy.exits import EarlyExitNetwork
from cosinegate.networks import GatedNetwork, Output, ResidualBlock
from cosinegate.networks.adapt import AdaptedNetwork

PREPARED = 64  # batch sizes that oneDNN meets ahead; of many more it would forget the first
# elsewhere the same calls are made one after the other; without AVX2 oneDNN's fused addition ends the process
FUSES = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() != "DEFAULT"


class FusedConv:
    """A convolution with what follows it, as torch's own compiler calls it: ReLU, and an addition before it."""

    def __init__(self, layer: nn.Conv2d) -> None:
        self.layer = layer
        self.geometry = (layer.padding, layer.stride, layer.dilation, layer.groups)
        self.packed: dict[torch.Size, Tensor] = {}  # oneDNN's layout of the weights, by the size of a map

    def weight(self, x: Tensor) -> Tensor:
        """The weights in oneDNN's layout for maps of this size."""
        size = x.shape[2:]
        if size not in self.packed:
            self.packed[size] = torch.ops.mkldnn._reorder_convolution_weight(self.layer.weight, *self.geometry, x.shape)
        return self.packed[size]

    def __call__(self, x: Tensor) -> Tensor:
        """ReLU(convolution)."""
        if not FUSES:
            return self.layer(x).relu_()
        weight, bias = self.weight(x), self.layer.bias
        return torch.ops.mkldnn._convolution_pointwise(x, weight, bias, *self.geometry, "relu", [], "")

    def add_to(self, onto: Tensor, x: Tensor, relu: bool) -> Tensor:
        """`onto` plus the convolution, and its ReLU, written over `onto`."""
        if not FUSES:
            y = onto.add_(self.layer(x))
            return y.relu_() if relu else y
        after = "relu" if relu else None
        return torch.ops.mkldnn._convolution_pointwise_.binary(
            onto, x, self.weight(x), self.layer.bias, *self.geometry, "add", None, after, [], ""
        )


class FusedBlock(nn.Module):
    """A block without a gate, in as few calls as can be. It may write over its input."""

    def __init__(self, block: ResidualBlock) -> None:
        super().__init__()
        self.gate, self.residual, self.block = None, block.residual, block
        self.convolutions = [FusedConv(layer) for layer in block.residual if isinstance(layer, nn.Conv2d)]
        self.is_identity = isinstance(block.shortcut, nn.Identity)
        self.has_relu = isinstance(block.activation, nn.ReLU)

    def as_map(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, images: Tensor) -> tuple[Tensor, None]:
        onto = x if self.is_identity else self.block.shortcut(x).contiguous(memory_format=torch.channels_last)
        *first, last = self.convolutions
        for convolution in first:
            x = convolution(x)
        return last.add_to(onto, x, self.has_relu), None


class Runtime:
    """Runs a copy of a folded network (see `fold.folded`): class scores and route of images (B, C, H, W)."""

    def __init__(self, network: Network) -> None:
        self.network = copy.deepcopy(network).eval()
        inner = _inner(self.network)
        if isinstance(inner, AdaptedNetwork):
            return
        inner.blocks = nn.ModuleList(FusedBlock(block) if _may_fuse(block) else block for block in inner.blocks)

    @torch.inference_mode()
    def prepare(self, image: Tensor) -> None:
        """Meets every batch size that can be left after an exit, for images like this one (1, C, H, W): oneDNN makes a
        convolution anew for each, which takes as long as some ten images, and keeps the last thousand.
        """
        if not isinstance(self.network, EarlyExitNetwork) or isinstance(_inner(self.network), AdaptedNetwork):
            return
        image = image.contiguous(memory_format=torch.channels_last)
        x = self.network.network.stem(image)
        for index, block in enumerate(self.network.blocks):
            if index > self.network.after[0] and block.gate is None:
                for number in range(2, PREPARED + 1):
                    many = x.repeat(number, 1, 1, 1).contiguous(memory_format=torch.channels_last)
                    block(many, image)
            x, _ = block(x, image)

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Output:
        return self.network(images.contiguous(memory_format=torch.channels_last))


def _inner(network: Network) -> GatedNetwork:
    return network.network if isinstance(network, EarlyExitNetwork) else network


def _may_fuse(block: ResidualBlock) -> bool:
    layers = (nn.Conv2d, nn.ReLU)
    return (
        block.gate is None and block.residual is not None and all(isinstance(part, layers) for part in block.residual)
    )
