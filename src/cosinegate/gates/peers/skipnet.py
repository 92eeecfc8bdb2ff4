"""SkipNet's feed-forward gate (Wang et al. 2018, https://arxiv.org/abs/1711.09485).

Hard straight-through without noise (`gate.relaxation`). In the original a gate stands after a block and decides for the
next one, which is the same as before it.
"""

from torch import Tensor, nn

from cosinegate.config.schema import SkipNetGateConfig
from cosinegate.gates.gate import ScoreGate, Slot, start_open


def convolutional_score(channels: int) -> nn.Sequential:
    """Returns their FFGate-II: a 3x3 convolution of stride 2, BatchNorm, ReLU, global average pooling, a linear layer.

    One logit replaces the difference of their two.
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
    """Decides by the whole map of its block's input. It costs an eighth of a basic block, which FLOPs include."""

    def features(self, x: Tensor) -> Tensor:
        return x


def make(config: SkipNetGateConfig, slot: Slot) -> SkipNetGate:
    score = convolutional_score(slot.channels)
    start_open(score[-1], config.start)
    return SkipNetGate(score, slot.opening())
