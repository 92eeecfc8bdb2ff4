"""An image that is done leaves the last stage: one policy looks at every block's input and says who goes on."""

import math

import torch
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.gates.gate import Seen, Slot
from cosinegate.gates.predictive import STATISTICS, PredictiveGate, equation, policy
from cosinegate.schema import GateConfig

SURE = 1e-4  # a doubt below which an image is as good as classified


def doubt(scores: Tensor) -> Tensor:
    """(B, 1): the logarithm of the surprise if the likeliest class were the right one, -log p."""
    return (SURE - scores.log_softmax(1).amax(1, keepdim=True)).log()


class ExitGate(PredictiveGate):
    """The predictive gate, which all blocks share but for their thresholds. It is shown how sure the classifier is too,
    whose answer an image leaves with. Who finds one closed has left, and no later one is open to it.
    """

    def __init__(self, before: "ExitGate | None", *arguments) -> None:
        super().__init__(*arguments)
        self.before = (before,)  # the gate before it, of which it is no part
        self.classifier: tuple[nn.Linear, ...] = ()  # nor of this, which the network shows it

    def look(self, x: Tensor, seen: Seen) -> tuple[Tensor, Tensor, Tensor]:
        """ĉ and c of the map, and who has left; each (B,). Training lets nobody go."""
        [before] = self.before
        nobody = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        left = nobody if before is None else before.decide(seen).gate == 0
        return *super()._look(self.seen_of(x)), left

    @torch.no_grad()
    def seen_of(self, x: Tensor) -> Tensor:
        """The pooled statistics, and the doubt about the class."""
        [head] = self.classifier
        with torch.autocast(x.device.type, enabled=False):
            statistics = geometry.pooled_statistics(x).to(head.weight.dtype)
            return torch.cat((statistics, doubt(head(statistics[:, : head.in_features]))), dim=1)

    def price(self, seen: Tensor) -> Tensor:
        """Of what was seen of maps (B, 3C + 1), whoever has left."""
        return super().price((*super()._look(seen), torch.zeros(len(seen), dtype=torch.bool, device=seen.device)))

    def _look(self, seen: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        predicted, offset, left = seen
        return predicted, offset.masked_fill(left, -math.inf * self.gamma.detach().sign().item())


def make(config: GateConfig, slot: Slot) -> ExitGate:
    if "policy" not in slot.shared:
        slot.shared["policy"] = nn.ModuleList(policy(config, slot.channels, STATISTICS * slot.channels + 1))
    gate = ExitGate(slot.shared.get("before"), *slot.shared["policy"], *equation(config, slot))
    slot.shared["before"] = gate
    return gate
