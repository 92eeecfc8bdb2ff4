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
    """relu(s(x) + F(x)), and a head that decides for whom F runs; without a head, for all. F is two or three
    convolutions with ReLUs between them; with none, every sample takes the identity path.
    """

    def __init__(
        self, inputs: int, outputs: int, convolutions: list[nn.Conv2d], shortcut: nn.Module, post_activation: bool
    ) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs  # channels
        self.names = [f"conv{number}" for number in range(1, len(convolutions) + 1)]
        for name, convolution in zip(self.names, convolutions, strict=True):
            self.add_module(name, convolution)
        self.shortcut, self.post_activation = shortcut, post_activation
        self.eye: Eye | None = None  # what it sees of its input is what its head, and later ones, are shown
        self.head: Head | None = None
        self.removed = not convolutions

    @property
    def convolutions(self) -> list[nn.Conv2d]:
        return [getattr(self, name) for name in self.names]

    @property
    def looks(self) -> bool:
        return self.eye is not None

    @property
    def routes(self) -> bool:
        """Whether it decides before F for whom F runs."""
        return self.head is not None and not self.head.compares

    def residual(self, x: Tensor) -> Tensor:
        """F(x)."""
        *first, last = self.convolutions
        for convolution in first:
            x = torch.relu(convolution(x))
        return last(x)

    def identity(self, x: Tensor) -> Tensor:
        """What a closed gate gives. After a ReLU an identity path is what it is."""
        if isinstance(self.shortcut, nn.Identity):
            return x
        return torch.relu(self.shortcut(x)) if self.post_activation else self.shortcut(x)

    def full(self, x: Tensor) -> Tensor:
        """What an open gate gives."""
        y = self.shortcut(x) + self.residual(x)
        return torch.relu(y) if self.post_activation else y

    def compared(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What a head that needs F(x) gives, and for whom it is open (B, 1): F runs for all."""
        s, r = self.shortcut(x), self.residual(x)
        is_open = self.head.compare(x, s, r)
        y = torch.where(is_open[:, :, None, None], s + r, s)
        return torch.relu(y) if self.post_activation else y, is_open

    def forward(self, x: Tensor) -> Tensor:
        """What it gives to every sample, where it has no gate."""
        return self.identity(x) if self.removed else self.full(x)


class FoldedNetwork(nn.Module):
    """Stem, blocks and head. Its forward is the masked form: F for all, and the identity where a gate is closed."""

    def __init__(
        self,
        stem: nn.Conv2d,
        blocks: list[FoldedBlock],
        head: nn.Linear | ExitClassifier,
        size: tuple[int, int] | None,
        pool: nn.MaxPool2d | None = None,
    ) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head
        self.pool = pool  # after the stem, of torchvision's networks
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

    @property
    def routes(self) -> bool:
        """Whether a gate decides before F for whom F runs."""
        return any(block.routes for block in self.blocks)

    def enter(self, images: Tensor) -> Tensor:
        """What the first block is given."""
        x = torch.relu(self.stem(images))
        return x if self.pool is None else self.pool(x)

    def forward(self, images: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.check(images)
        x, seen = self.enter(images), self.begin(images)
        for block in self.blocks:
            if block.eye is not None:
                seen = block.eye(x, seen)
            if block.head is None:
                x = block(x)
            elif block.head.compares:
                x, _ = block.compared(x)
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
        self.stem, self.pool = network.stem, network.pool
        self.blocks = nn.ModuleList(takewhile(lambda block: block.eye is None and block.head is None, network.blocks))

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.stem(images))
        x = x if self.pool is None else self.pool(x)
        for block in self.blocks:
            x = block(x)
        return x


def folded(network: GatedNetwork, size: tuple[int, int] | None = None, compares: bool = False) -> FoldedNetwork:
    """The deployable form of a network that was trained on images of a size (H, W).

    A gate that is the same for every image is no gate any more. One that needs F(x) first cannot skip anything; with
    `compares` it is taken all the same, F runs for all, and its decision selects.
    """
    network = network.eval()
    conv, bn, _, *pool = network.stem
    blocks, channels = [], conv.out_channels
    for block in network.blocks:
        constant = None if block.gate is None else block.gate.constant
        convolutions = [] if block.residual is None or constant is False else _convolutions(block.residual)
        shortcut = _shortcut(block)
        outputs = convolutions[-1].out_channels if convolutions else _outputs(shortcut, channels)
        plain = FoldedBlock(channels, outputs, convolutions, shortcut, isinstance(block.activation, nn.ReLU))
        if block.asks and constant is None:
            eye, plain.head = deployed(block.gate, compares)
            plain.eye = eye if block.looks else None
        elif block.gate is not None and block.looks and block.settled:  # for the gates of later blocks
            plain.eye, _ = deployed(block.gate)
        blocks.append(plain)
        channels = outputs
    made = FoldedNetwork(fuse_conv_bn_eval(conv, bn), blocks, network.head, size, *pool)
    return made.requires_grad_(False).eval().to(memory_format=torch.channels_last)


def _convolutions(residual: nn.Sequential) -> list[nn.Conv2d]:
    """Those of F, each with its BatchNorm folded in."""
    parts = [part for part in residual if not isinstance(part, nn.ReLU)]
    return [fuse_conv_bn_eval(conv, bn) for conv, bn in zip(parts[::2], parts[1::2], strict=True)]


def _outputs(shortcut: nn.Module, inputs: int) -> int:
    if isinstance(shortcut, PadShortcut):
        return inputs + shortcut.new_channels
    return shortcut.out_channels if isinstance(shortcut, nn.Conv2d) else inputs


def _shortcut(block: ResidualBlock) -> nn.Module:
    if isinstance(block.shortcut, nn.Identity | PadShortcut):
        return block.shortcut
    return fuse_conv_bn_eval(*block.shortcut)
