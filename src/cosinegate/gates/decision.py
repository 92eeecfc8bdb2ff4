"""What every gate returns: how open it is for each sample, and what it compared."""

from typing import NamedTuple

import torch
from torch import Tensor


class Decision(NamedTuple):
    """One gate's decision for a batch; each field is (B,)."""

    gate: Tensor  # z in training, 0 or 1 in evaluation
    logit: Tensor
    cir: Tensor  # not a number for a gate that does not look at F(x)


def without_cir(gate: Tensor, logit: Tensor) -> Decision:
    """The decision of a gate that does not look at F(x)."""
    return Decision(gate, logit.expand_as(gate), torch.full_like(gate, torch.nan))
