"""An image that is done leaves the last stage: one policy looks at every block's input and says who goes on."""

import math

import torch
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.gates.gate import Seen, Slot
from cosinegate.gates.predictive import PredictiveGate, equation, policy
from cosinegate.schema import GateConfig


class ExitGate(PredictiveGate):
    """The predictive gate, which all blocks share but for their thresholds. Who finds one closed has left, and no later
    one is open to it: its map is what it was, and the classifier is the one of all.
    """

    def __init__(self, before: "ExitGate | None", *arguments) -> None:
        super().__init__(*arguments)
        self.before = (before,)  # the gate before it, of which it is no part

    def look(self, x: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        """The pooled statistics (B, 3C), and who has left (B,). Training lets nobody go."""
        [before] = self.before
        stays = before is None or self.training
        left = torch.zeros(len(x), dtype=torch.bool, device=x.device) if stays else before.decide(seen).gate == 0
        return geometry.pooled_statistics(x), left

    def price(self, seen: Tensor) -> Tensor:
        """Of statistics alone, whoever has left."""
        return super().price((seen, torch.zeros(len(seen), dtype=torch.bool, device=seen.device)))

    def _look(self, seen: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        statistics, left = seen
        predicted, offset = super()._look(statistics)
        return predicted, offset.masked_fill(left, -math.inf * self.gamma.detach().sign().item())


def make(config: GateConfig, slot: Slot) -> ExitGate:
    parts = slot.shared.setdefault("policy", nn.ModuleList(policy(config, slot.channels)))
    gate = ExitGate(slot.shared.get("before"), *parts, *equation(config, slot))
    slot.shared["before"] = gate
    return gate
