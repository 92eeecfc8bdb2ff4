"""SkipNet's feed-forward gate (Wang et al. 2018, https://arxiv.org/abs/1711.09485).

Hard straight-through without noise (`gate.relaxation`). In the original the gate stands after a block and decides for
the next one: the same as before it.
"""

from torch import Tensor, nn

from cosinegate.config.schema import SkipNetGateConfig
from cosinegate.gates.gate import ScoreGate, Slot, start_open


def convolutional_score(channels: int) -> nn.Sequential:
    """Their FFGate-II: a 3x3 convolution of stride 2, BatchNorm, ReLU, a mean over the map, a linear layer.

    One logit, where theirs is the difference of two.
    """
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 1),
    )


class SkipNetGate(ScoreGate):
    """Sees the whole map of its block's input: it costs an eighth of a basic block, and that is counted."""

    def features(self, x: Tensor) -> Tensor:
        return x


def make(config: SkipNetGateConfig, slot: Slot) -> SkipNetGate:
    score = convolutional_score(slot.channels)
    start_open(score[-1], config.start)
    return SkipNetGate(score, slot.opening())
