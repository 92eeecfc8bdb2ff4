"""From a config to the objects it names."""

import json

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from cosinegate.calibration import Budget, Quantile
from cosinegate.choices import Calibration, Credit, GateKind, Sharing, Signal, Weighting
from cosinegate.config import blocks_per_stage, primitives
from cosinegate.data import IMAGE_SETS
from cosinegate.deploy.flops import block_flops
from cosinegate.errors import UserError
from cosinegate.gates import LEAK, STATISTICS, Controller, CosineGate, PredictiveGate, Predictor
from cosinegate.lit import LitCosineGate
from cosinegate.networks import ResNet
from cosinegate.objective import Objective
from cosinegate.relaxation import Relaxation
from cosinegate.secret import masked


class GateMaker:
    """Makes the gate of every block; what all gates of a network share is made once."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config.gate
        self.relaxation = Relaxation(
            self.config.relaxation.temperature, self.config.relaxation.hard, self.config.threshold
        )
        self.budget = _budget(config) if self.config.calibration is Calibration.quantile else None
        self.made = 0

    def __call__(self, channels: int, is_first: bool) -> CosineGate | None:
        """Of a block whose input has `channels` channels; `is_first` of its stage.

        It draws its weights aside, so that the network around it begins as it would with other gates, or with none.
        """
        if self.config.kind is GateKind.none or (is_first and not self.config.first_blocks):
            return None
        with torch.random.fork_rng(devices=[]):
            return self._make(channels)

    def _make(self, channels: int) -> CosineGate:
        config = self.config
        predicted = config.signal is Signal.predicted
        features = STATISTICS * channels if predicted else channels
        hidden = max(2, channels // config.controller.reduction)
        leak = LEAK if predicted else 0.0
        controller = Controller(features, hidden, leak, bias=predicted) if config.controller.enabled else None
        gamma = config.gamma
        arguments = (self._opening(), config.measure, gamma.init, config.polarity, gamma.learnable, controller)
        if not predicted:
            return CosineGate(*arguments)
        return PredictiveGate(Predictor(features, config.predictor.hidden), *arguments)

    def _opening(self) -> nn.Module:
        if self.budget is None:
            return self.relaxation
        self.made += 1
        return Quantile(self.budget, self.made - 1, self.config.quantile.temperature)


def build_network(config: DictConfig, make_gate: GateMaker | None = None) -> ResNet:
    image_set = IMAGE_SETS[config.data.name.name]
    return ResNet(
        blocks_per_stage=blocks_per_stage(config.network),
        width=config.network.width,
        in_channels=image_set.shape[2],
        num_classes=len(image_set.classes),
        shortcut=config.network.shortcut,
        post_activation=config.network.post_activation,
        make_gate=make_gate or GateMaker(config),
        look=config.gate.predictor.look,
        consistency=config.objective.lambda_cons > 0,
        detach_target=config.objective.consistency.detach_target,
    )


def build_module(config: DictConfig) -> LitCosineGate:
    """The network with the weights that `config.seed` gives it, and its objective."""
    image_set = IMAGE_SETS[config.data.name.name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = build_network(config)
    objective = Objective(
        config.objective.lambda_flops,
        config.objective.lambda_cons,
        config.objective.tau_target,
        _block_weights(config) if config.objective.weighting is Weighting.flops else None,
        config.objective.sided,
        config.objective.lambda_predict,
    )
    kept = json.loads(masked(json.dumps(primitives(config))))  # checkpoints hold it, and loggers send it
    return LitCosineGate(network, objective, config.optimizer, len(image_set.classes), kept)


def _block_weights(config: DictConfig) -> Tensor:
    """(N,): what the residual of every block costs."""
    with torch.device("meta"):
        network = build_network(config, make_gate=lambda *where: None)
    return block_flops(network, IMAGE_SETS[config.data.name.name].shape)


def _budget(config: DictConfig) -> Budget:
    numbers, quantile = blocks_per_stage(config.network), config.gate.quantile
    gated = torch.tensor([i > 0 or config.gate.first_blocks for number in numbers for i in range(number)])
    costs = _block_weights(config) if config.objective.weighting is Weighting.flops else torch.ones(len(gated))
    costs = costs / costs.sum()
    if quantile.credit is not Credit.slope and config.gate.signal is not Signal.predicted:
        raise UserError(
            f"gate.quantile.credit = {quantile.credit.name}: needs gate.signal=predicted; "
            "else gate.quantile.credit=slope"
        )
    tau, free = config.objective.tau_target, costs[~gated].sum().item()
    if not gated.any():
        raise UserError("gate.first_blocks = False: with one block a stage no block is left to have a gate")
    worth = None if quantile.worth is None else list(quantile.worth)
    if worth is not None and (quantile.sharing is not Sharing.network or len(worth) != gated.sum()):
        needed = f"must be {int(gated.sum())} numbers, one for each gated block, with gate.quantile.sharing=network"
        raise UserError(f"gate.quantile.worth = {worth}: {needed}")
    begin = None if quantile.begin is None else list(quantile.begin)
    if begin is not None and (len(begin) != gated.sum() or not all(0 <= share <= 1 for share in begin)):
        raise UserError(f"gate.quantile.begin = {begin}: must be {int(gated.sum())} shares from 0 to 1")
    bounds = quantile.low, quantile.high
    budget = Budget(tau, costs[gated], free, quantile.sharing, quantile.credit, *bounds, worth, begin)
    low, high = (quantile.low, quantile.high) if quantile.sharing is Sharing.network else (0.0, 1.0)
    if not low <= budget.gated_share(tau) <= high:
        least, most = (free + (1 - free) * bound for bound in (low, high))
        raise UserError(
            f"objective.tau_target = {tau}: must lie from {least:.3f} to {most:.3f} with gate.calibration=quantile, "
            f"because {int((~gated).sum())} of {len(gated)} blocks have no gate and the others compute "
            f"{low:g} to {high:g} of the samples"
        )
    return budget
