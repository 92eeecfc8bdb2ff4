"""ConvNet-AIG's gate (Veit & Belongie 2018, https://arxiv.org/abs/1711.11503)."""

from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.config.schema import AigGateConfig
from cosinegate.gates.gate import ScoreGate, Slot, start_open


def pooled_score(channels: int, hidden: int) -> nn.Sequential:
    """Returns two linear layers with BatchNorm and ReLU between; one logit, where theirs is a difference of two."""
    return nn.Sequential(nn.Linear(channels, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 1))


class AigGate(ScoreGate):
    """Decides by the mean of its block's input; in training a straight-through Gumbel sample opens it."""

    def features(self, x: Tensor) -> Tensor:
        return geometry.global_average_pool(x)


def make(config: AigGateConfig, slot: Slot) -> AigGate:
    score = pooled_score(slot.channels, config.hidden)
    start_open(score[-1], config.start)
    return AigGate(score, slot.opening())
