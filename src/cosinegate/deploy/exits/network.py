"""A network with early exits: an image exits once the policy expects no other answer from the whole network.

After BranchyNet (Teerapittayanon, McDanel & Kung 2016, https://arxiv.org/abs/1709.01686). There the entropy of an
exit's scores decides; here a small MLP does, which is fitted to whether the network's answer would be another one.
"""

import torch
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.networks import GatedNetwork, Output, Routing
from cosinegate.networks.network import Step

HIDDEN_CLASSIFIER, HIDDEN_POLICY = 64, 32
LEAK = 0.1  # slope below zero: a hidden unit that is zero for every image would never learn again
CERTAIN = 1e-4  # below this uncertainty an image counts as classified


def mlp(features: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, hidden), nn.LeakyReLU(LEAK), nn.Linear(hidden, outputs))


def uncertainty(scores: Tensor) -> Tensor:
    """(B, 1): log(-log p) of the most likely class, bounded where p is nearly 1."""
    return (CERTAIN - scores.log_softmax(1).amax(1, keepdim=True)).log()


class Exit(nn.Module):
    """A classifier and a policy on the pooled statistics (B, 3C) of a map."""

    def __init__(self, *, channels: int, num_classes: int) -> None:
        super().__init__()
        self.channels = channels
        self.classifier = mlp(3 * channels, HIDDEN_CLASSIFIER, num_classes)
        self.policy = mlp(3 * channels + 1, HIDDEN_POLICY, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Class scores (B, K) of a map x, and the logit (B,) of the network's answer being another one."""
        return self.answer(geometry.pooled_statistics(x))

    def answer(self, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """The same of the map's pooled statistics."""
        scores = self.classifier(statistics)
        return scores, self.policy(torch.cat((statistics, uncertainty(scores)), dim=1)).squeeze(1)


class EarlyExitNetwork(nn.Module):
    """A frozen network with an exit after some of its blocks. The batch shrinks at every exit.

    An image stays where the logit lies above `threshold`, one number for all exits: a budget moves it, and no weight.
    In training mode exits are off.
    """

    threshold: Tensor  # (), a logit

    def __init__(self, network: GatedNetwork, exits: dict[int, Exit], threshold: float = float("-inf")) -> None:
        super().__init__()
        self.network = network
        self.exits = nn.ModuleDict({str(index): exits[index] for index in sorted(exits)})  # by the block before it
        self.register_buffer("threshold", torch.tensor(threshold))

    @property
    def blocks(self) -> nn.ModuleList:
        return self.network.blocks

    @property
    def num_classes(self) -> int:
        return self.network.num_classes

    @property
    def has_gates(self) -> bool:
        return self.network.has_gates

    @property
    def after(self) -> list[int]:
        """The blocks that have an exit after them."""
        return [int(index) for index in self.exits]

    def exit_after(self, index: int) -> Exit | None:
        key = str(index)
        return self.exits[key] if key in self.exits else None  # noqa: SIM401  a ModuleDict has no get

    def forward(self, images: Tensor) -> Output:
        if self.training:
            return self.network(images)
        here = torch.arange(len(images), device=images.device)  # which images are left
        logits = images.new_zeros(len(images), self.num_classes)
        gates = images.new_zeros(len(images), len(self.blocks))  # an image that has exited computes no block

        def exit_after(step: Step) -> Tensor | None:
            nonlocal here
            computes = float(step.block.residual is not None)
            gates[here, step.index] = computes if step.routing is None else step.routing.decision.gate.to(gates.dtype)
            if (at := self.exit_after(step.index)) is None:
                return None
            scores, logit = at(step.block.as_map(step.y))
            stays = logit > self.threshold
            logits[here[~stays]] = scores[~stays].to(logits.dtype)
            here = here[stays]
            return stays.nonzero().squeeze(1)

        last = self.network.run(images, exit_after)
        if last is not None:
            logits[here] = last.to(logits.dtype)
        unknown = torch.full_like(gates, torch.nan)
        return Output(logits, Routing(gates, unknown, unknown, torch.zeros_like(gates)))

    def extra_repr(self) -> str:
        return f"after={self.after}, threshold={self.threshold.item():.4g}"
