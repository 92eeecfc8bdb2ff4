"""The same equation before F runs: ℓ = γ·(ĉ(x) + c(x)), where ĉ learns CIR from pooled statistics of x."""

import torch
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.choices import Measure, Polarity
from cosinegate.gates.cosine import Controller, CosineGate
from cosinegate.gates.decision import Decision
from cosinegate.gates.gate import Seen, Slot
from cosinegate.geometry import Dots
from cosinegate.processes import sum_over_processes
from cosinegate.schema import GateConfig

STATISTICS = 3  # mean, standard deviation and maximum of a channel
LEAK = 0.1  # below zero: a hidden unit that is closed for every image would never learn again, and a gate of such
# units gives all images the same logit
MOMENTUM = 0.01


class Standardise(nn.Module):
    """Statistics to mean 0 and deviation 1, by their moments over the batches of training so far."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("square", torch.ones(features))
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, seen: Tensor) -> Tensor:
        if self.training:
            self._learn(seen)
        return (seen - self.mean) / self.deviation

    @property
    def deviation(self) -> Tensor:
        return (self.square - self.mean.square()).clamp_min(1e-6).sqrt()

    @torch.no_grad()
    def learn_anew(self, seen: Tensor, features: slice) -> None:
        """Of these features, whose meaning has changed: what they were is forgotten."""
        mean, square = _moments(seen)
        self.mean[features], self.square[features] = mean[features], square[features]

    @torch.no_grad()
    def _learn(self, seen: Tensor) -> None:
        mean, square = _moments(seen)
        self.batches += 1
        weight = (1 / self.batches).clamp_min(MOMENTUM)
        self.mean.lerp_(mean, weight)
        self.square.lerp_(square, weight)


def _moments(seen: Tensor) -> tuple[Tensor, Tensor]:
    """First and second ones of the features of (B, F), over all processes."""
    sums = torch.cat((seen.sum(0), seen.square().sum(0), seen.new_tensor([len(seen)])))
    *_, count = sums = sum_over_processes(sums)
    return (sums[:-1] / count).chunk(2)


class Predictor(nn.Module):
    """ĉ(x): a small MLP that starts near 1, the CIR of a residual at right angles to its input."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(features, hidden)
        self.w2 = nn.Linear(hidden, 1)
        nn.init.ones_(self.w2.bias)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.w2(nn.functional.leaky_relu(self.w1(pooled), LEAK)).squeeze(1)  # (B,)


class PredictiveGate(CosineGate):
    """Decides before F. In training F runs anyway, so ĉ is taught by the exact measure.

    No gradient leaves the gate: the pooled statistics are constants to it.
    """

    decides_first = True

    def __init__(
        self, predictor: Predictor, standardise: Standardise, controller: Controller | None, *equation
    ) -> None:
        super().__init__(*equation, controller)
        self.predictor, self.standardise = predictor, standardise
        self.by_exact = False  # in training only, until the switch-over epoch: decide by the exact measure

    def look(self, x: Tensor, seen: Seen) -> Tensor:
        """A constant to autograd."""
        return geometry.pooled_statistics(x)

    def decide(self, seen: Tensor) -> Decision:
        """Without F: what evaluation and deployment do. `seen` is the pooled statistics (B, 3C)."""
        predicted, offset = self._look(seen)
        logit = self.gamma * (predicted + offset)
        unknown = torch.full_like(predicted, torch.nan)
        return Decision(self.opening(logit).gate, logit, predicted, unknown, unknown)

    def forward(self, seen: Tensor, dots: Dots) -> Decision:
        """With F, which training runs for every sample."""
        predicted, offset = self._look(seen)
        exact = geometry.measured(self.measure, dots).detach()
        used = exact if self.by_exact else predicted.detach()
        logit = self.gamma * (used + offset)
        gate, turn = self.opening(logit)
        by_predicted, by_exact = (self.gamma * (value + offset) > turn for value in (predicted, exact))
        agrees = (by_predicted == by_exact).to(logit.dtype)
        return Decision(gate, logit, predicted, exact, agrees)

    def price(self, seen: Tensor) -> Tensor:
        """The logit by the size of γ, in which only c(x) learns."""
        predicted, offset = self._look(seen)
        return self.gamma.detach().sign() * (predicted.detach() + offset)

    def _look(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.standardise(seen.to(self.predictor.w1.weight.dtype))
        with torch.autocast(seen.device.type, enabled=False):  # a route is a comparison: it deserves every digit
            predicted = self.predictor(seen)
            return predicted, torch.zeros_like(predicted) if self.controller is None else self.controller(seen)


def policy(config: GateConfig, channels: int, features: int) -> tuple[Predictor, Standardise, Controller | None]:
    """What decides by so many features of a map of so many channels."""
    hidden = max(2, channels // config.controller.reduction)
    controller = Controller(features, hidden, LEAK, bias=True) if config.controller.enabled else None
    return Predictor(features, config.predictor.hidden), Standardise(features), controller


def equation(config: GateConfig, slot: Slot) -> tuple[nn.Module, Measure, float, Polarity, bool]:
    """What it is compared with and multiplied by."""
    return slot.opening(), config.measure, config.gamma.init, config.polarity, config.gamma.learnable


def make(config: GateConfig, slot: Slot) -> PredictiveGate:
    return PredictiveGate(*policy(config, slot.channels, STATISTICS * slot.channels), *equation(config, slot))
