"""What every gate returns: how open it is for each sample, its logit, and the CIR."""

from typing import NamedTuple

import torch
from torch import Tensor


class Decision(NamedTuple):
    """A gate's decision for a batch; each field is (B,)."""

    gate: Tensor  # z in training, 0 or 1 in evaluation
    logit: Tensor
    cir: Tensor  # not a number for a gate that does not look at F(x)


def without_cir(gate: Tensor, logit: Tensor) -> Decision:
    """Returns the decision of a gate that does not use F(x)."""
    return Decision(gate, logit.expand_as(gate), torch.full_like(gate, torch.nan))
