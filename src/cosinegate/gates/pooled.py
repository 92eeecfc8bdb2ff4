"""A gate that is fitted to another one's decisions, by what it sees of the block's input before F runs."""

from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.gates.gate import ScoreGate, Seen
from cosinegate.relaxation import Relaxation


class PooledGate(ScoreGate):
    """A small MLP on each channel's mean, deviation and maximum; open where its logit is above zero."""

    def __init__(self, features: int, hidden: int) -> None:
        score = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        super().__init__(score, Relaxation(temperature=1.0, hard=True, threshold=0.5))

    def look(self, x: Tensor, seen: Seen) -> Tensor:
        return geometry.pooled_statistics(x)
