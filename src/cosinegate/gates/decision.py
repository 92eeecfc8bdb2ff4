"""What every gate answers: how open, for each sample, and what it looked at."""

from typing import NamedTuple

from torch import Tensor


class Decision(NamedTuple):
    """What one gate decided for a batch; each (B,)."""

    gate: Tensor  # z in training, 0 or 1 in evaluation
    logit: Tensor
    cir: Tensor  # what stood in the equation: the exact measure, or the one that was predicted
    exact: Tensor  # the exact measure; not a number where F did not run for every sample
    agrees: Tensor  # 1 where the exact measure would have decided the same; not a number where it is not known
