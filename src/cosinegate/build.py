"""From a config to the objects it names."""

import json
from collections.abc import Callable

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from cosinegate.calibration import Budget
from cosinegate.choices import Calibration, Credit, GateKind, Look, Sharing, Target, Weighting
from cosinegate.config import blocks_per_stage, primitives, reference, stage_widths
from cosinegate.data import IMAGE_SETS
from cosinegate.deploy.flops import block_flops, dense_flops
from cosinegate.errors import UserError
from cosinegate.gates import Gate
from cosinegate.gates.make import GateMaker, is_predicted
from cosinegate.lit import LitCosineGate
from cosinegate.networks import GatedNetwork, ResNet
from cosinegate.objective import Objective
from cosinegate.secret import masked


def first_of_stage(config: DictConfig) -> list[bool]:
    """(N,): of every block of the network, whether it is the first of its stage."""
    if config.network.torchvision is not None:
        import torchvision  # what few networks need

        from cosinegate.networks.torchvision import residual_blocks

        with torch.device("meta"):
            model = torchvision.models.get_model(config.network.torchvision, weights=None)
        return [is_first for _, is_first in residual_blocks(model)]
    return [index == 0 for number in blocks_per_stage(config.network) for index in range(number)]


def gated_blocks(config: DictConfig) -> Tensor:
    """(N,) bool: which blocks have a gate."""
    firsts = first_of_stage(config)
    has_gate = [config.gate.first_blocks or not is_first for is_first in firsts]
    if config.gate.exits:  # of the last stage those that leave a map's shape as it is
        last_stage = max(place for place, is_first in enumerate(firsts) if is_first)
        has_gate = [place > last_stage for place in range(len(firsts))]
    return torch.tensor(has_gate, device="cpu")  # a network may be built on no device at all


def gate_maker(config: DictConfig) -> GateMaker:
    gated, kind = gated_blocks(config), config.gate.kind
    if kind is not GateKind.none and not gated.any():
        key = "gate.exits = True" if config.gate.exits else "gate.first_blocks = False"
        raise UserError(f"{key}: with one block a stage no block is left to have a gate")
    calibrated = kind is not GateKind.none and config.gate.calibration is Calibration.quantile
    return GateMaker(config.gate, gated.tolist(), _budget(config, gated) if calibrated else None)


def build_network(config: DictConfig, make_gate: Callable[[int], Gate | None] | None = None) -> GatedNetwork:
    image_set, network = IMAGE_SETS[config.data.name.name], config.network
    make_gate = make_gate or gate_maker(config)
    consistency = config.objective.lambda_cons > 0, config.objective.consistency.detach_target
    in_channels, num_classes = image_set.shape[2], len(image_set.classes)
    if network.torchvision is not None:
        from cosinegate.networks.torchvision import torchvision_resnet

        return torchvision_resnet(network.torchvision, in_channels, num_classes, make_gate, *consistency)
    return ResNet(
        blocks_per_stage(network),
        stage_widths(network),
        in_channels,
        num_classes,
        network.shortcut,
        network.post_activation,
        make_gate,
        config.gate.predictor.look if is_predicted(config.gate) else Look.block,
        *consistency,
    )


def reference_network(config: DictConfig) -> GatedNetwork:
    """What a benchmark's FLOPs and times are ratios to: the dense network of the config's depth and width, however the
    run shares out its blocks and channels among the stages. Untrained: neither a counter nor a clock looks at weights.
    """
    of = OmegaConf.merge(config, {"network": reference(config.network)})
    with torch.random.fork_rng(devices=[]):
        return build_network(of, make_gate=lambda channels: None)


def reference_flops(config: DictConfig) -> int:
    """Of the reference network, for one image."""
    with torch.device("meta"):
        return dense_flops(reference_network(config), IMAGE_SETS[config.data.name.name].shape)


