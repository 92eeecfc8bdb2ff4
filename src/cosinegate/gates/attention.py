"""A gate by channel attention, in the style of squeeze-and-excitation (Hu et al. 2018). Ours, of no paper."""

import torch
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.gates.gate import ScoreGate, Seen, Slot, start_open
from cosinegate.schema import GateConfig


class ChannelAttention(nn.Module):
    """Squeeze p = GAP(x), excite a = σ(W2 ReLU(W1 p)), and read the logit off what was attended to: w·(a ⊙ p) + b."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(channels, hidden), nn.Linear(hidden, channels)
        self.readout = nn.Linear(channels, 1)

    def forward(self, pooled: Tensor) -> Tensor:
        attention = torch.sigmoid(self.w2(torch.relu(self.w1(pooled))))  # (B, C)
        return self.readout(attention * pooled)


class AttentionGate(ScoreGate):
    """Sees the mean of its block's input."""

    def look(self, x: Tensor, seen: Seen) -> Tensor:
        return geometry.global_average_pool(x)


def make(config: GateConfig, slot: Slot) -> AttentionGate:
    score = ChannelAttention(slot.channels, max(2, slot.channels // config.controller.reduction))
    start_open(score.readout, config.start)
    return AttentionGate(score, slot.opening())
