"""Compares the routes of two float32 programs: a decision may differ only where its logit lies on its threshold.

Two programs add in another order (folded BatchNorm, onnxruntime, another processor), so a logit differs by rounding. A
sample that took another route has other inputs from there on, so only its first other decision has to be explained.
"""

import torch
from torch import Tensor

from cosinegate.networks import Routing

MARGIN = 2e-5  # of 1 + |logit|: some hundred roundings of float32, a thousandth of what most gates' logits spread over
MOST = 0.05  # of the samples, and one in any case, may have a logit so near


def near_threshold(network, routing: Routing) -> Tensor:
    """Returns which decisions (B, N) rounding may turn over."""
    thresholds = [-torch.inf if block.gate is None else float(block.gate.turn) for block in network.blocks]
    scale = 1 + routing.logits.nan_to_num(0, 0, 0).abs()
    return (routing.logits - torch.tensor(thresholds)).abs() <= MARGIN * scale


def assert_same_routes(found: Tensor, network, routing: Routing) -> Tensor:
    """Returns which samples (B,) took the route of the network's own `routing`; `found` has a column a gated block, or
    one a block.
    """
    expected, near = routing.gates.bool(), near_threshold(network, routing)
    if found.shape[1] < expected.shape[1]:
        gated = [block.gate is not None for block in network.blocks]
        found = expected.clone().masked_scatter_(torch.tensor(gated), found.bool())
    differs = found.bool() != expected
    first = differs & (differs.cumsum(1) == 1)
    unexplained = (first & ~near).any(1).nonzero().flatten().tolist()
    assert not unexplained, f"samples {unexplained} took another route, with no logit near its threshold"
    number = int(near.any(1).sum())
    assert number <= max(1, MOST * len(found)), f"{number} of {len(found)} samples have a logit on its threshold"
    return ~differs.any(1)
