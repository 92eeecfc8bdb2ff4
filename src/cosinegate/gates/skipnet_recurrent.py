"""SkipNet's recurrent gate (Wang et al. 2018): one LSTM reads the inputs of all blocks and decides for each in turn."""

import math

import torch
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.gates.decision import Decision
from cosinegate.gates.gate import Gate, Seen, Slot, decided, start_open
from cosinegate.schema import GateConfig


class Cell(nn.Module):
    """An LSTM's step. Written out, so that its FLOPs are counted and every form of deployment has the same one."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.gates = nn.Linear(inputs + hidden, 4 * hidden)
        for parameter in self.gates.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(hidden), 1 / math.sqrt(hidden))  # as torch begins an LSTM

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        take, keep, new, give = self.gates(torch.cat((x, h), dim=1)).chunk(4, dim=1)
        c = torch.sigmoid(keep) * c + torch.sigmoid(take) * torch.tanh(new)
        return torch.sigmoid(give) * torch.tanh(c), c


class RecurrentGate(Gate):
    """One LSTM for all blocks reads the mean of every block's input in turn; its state goes on with the images.

    Its embedding of the channels is the block's own, its cell and its readout are shared.
    """

    def __init__(self, channels: int, cell: Cell, readout: nn.Linear, opening: nn.Module) -> None:
        super().__init__(opening)
        self.embed = nn.Linear(channels, cell.hidden)
        self.cell, self.readout = cell, readout

    @property
    def carries(self) -> bool:
        return True

    def begin(self, images: Tensor) -> tuple[Tensor, Tensor]:
        zero = images.new_zeros(len(images), self.cell.hidden)
        return zero, zero

    def look(self, x: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        return self.cell(self.embed(geometry.global_average_pool(x)), seen)

    def decide(self, seen: Seen) -> Decision:
        logit = self.readout(seen[0]).squeeze(1)
        return decided(self.opening(logit).gate, logit)


def make(config: GateConfig, slot: Slot) -> RecurrentGate:
    if not slot.shared:
        slot.shared["cell"] = Cell(config.hidden, config.hidden)
        slot.shared["readout"] = nn.Linear(config.hidden, 1)
        start_open(slot.shared["readout"], config.start)
    return RecurrentGate(slot.channels, slot.shared["cell"], slot.shared["readout"], slot.opening())
