"""FLOPs of what really runs, as torch's own counter sees it: convolutions, matrix products, the gate's dot products.

`counted` is the paper's figure, the mean gate. `executed` is measured here, over the whole network, stem, head and
gates included, and divided by those of the same network without gates. The two differ wherever a block is computed and
then multiplied by zero.
"""

import copy

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cosinegate.deploy.folded import FoldedNetwork
from cosinegate.networks import ResNet


def forward_flops(network: ResNet, images: Tensor) -> int:
    """FLOPs of one evaluation pass over the images."""
    was_training = network.training
    network.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(images)
    network.train(was_training)
    return counter.get_total_flops()


def dense_flops(network: ResNet, shape: tuple[int, int, int]) -> int:
    """FLOPs for one image (H, W, C) of the same network without its gates, counted on shapes alone."""
    dense = copy.deepcopy(network).to("meta")
    for block in dense.blocks:
        block.gate, block.looks = None, False
    height, width, channels = shape
    return forward_flops(dense, torch.empty(1, channels, height, width, device="meta"))


def flops_moved(network: ResNet, shape: tuple[int, int, int], gates: Tensor, others: Tensor) -> float:
    """How many more FLOPs an image takes on other routes (B, N) than with these gates."""
    moved = others.float().mean(0) - gates.float().mean(0)
    return (moved * block_flops(network, shape)).sum().item()


def block_flops(network: ResNet, shape: tuple[int, int, int]) -> Tensor:
    """(N,): FLOPs of every block's residual for one image (H, W, C); a block that was removed has none."""
    meta = copy.deepcopy(network).to("meta").eval()
    height, width, channels = shape
    flops = []
    with torch.no_grad():
        x = meta.stem(torch.empty(1, channels, height, width, device="meta"))
        for block in meta.blocks:
            with FlopCounterMode(display=False) as counter:
                r = None if block.residual is None else block.residual(x)
            flops.append(counter.get_total_flops())
            x = block.shortcut(x) if r is None else r
    return torch.tensor(flops, dtype=torch.float32)


def deployed_flops(network: FoldedNetwork, gates: Tensor, shape: tuple[int, int, int]) -> float:
    """FLOPs for one image (H, W, C) of a deployed network, the mean over images that take these routes (B, N)."""
    meta, own, (height, width, channels) = copy.deepcopy(network).to("meta"), [], shape
    images = torch.empty(1, channels, height, width, device="meta")
    with torch.no_grad():
        x = meta.enter(images)
        for block in meta.blocks:
            with FlopCounterMode(display=False) as counter:
                if not block.removed:
                    block.residual(x)
            own.append(counter.get_total_flops())
            x = block.identity(x)
        with FlopCounterMode(display=False) as counter:
            meta(images)
    skipped = [1 - share if block.routes else 0.0 for block, share in zip(meta.blocks, _shares(gates), strict=True)]
    return counter.get_total_flops() - sum(flops * share for flops, share in zip(own, skipped, strict=True))


def _shares(gates: Tensor) -> list[float]:
    return gates.double().mean(0).tolist()
