"""The range of every value of a training config, and the identity of what it asks for."""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from cosinegate.choices import GateKind, Polarity
from cosinegate.errors import UserError

# The keys that say where and how a run is kept or shown, not what it computes: they are no part of its identity.
NOT_IDENTITY = ("name", "seed", "threads", "runs_dir", "run_dir", "sweep", "logger", "data.root", "data.folder")
NOT_IDENTITY += ("trainer.accelerator", "trainer.devices", "trainer.strategy", "trainer.num_nodes")
NOT_IDENTITY += ("trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.log_every_n_steps")


def is_plain_name(value: str) -> bool:
    """Whether it can name a file or a folder."""
    return value not in ("", ".", "..") and "/" not in value


def is_batches(value: Any) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return value is None or whole or (isinstance(value, float) and 0 < value <= 1)


TORCHVISION = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
Rule = tuple[str, Callable[[Any], bool], str]
RULES: list[Rule] = [
    ("name", is_plain_name, "a plain folder name"),
    ("sweep", lambda v: v is None or is_plain_name(v), "null or a plain file name"),
    ("seed", lambda v: 0 <= v < 2**32, "a whole number from 0 to 4294967295"),
    ("threads", lambda v: v is None or v >= 1, "null or at least 1"),
    ("data.holdout", lambda v: v >= 1, "at least 1"),
    ("data.batch_size", lambda v: v >= 1, "at least 1"),
    ("data.eval_batch_size", lambda v: v >= 1, "at least 1"),
    ("data.crop_padding", lambda v: v >= 0, "at least 0"),
    ("data.std", lambda v: all(s > 0 for s in v), "above 0 for each channel"),
    ("network.depth", lambda v: v >= 8 and (v - 2) % 6 == 0, "6n+2: 8, 14, 20, 26, 32, ..."),
    (
        "network.blocks",
        lambda v: v is None or (len(v) == 3 and min(v) >= 1),
        "null or three numbers of blocks, each at least 1",
    ),
    (
        "network.torchvision",
        lambda v: v is None or v in TORCHVISION,
        f"null or one of {', '.join(TORCHVISION)}",
    ),
    ("network.width", lambda v: v >= 1, "at least 1"),
    ("gate.threshold", lambda v: 0 < v < 1, "between 0 and 1, both excluded"),
    ("gate.predictor.hidden", lambda v: v >= 1, "at least 1"),
    ("gate.predictor.switch_epoch", lambda v: v >= 0, "at least 0"),
    ("gate.quantile.low", lambda v: 0 <= v < 1, "at least 0 and below 1"),
    ("gate.quantile.high", lambda v: 0 < v < 1, "between 0 and 1, both excluded"),
    ("gate.quantile.temperature", lambda v: v > 0, "above 0"),
    ("gate.start", lambda v: v is None or 0 < v < 1, "null or between 0 and 1, both excluded"),
    ("gate.hidden", lambda v: v >= 1, "at least 1"),
    ("gate.rate", lambda v: 0 < v <= 1, "above 0 and at most 1"),
    ("gate.pattern", lambda v: v is None or set(v) <= {0, 1}, "null or a list of 0 and 1"),
    ("gate.controller.reduction", lambda v: v >= 1, "at least 1"),
    ("gate.relaxation.temperature", lambda v: v > 0, "above 0"),
    ("gate.relaxation.temperature_end", lambda v: v > 0, "above 0"),
    ("gate.relaxation.noise_until", lambda v: 0 <= v <= 1, "a share of the run, from 0 to 1"),
    ("objective.lambda_flops", lambda v: v >= 0, "at least 0"),
    ("objective.lambda_cons", lambda v: v >= 0, "at least 0"),
    ("objective.tau_target", lambda v: 0 < v <= 1, "above 0 and at most 1"),
    ("objective.targets", lambda v: v is None or all(0 <= t <= 1 for t in v), "null or shares from 0 to 1"),
    ("objective.bounds", lambda v: 0 <= v <= 1, "a share of the run, from 0 to 1"),
    ("objective.reinforce.weight", lambda v: v >= 0, "at least 0"),
    ("objective.reinforce.alpha", lambda v: v >= 0, "at least 0"),
    ("objective.reinforce.start_epoch", lambda v: v >= 0, "at least 0"),
    ("objective.lambda_predict", lambda v: v >= 0, "at least 0"),
    ("objective.start_epoch", lambda v: v >= 0, "at least 0"),
    ("objective.warmup_epochs", lambda v: v >= 0, "at least 0"),
    ("optimizer.lr", lambda v: v > 0, "above 0"),
    ("optimizer.gate_lr", lambda v: v >= 0, "at least 0"),
    ("optimizer.momentum", lambda v: 0 <= v < 1, "at least 0 and below 1"),
    ("optimizer.weight_decay", lambda v: v >= 0, "at least 0"),
    ("trainer.max_epochs", lambda v: v >= 1, "at least 1"),
    *(
        (
            f"trainer.limit_{stage}_batches",
            is_batches,
            "null, a number of batches (1, 2, ...) or a share (0.0 < x <= 1.0)",
        )
        for stage in ("train", "val", "test")
    ),
    ("trainer.num_nodes", lambda v: v >= 1, "at least 1"),
    ("trainer.check_val_every_n_epoch", lambda v: v >= 1, "at least 1"),
    ("trainer.accumulate_grad_batches", lambda v: v >= 1, "at least 1"),
]


