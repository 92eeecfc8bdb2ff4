"""An image that is done leaves the last stage: one policy looks at every block's input and says who goes on."""

import math

import torch
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.choices import Classifier
from cosinegate.gates.gate import Seen, Slot
from cosinegate.gates.predictive import LEAK, STATISTICS, PredictiveGate, equation, policy
from cosinegate.schema import GateConfig

SURE = 1e-4  # a doubt below which an image is as good as classified
HIDDEN = 64  # units of an exit's own classifier


def doubt(scores: Tensor) -> Tensor:
    """(B, 1): the logarithm of the surprise if the likeliest class were the right one, -log p."""
    return (SURE - scores.log_softmax(1).amax(1, keepdim=True)).log()


class ExitClassifier(nn.Module):
    """Class scores of a map's statistics (B, 3C). It begins with all scores zero."""

    def __init__(self, channels: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(STATISTICS * channels, hidden), nn.Linear(hidden, classes)
        nn.init.zeros_(self.w2.weight)
        nn.init.zeros_(self.w2.bias)

    def forward(self, statistics: Tensor) -> Tensor:
        return self.w2(nn.functional.leaky_relu(self.w1(statistics), LEAK))


def told(classifier: nn.Linear | ExitClassifier, statistics: Tensor) -> Tensor:
    """Class scores of statistics (B, 3C), of which a network's own classifier sees the means, which come first."""
    if isinstance(classifier, ExitClassifier):
        return classifier(statistics)
    return classifier(statistics[:, : classifier.in_features])


class ExitGate(PredictiveGate):
    """The predictive gate, which all blocks share but for their thresholds. It is shown how sure the exit's classifier
    is too, whose answer an image leaves with. Who finds one closed has left, and no later one is open to it.

    The classifier is the network's, or one of its `own`, which is fitted with the policy.
    """

    def __init__(self, before: "ExitGate | None", own: bool, *arguments) -> None:
        super().__init__(*arguments)
        self.before = (before,)  # the gate before it, of which it is no part
        self.shared: tuple[nn.Linear, ...] = ()  # nor of this, which the network shows it
        self.has_own = own
        self.own: ExitClassifier | None = None

    def show(self, head: nn.Linear) -> None:
        """The network's classifier."""
        self.shared = (head,)
        if self.has_own:  # steps of training do not move it
            with torch.random.fork_rng(devices=[]):
                self.own = ExitClassifier(head.in_features, HIDDEN, head.out_features).requires_grad_(False)

    @property
    def carries(self) -> bool:
        return self.before[0] is not None

    @property
    def classifier(self) -> nn.Linear | ExitClassifier:
        return self.shared[0] if self.own is None else self.own

    def look(self, x: Tensor, seen: Seen) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ĉ and c of the map, and who has left, each (B,), and the scores with which each would leave here or has left,
        (B, K). Training lets nobody go."""
        [before] = self.before
        statistics = self.statistics(x)
        scores = self.scores(statistics)
        looked = super()._look(torch.cat((statistics, doubt(scores)), dim=1))
        if before is None:
            return *looked, torch.zeros(len(x), dtype=torch.bool, device=x.device), scores
        left = before.decide(seen).gate == 0
        return *looked, left, torch.where(left[:, None], seen[-1], scores)

    def statistics(self, x: Tensor) -> Tensor:
        """(B, 3C), constants to autograd, in as many digits as the classifier has."""
        with torch.autocast(x.device.type, enabled=False):
            return geometry.pooled_statistics(x).to(self.predictor.w1.weight.dtype)

    @torch.no_grad()
    def scores(self, statistics: Tensor) -> Tensor:
        """(B, K): what the exit's classifier says."""
        with torch.autocast(statistics.device.type, enabled=False):
            return told(self.classifier, statistics)

    def answer(self, seen: Seen, scores: Tensor) -> Tensor:
        """What the exit said by which an image has left; who stayed has the network's scores."""
        return torch.where(self.decide(seen).gate[:, None] == 0, seen[-1].to(scores.dtype), scores)

    def predicted(self, seen: Tensor) -> Tensor:
        """ĉ of what was seen of maps (B, 3C + 1)."""
        return super()._look(seen)[0]

    @torch.no_grad()
    def foretold(self, statistics: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
        """ĉ of maps' statistics (B, 3C), and whether by it the gate decides as by the exact measure; each (B,)."""
        predicted, offset = super()._look(torch.cat((statistics, doubt(self.scores(statistics))), dim=1))
        by_predicted, by_exact = (self.gamma * (value + offset) > self.turn for value in (predicted, exact))
        return predicted, by_predicted == by_exact

    def price(self, seen: Tensor) -> Tensor:
        """Of what was seen of maps (B, 3C + 1), whoever has left."""
        nobody = torch.zeros(len(seen), dtype=torch.bool, device=seen.device)
        return super().price((*super()._look(seen), nobody, seen))

    def _look(self, seen: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        predicted, offset, left, _ = seen
        return predicted, offset.masked_fill(left, -math.inf * self.gamma.detach().sign().item())


def make(config: GateConfig, slot: Slot) -> ExitGate:
    own = config.exit_classifier is Classifier.own
    if "policy" not in slot.shared:
        slot.shared["policy"] = nn.ModuleList(policy(config, slot.channels, STATISTICS * slot.channels + 1))
        if own:  # a doubt is nothing to it before the classifiers are fitted
            predictor = slot.shared["policy"][0]
            with torch.no_grad():
                predictor.w1.weight[:, -1] = 0
    gate = ExitGate(slot.shared.get("before"), own, *slot.shared["policy"], *equation(config, slot))
    slot.shared["before"] = gate
    return gate
