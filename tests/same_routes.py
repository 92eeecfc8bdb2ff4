"""Compares two float32 programs: scores are equal but for rounding, and a decision may differ only where its logit lies
on its threshold.

Two programs add in another order (folded BatchNorm, onnxruntime, another processor), so a logit differs by rounding. A
sample that took another route has other inputs from there on, so only its first other decision has to be explained.
"""

import torch
from torch import Tensor

from cosinegate.deploy.exits import EarlyExitNetwork
from cosinegate.deploy.exits.budget import exit_logits
from cosinegate.networks import Routing

MARGIN = 2e-5  # of 1 + |logit|: some hundred roundings of float32, a thousandth of what most gates' logits spread over
EXIT_MARGIN = 1e-3  # of an exit, which sees log(-log p): where p is nearly 1, rounding shows in the third digit
MOST = 0.05  # of the samples, and one in any case, may have a logit so near


def rounding(scores: Tensor) -> Tensor:
    """Returns how much scores (B, K) may differ, (B, 1): the larger what is summed, the larger the roundings."""
    return MARGIN * (1 + scores.abs().amax(1, keepdim=True))


def assert_same_scores(found: Tensor, expected: Tensor) -> None:
    """Scores of two float32 programs differ by rounding alone, and so do their classes."""
    over = (found - expected).abs() / rounding(expected)
    assert (over <= 1).all(), f"a score differs by {over.max().item():.1f} of what rounding may change"
    best, second = expected.topk(2).values.unbind(1)
    other = found.argmax(1) != expected.argmax(1)
    assert ((best - second)[other] <= 2 * rounding(expected)[other, 0]).all()  # of two classes that score alike, either


def near_threshold(network, routing: Routing) -> Tensor:
    """Returns which decisions (B, N) of gates rounding may turn over."""
    thresholds = [-torch.inf if block.gate is None else float(block.gate.threshold_logit) for block in network.blocks]
    scale = 1 + routing.logits.nan_to_num(0, 0, 0).abs()
    return (routing.logits - torch.tensor(thresholds)).abs() <= MARGIN * scale


def near_exit(network: EarlyExitNetwork, images: Tensor) -> Tensor:
    """Returns which columns of the route (B, N) an exit may change, because its logit lies on its threshold."""
    logits = exit_logits(network, images)
    on_threshold = (logits - network.threshold).abs() <= EXIT_MARGIN * (1 + logits.abs())
    near = torch.zeros(len(images), len(network.blocks), dtype=torch.bool)
    for column, index in zip(on_threshold.T, network.after, strict=True):
        near[:, index + 1 :] |= column[:, None]
    return near


def assert_same_routes(found: Tensor, network, routing: Routing, near: Tensor | None = None) -> Tensor:
    """Returns which samples (B,) took the route of the network's own `routing`; `found` has a column a block."""
    expected = routing.gates.bool()
    near = near_threshold(network, routing) if near is None else near
    differs = found.bool() != expected
    first = differs & (differs.cumsum(1) == 1)
    unexplained = (first & ~near).any(1).nonzero().flatten().tolist()
    assert not unexplained, f"samples {unexplained} took another route, with no logit near its threshold"
    number = int(near.any(1).sum())
    assert number <= max(1, MOST * len(found)), f"{number} of {len(found)} samples have a logit on its threshold"
    return ~differs.any(1)