def require(config: DictConfig) -> None:
    """Ends with one line that names the first key that has no value."""
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise UserError(f"{missing[0]} has no value: give one on the command line, as in {missing[0]}=...")


def require_positive(config: DictConfig, *keys: str) -> None:
    """Ends with one line that names the first of the keys that is below 1."""
    for key in keys:
        if config[key] is not None and config[key] < 1:
            raise UserError(f"{key} = {config[key]}: must be at least 1")


def validate(config: DictConfig) -> None:
    """Ends with one line that names the first key whose value is missing or out of range."""
    require(config)
    for key, value in leaves(primitives(config)).items():
        if any(isinstance(v, float) and not math.isfinite(v) for v in (value if isinstance(value, list) else [value])):
            raise UserError(f"{key} = {value}: must be a finite number")
    for key, allowed, words in RULES:
        value = OmegaConf.select(config, key)
        if not allowed(value):
            raise UserError(f"{key} = {value}: must be {words}")
    gamma = config.gate.gamma.init
    if config.gate.polarity is Polarity.paper and gamma >= 0:
        raise UserError(f"gate.gamma.init = {gamma}: must be below 0 with gate.polarity=paper (the paper has γ < 0)")
    if gamma == 0:
        raise UserError("gate.gamma.init = 0: must not be 0, or CIR moves no gate")
    quantile = config.gate.quantile
    if quantile.low >= quantile.high:
        raise UserError(f"gate.quantile.low = {quantile.low}: must be below gate.quantile.high = {quantile.high}")
    if config.trainer.check_val_every_n_epoch > config.trainer.max_epochs:
        raise UserError(
            f"trainer.check_val_every_n_epoch = {config.trainer.check_val_every_n_epoch}: "
            f"must be at most trainer.max_epochs = {config.trainer.max_epochs}"
        )
    if config.optimizer.nesterov and config.optimizer.momentum == 0:
        raise UserError("optimizer.nesterov = True: needs optimizer.momentum above 0")
    if len(config.data.mean) != len(config.data.std):
        raise UserError(
            f"data.mean has {len(config.data.mean)} values and data.std {len(config.data.std)}: one a channel"
        )


def primitives(config: DictConfig) -> dict[str, Any]:
    """The resolved config as plain dicts, lists, numbers and words."""
    return OmegaConf.to_container(config, resolve=True, enum_to_str=True, throw_on_missing=True)


def identity(config: DictConfig) -> str:
    """Ten hex digits that two configs share when they ask for the same computation, the seed aside."""
    copy = config.copy()
    copy.run_dir = None  # callbacks may point into it
    content = primitives(copy)
    for key in NOT_IDENTITY:
        *parents, last = key.split(".")
        node = content
        for parent in parents:
            node = node[parent]
        del node[last]
    if content["gate"]["kind"] == GateKind.none.name:
        content["gate"], content["objective"] = {"kind": "none"}, None  # a dense network looks at nothing else of them
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


SWEEPS = ".sweeps"  # in runs_dir: which runs a sweep has, a search's study, a launcher's logs


def run_folder(config: DictConfig) -> Path:
    """Where the run lives: what was asked for, or a folder that follows from what the run computes."""
    if config.run_dir is not None:
        return Path(config.run_dir)
    return Path(config.runs_dir) / config.name / f"{identity(config)}-s{config.seed}"


def leaves(node: Any, path: str = "") -> dict[str, Any]:
    """Every value of nested dicts by its dotted key; a list is one value."""
    if not isinstance(node, dict):
        return {path: node}
    return {k: v for key, child in node.items() for k, v in leaves(child, f"{path}.{key}" if path else key).items()}
