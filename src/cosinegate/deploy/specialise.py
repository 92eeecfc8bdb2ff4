"""Gates that never change their mind are not worth asking: the paper's hybrid of static and dynamic execution."""

import copy
import math
from typing import Any

import torch
from torch import Tensor

from cosinegate.deploy.eyes import ExitEye
from cosinegate.deploy.folded import FoldedNetwork
from cosinegate.deploy.skipping import SkippingNetwork


def specialise(network: FoldedNetwork, images: Tensor, tolerance: float) -> tuple[FoldedNetwork, list[dict[str, Any]]]:
    """Removes blocks that are closed, and gates that are open, for all but a share `tolerance` of the images.

    Says of each what was done, and which share of the images would have routed otherwise.
    """
    runtime = SkippingNetwork(network)
    runtime(images)
    return _without_constant_gates(network, runtime.gates.float().mean(0).tolist(), tolerance)


def settled(network: FoldedNetwork) -> tuple[FoldedNetwork, list[dict[str, Any]]]:
    """The same network without gates that no image can open or close: their thresholds are infinite."""
    turns = [0.0 if block.head is None else block.head.turn.item() for block in network.blocks]
    shares = [{math.inf: 0.0, -math.inf: 1.0}.get(turn, 0.5) for turn in turns]
    return _without_constant_gates(network, shares, tolerance=0.0)


def _without_constant_gates(
    network: FoldedNetwork, shares: list[float], tolerance: float
) -> tuple[FoldedNetwork, list[dict[str, Any]]]:
    made, changes, may_have_left, gone = copy.deepcopy(network), [], False, False
    for place, (block, share) in enumerate(zip(made.blocks, shares, strict=True)):
        if block.head is None or block.removed:
            continue
        is_exit = isinstance(block.eye, ExitEye)
        if share <= tolerance or gone:
            if is_exit and not gone:  # the first exit that nobody passes is the network's end
                made.head, gone = block.eye.classifier, True
            block.removed, block.head = True, None
            changes.append({"block": place, "done": "removed", "otherwise": share})
        elif share >= 1 - tolerance and not may_have_left:
            block.head, block.eye = None, None if is_exit else block.eye
            changes.append({"block": place, "done": "always computed", "otherwise": 1 - share})
        else:  # an exit that lets nobody go is still closed to those that have left before
            may_have_left = may_have_left or is_exit
    _stop_looking(made)
    return made, changes


def _stop_looking(network: FoldedNetwork) -> None:
    """Where no head is left to be shown what an eye sees, it is closed."""
    wanted = False
    for block in reversed(network.blocks):
        wanted = wanted or block.head is not None
        if block.eye is not None and not wanted:
            block.eye = None
        elif block.eye is not None and not block.eye.carries:
            wanted = False


def routed_otherwise(before: Tensor, after: Tensor) -> float:
    """The share of images whose route (B, N) is another."""
    return torch.ne(before, after).any(1).float().mean().item()
