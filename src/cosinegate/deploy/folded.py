"""A trained network as it is deployed: BatchNorm folded into the convolutions, each gate one small MLP and a threshold.

`folded` makes it from a trained network. Every form that is run or exported starts from it.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from cosinegate import geometry
from cosinegate.errors import UserError
from cosinegate.gates import LEAK, PredictiveGate
from cosinegate.networks import ResidualBlock, ResNet
from cosinegate.networks.block import PadShortcut


class GateHead(nn.Module):
    """Open where w2·ReLU(W1·statistics(x) + b1) > turn, with a leaky ReLU: predictor and controller side by side, γ and
    the statistics' mean and deviation multiplied in.
    """

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(features, hidden)
        self.w2 = nn.Linear(hidden, 1)
        self.register_buffer("turn", torch.zeros(()))

    def forward(self, seen: Tensor) -> Tensor:
        """(B, 1) bool of the statistics (B, 3C)."""
        return self.w2(nn.functional.leaky_relu(self.w1(seen), LEAK)) > self.turn


class FoldedBlock(nn.Module):
    """relu(s(x) + F(x)) with two convolutions, and a head that says for whom F runs; without a head, for all."""

    def __init__(self, conv1: nn.Conv2d, conv2: nn.Conv2d, shortcut: nn.Module, post_activation: bool) -> None:
        super().__init__()
        self.conv1, self.conv2, self.shortcut = conv1, conv2, shortcut
        self.post_activation = post_activation
        self.head: GateHead | None = None
        self.looks = False  # whether the statistics of its input are what its head, and later ones, are shown
        self.removed = False  # F is gone: every sample takes the identity path

    def identity(self, x: Tensor) -> Tensor:
        """What a closed gate gives. After a ReLU an identity path is what it is."""
        if isinstance(self.shortcut, nn.Identity):
            return x
        return torch.relu(self.shortcut(x)) if self.post_activation else self.shortcut(x)

    def full(self, x: Tensor) -> Tensor:
        """What an open gate gives."""
        y = self.shortcut(x) + self.conv2(torch.relu(self.conv1(x)))
        return torch.relu(y) if self.post_activation else y


class FoldedNetwork(nn.Module):
    """Stem, blocks and head. Its forward is the masked form: F for all, and the identity where a gate is closed."""

    def __init__(
        self, stem: nn.Conv2d, blocks: list[FoldedBlock], head: nn.Linear, size: tuple[int, int] | None
    ) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head
        self.size = size  # (H, W) of the images that it was trained on, where that is known

    def check(self, images: Tensor) -> None:
        """Ends with one line where images are not such as the network was trained on."""
        channels = self.stem.in_channels
        if images.dim() != 4 or images.shape[1] != channels or self.size not in (None, tuple(images.shape[2:])):
            wanted = ", ".join(map(str, self.size or ("height", "width")))
            raise UserError(f"images have shape {tuple(images.shape)}: must be (batch, {channels}, {wanted})")
        if images.dtype != self.stem.weight.dtype:
            raise UserError(f"images are {images.dtype}: must be normalised {self.stem.weight.dtype}")

    def forward(self, images: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.check(images)
        x, seen = torch.relu(self.stem(images)), None
        for block in self.blocks:
            if block.looks:
                seen = geometry.pooled_statistics(x)
            if block.removed:
                x = block.identity(x)
            elif block.head is None:
                x = block.full(x)
            else:
                x = torch.where(block.head(seen)[:, :, None, None], block.full(x), block.identity(x))
        return self.head(geometry.global_average_pool(x))


def folded(network: ResNet, size: tuple[int, int] | None = None) -> FoldedNetwork:
    """The deployable form of a network that was trained on images of a size (H, W).

    One whose gates need F(x) first cannot skip anything.
    """
    network = network.eval()
    blocks = []
    for block in network.blocks:
        conv1, bn1, _, conv2, bn2 = block.residual
        plain = FoldedBlock(
            fuse_conv_bn_eval(conv1, bn1), fuse_conv_bn_eval(conv2, bn2), _shortcut(block), _activates(block)
        )
        if block.gate is not None:
            if not block.gate.decides_first:
                raise UserError(
                    "its gates look at F(x) before they decide, so nothing can be skipped; "
                    "train with gate=predictive (gate.signal=predicted)"
                )
            plain.head, plain.looks = _head(block.gate), block.looks
        blocks.append(plain)
    conv, bn, _ = network.stem
    made = FoldedNetwork(fuse_conv_bn_eval(conv, bn), blocks, network.head, size)
    return made.requires_grad_(False).eval().to(memory_format=torch.channels_last)


def without_gates(network: FoldedNetwork) -> FoldedNetwork:
    """The dense network of the same weights: what a comparison of times needs."""
    blocks = [FoldedBlock(b.conv1, b.conv2, b.shortcut, b.post_activation) for b in network.blocks]
    return FoldedNetwork(network.stem, blocks, network.head, network.size).eval()


def _activates(block: ResidualBlock) -> bool:
    return isinstance(block.activation, nn.ReLU)


def _shortcut(block: ResidualBlock) -> nn.Module:
    if isinstance(block.shortcut, nn.Identity | PadShortcut):
        return block.shortcut
    return fuse_conv_bn_eval(*block.shortcut)


@torch.no_grad()
def _head(gate: PredictiveGate) -> GateHead:
    parts = [gate.predictor] if gate.controller is None else [gate.predictor, gate.controller]
    hidden = sum(part.w1.out_features for part in parts)
    head = GateHead(gate.predictor.w1.in_features, hidden)
    mean, deviation = gate.standardise.mean, gate.standardise.deviation
    head.w1.weight.copy_(torch.cat([part.w1.weight for part in parts]) / deviation)
    head.w1.bias.copy_(torch.cat([part.w1.bias for part in parts]) - head.w1.weight @ mean)
    head.w2.weight.copy_(gate.gamma * torch.cat([part.w2.weight for part in parts], dim=1))
    head.w2.bias.copy_(gate.gamma * sum(part.w2.bias for part in parts))
    head.turn.fill_(gate.opening.turn)
    return head
