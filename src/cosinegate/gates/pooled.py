"""A gate that compiling fits to another gate's decisions, from the block's input alone, so that F can be skipped."""

from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.gates.gate import ScoreGate
from cosinegate.relaxation import Relaxation


class PooledGate(ScoreGate):
    """A small MLP on each channel's mean, deviation and maximum; open where its logit is above zero."""

    def __init__(self, channels: int, hidden: int) -> None:
        score = nn.Sequential(nn.Linear(3 * channels, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        super().__init__(score, Relaxation(temperature=1.0, hard=True, threshold=0.5))

    def features(self, x: Tensor) -> Tensor:
        return geometry.pooled_statistics(x)
