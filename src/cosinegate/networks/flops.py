"""FLOPs of what really runs, as torch's own counter sees it: convolutions, matrix products, the gate's dot products.

`counted` is the paper's figure, the mean gate. `executed` is measured over the whole network, stem, head and gates
included, and divided by the FLOPs of the same network without gates. The two differ wherever a block is computed and
then multiplied by zero.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula, sdpa_flop_count

from cosinegate.networks.network import GatedNetwork, Step


@register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *args, **kwargs) -> int:
    return sdpa_flop_count(query, key, value)  # torch has this for its other attention operators alone


@contextmanager
def counting() -> Iterator[FlopCounterMode]:
    """Counts the FLOPs of what runs inside."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one operator for a layer, of which nothing is counted
    try:
        with FlopCounterMode(display=False) as counter:
            yield counter
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


@torch.no_grad()
def forward_flops(network: torch.nn.Module, images: Tensor) -> int:
    """FLOPs of one evaluation pass over the images."""
    was_training = network.training
    network.eval()
    with counting() as counter:
        network(images)
    network.train(was_training)
    return counter.get_total_flops()


def dense_flops(network: GatedNetwork, shape: tuple[int, int, int]) -> int:
    """FLOPs for one image (H, W, C) of the same network without its gates, counted on shapes alone."""
    dense = copy.deepcopy(network).to("meta", torch.float32)
    for block in dense.blocks:
        block.gate = None
    return forward_flops(dense, _image(shape))


@torch.no_grad()
def block_flops(network: GatedNetwork, shape: tuple[int, int, int]) -> Tensor:
    """(N,): FLOPs of every block's residual for one image (H, W, C); a block without a residual has none."""
    meta = copy.deepcopy(network).to("meta", torch.float32).eval()
    for block in meta.blocks:
        block.gate = None
    flops = []

    def count(step: Step) -> None:
        with counting() as counter:
            if step.block.residual is not None:
                step.block.residual(step.x)
        flops.append(counter.get_total_flops())

    meta.run(_image(shape), count)
    return torch.tensor(flops, dtype=torch.float32)


def _image(shape: tuple[int, int, int]) -> Tensor:
    height, width, channels = shape
    return torch.empty(1, channels, height, width, device="meta")