def build_module(config: DictConfig) -> LitCosineGate:
    """The network with the weights that `config.seed` gives it, and its objective."""
    image_set = IMAGE_SETS[config.data.name.name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = build_network(config)
    kept = json.loads(masked(json.dumps(primitives(config))))  # checkpoints hold it, and loggers send it
    return LitCosineGate(network, build_objective(config), config.optimizer, len(image_set.classes), kept)


def build_objective(config: DictConfig) -> Objective:
    chosen, gated = config.objective, gated_blocks(config)
    targets = None if chosen.targets is None else list(chosen.targets)
    if targets is not None and (chosen.target is not Target.block or len(targets) != gated.sum()):
        needed = f"must be {int(gated.sum())} shares, one for each gated block, with objective.target=block"
        raise UserError(f"objective.targets = {targets}: {needed}")
    return Objective(
        chosen.lambda_flops,
        chosen.lambda_cons,
        chosen.tau_target,
        _block_weights(config) if chosen.weighting is Weighting.flops else None,
        chosen.sided,
        chosen.lambda_predict,
        chosen.target,
        targets,
        gated,
        chosen.bounds,
        (chosen.reinforce.weight, chosen.reinforce.alpha),
        chosen.lambda_full,
        chosen.lambda_exit,
    )


def _block_weights(config: DictConfig) -> Tensor:
    """(N,): what the residual of every block costs."""
    with torch.device("meta"):
        network = build_network(config, make_gate=lambda channels: None)
    return block_flops(network, IMAGE_SETS[config.data.name.name].shape)


def _budget(config: DictConfig, gated: Tensor) -> Budget:
    quantile = config.gate.quantile
    costs = _block_weights(config) if config.objective.weighting is Weighting.flops else torch.ones(len(gated))
    costs = costs / costs.sum()
    if quantile.credit is not Credit.slope and not is_predicted(config.gate):
        raise UserError(
            f"gate.quantile.credit = {quantile.credit.name}: needs gate.signal=predicted; "
            "else gate.quantile.credit=slope"
        )
    if quantile.fit and (quantile.credit is Credit.slope or not config.gate.controller.enabled):
        needed = "needs gate.quantile.credit=cost or change, and gate.controller.enabled=true, which is what is fitted"
        raise UserError(f"gate.quantile.fit = {quantile.fit}: {needed}")
    if quantile.fit and config.optimizer.decay_gates:
        needed = "needs optimizer.decay_gates=false, or every step would shrink what was fitted"
        raise UserError(f"gate.quantile.fit = {quantile.fit}: {needed}")
    tau, free = config.objective.tau_target, costs[~gated].sum().item()
    worth = None if quantile.worth is None else list(quantile.worth)
    if worth is not None and (quantile.sharing is not Sharing.network or len(worth) != gated.sum()):
        needed = f"must be {int(gated.sum())} numbers, one for each gated block, with gate.quantile.sharing=network"
        raise UserError(f"gate.quantile.worth = {worth}: {needed}")
    begin = None if quantile.begin is None else list(quantile.begin)
    if begin is not None and (len(begin) != gated.sum() or not all(0 <= share <= 1 for share in begin)):
        raise UserError(f"gate.quantile.begin = {begin}: must be {int(gated.sum())} shares from 0 to 1")
    bounds, exits = (quantile.low, quantile.high), config.gate.exits
    budget = Budget(
        tau, costs[gated], free, quantile.sharing, quantile.credit, *bounds, worth, begin, quantile.fit > 0, exits
    )
    low, high = (quantile.low, quantile.high) if quantile.sharing is Sharing.network else (0.0, 1.0)
    if not low <= budget.gated_share(tau) <= high:
        least, most = (free + (1 - free) * bound for bound in (low, high))
        raise UserError(
            f"objective.tau_target = {tau}: must lie from {least:.3f} to {most:.3f} with gate.calibration=quantile, "
            f"because {int((~gated).sum())} of {len(gated)} blocks have no gate and the others compute "
            f"{low:g} to {high:g} of the samples"
        )
    return budget
