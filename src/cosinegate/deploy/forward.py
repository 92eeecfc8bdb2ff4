"""A network on many images in eager mode: what every deployed form is compared with."""

import torch
from torch import Tensor

from cosinegate.deploy.card import Network
from cosinegate.networks.compile import BATCH
from cosinegate.networks.flops import counting


@torch.inference_mode()
def forward(network: Network, images: Tensor) -> tuple[Tensor, Tensor, float]:
    """Returns scores (B, K) and route (B, N) of a network in eager mode, and the FLOPs for each image."""
    with counting() as counter:
        outputs = [network(part) for part in images.split(BATCH)]
    scores = torch.cat([output.logits for output in outputs])
    flops = counter.get_total_flops() / len(images)
    if outputs[0].routing is None:  # one route for all
        alike = torch.tensor([block.residual is not None for block in network.blocks])
        return scores, alike.expand(len(images), -1), flops
    return scores, torch.cat([output.routing.gates for output in outputs]).bool(), flops
