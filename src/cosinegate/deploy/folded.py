"""A trained network as it is deployed: BatchNorm folded into the convolutions, each gate an eye and a head.

`folded` makes it from a trained network. Every form that is run or exported starts from it.
"""

from itertools import takewhile

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from cosinegate import geometry
from cosinegate.deploy.eyes import ExitEye, Eye
from cosinegate.deploy.gates import deployed
from cosinegate.deploy.heads import Head
from cosinegate.errors import UserError
from cosinegate.gates import Seen
from cosinegate.gates.exit import ExitClassifier
from cosinegate.networks import GatedNetwork, ResidualBlock
from cosinegate.networks.block import PadShortcut


class FoldedBlock(nn.Module):
    """relu(s(x) + F(x)) with two convolutions, and a head that says for whom F runs; without a head, for all."""

    def __init__(self, conv1: nn.Conv2d, conv2: nn.Conv2d, shortcut: nn.Module, post_activation: bool) -> None:
        super().__init__()
        self.conv1, self.conv2, self.shortcut = conv1, conv2, shortcut
        self.post_activation = post_activation
        self.eye: Eye | None = None  # what it sees of its input is what its head, and later ones, are shown
        self.head: Head | None = None
        self.removed = False  # F is gone: every sample takes the identity path

    @property
    def looks(self) -> bool:
        return self.eye is not None

    def identity(self, x: Tensor) -> Tensor:
        """What a closed gate gives. After a ReLU an identity path is what it is."""
        if isinstance(self.shortcut, nn.Identity):
            return x
        return torch.relu(self.shortcut(x)) if self.post_activation else self.shortcut(x)

    def full(self, x: Tensor) -> Tensor:
        """What an open gate gives."""
        y = self.shortcut(x) + self.conv2(torch.relu(self.conv1(x)))
        return torch.relu(y) if self.post_activation else y

    def forward(self, x: Tensor) -> Tensor:
        """What it gives to every sample, where it has no gate."""
        return self.identity(x) if self.removed else self.full(x)


class FoldedNetwork(nn.Module):
    """Stem, blocks and head. Its forward is the masked form: F for all, and the identity where a gate is closed."""

    def __init__(
        self, stem: nn.Conv2d, blocks: list[FoldedBlock], head: nn.Linear | ExitClassifier, size: tuple[int, int] | None
    ) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head
        self.size = size  # (H, W) of the images that it was trained on, where that is known

    @property
    def classes(self) -> int:
        return self.head.w2.out_features if isinstance(self.head, ExitClassifier) else self.head.out_features

    def check(self, images: Tensor) -> None:
        """Ends with one line where images are not such as the network was trained on."""
        channels = self.stem.in_channels
        if images.dim() != 4 or images.shape[1] != channels or self.size not in (None, tuple(images.shape[2:])):
            wanted = ", ".join(map(str, self.size or ("height", "width")))
            raise UserError(f"images have shape {tuple(images.shape)}: must be (batch, {channels}, {wanted})")
        if images.dtype != self.stem.weight.dtype:
            raise UserError(f"images are {images.dtype}: must be normalised {self.stem.weight.dtype}")

    def begin(self, images: Tensor) -> Seen:
        """What the first eye knows before it looks."""
        eye = next((block.eye for block in self.blocks if block.eye is not None), None)
        return None if eye is None else eye.begin(images)

    def forward(self, images: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.check(images)
        x, seen = torch.relu(self.stem(images)), self.begin(images)
        for block in self.blocks:
            if block.eye is not None:
                seen = block.eye(x, seen)
            if block.head is None:
                x = block(x)
            else:
                x = torch.where(block.head(seen)[:, :, None, None], block.full(x), block.identity(x))
        return self.answer(self.classify(x), seen)

    def classify(self, x: Tensor) -> Tensor:
        """Class scores of the last map. The head is that of an exit where no image passes it."""
        own = isinstance(self.head, ExitClassifier)
        return self.head(geometry.pooled_statistics(x) if own else geometry.global_average_pool(x))

    def answer(self, scores: Tensor, seen: Seen) -> Tensor:
        """Those of the last map, but for images that left at an exit, which have that exit's."""
        last = next((block for block in reversed(self.blocks) if block.head is not None), None)
        if last is None or not isinstance(last.eye, ExitEye):
            return scores
        return torch.where(last.head(seen), scores, seen[1])


class Leading(nn.Module):
    """Stem and the blocks that all samples pass before the first look at one: what a compiler can take as a whole."""

    def __init__(self, network: FoldedNetwork) -> None:
        super().__init__()
        self.stem = network.stem
        self.blocks = nn.ModuleList(takewhile(lambda block: block.eye is None and block.head is None, network.blocks))

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.stem(images))
        for block in self.blocks:
            x = block(x)
        return x


def folded(network: GatedNetwork, size: tuple[int, int] | None = None) -> FoldedNetwork:
    """The deployable form of a network that was trained on images of a size (H, W).

    One whose gates need F(x) first cannot skip anything. A gate that is the same for every image is no gate any more.
    """
    network = network.eval()
    if len(network.stem) != 3 or any(len(block.residual) != 5 for block in network.blocks):
        raise UserError("only the ResNets of network.depth are deployed, not torchvision's")
    blocks = []
    for block in network.blocks:
        conv1, bn1, _, conv2, bn2 = block.residual
        plain = FoldedBlock(
            fuse_conv_bn_eval(conv1, bn1), fuse_conv_bn_eval(conv2, bn2), _shortcut(block), _activates(block)
        )
        if block.gate is not None and block.gate.constant is not None:
            plain.removed = not block.gate.constant
        elif block.gate is not None:
            eye, plain.head = deployed(block.gate)
            plain.eye = eye if block.looks else None
        blocks.append(plain)
    conv, bn, _ = network.stem
    made = FoldedNetwork(fuse_conv_bn_eval(conv, bn), blocks, network.head, size)
    return made.requires_grad_(False).eval().to(memory_format=torch.channels_last)


def _activates(block: ResidualBlock) -> bool:
    return isinstance(block.activation, nn.ReLU)


def _shortcut(block: ResidualBlock) -> nn.Module:
    if isinstance(block.shortcut, nn.Identity | PadShortcut):
        return block.shortcut
    return fuse_conv_bn_eval(*block.shortcut)
