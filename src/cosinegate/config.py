"""The range of every value of a training config, and the identity of what it asks for."""

import dataclasses
import difflib
import hashlib
import json
import os
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from cosinegate.choices import Calibration, Classifier, Credit, GateKind, Look, Polarity, Sharing, Signal
from cosinegate.errors import UserError

# The keys that say where and how a run is kept or shown, not what it computes: they are no part of its identity.
NOT_IDENTITY = ("name", "seed", "threads", "runs_dir", "run_dir", "sweep", "save_minutes", "logger")
NOT_IDENTITY += ("data.root", "data.folder")
NOT_IDENTITY += ("trainer.accelerator", "trainer.devices", "trainer.strategy", "trainer.num_nodes")
NOT_IDENTITY += ("trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.log_every_n_steps")
NOT_IDENTITY += ("trainer.profiler",)
# Keys that came after runs had been trained, with the value by which a run is what it was without them.
LATER = {"objective.lambda_full": 0.0, "objective.lambda_exit": 1.0, "gate.exits": False, "network.widths": None}
LATER |= {"gate.exit_classifier": Classifier.shared, "trunk": None, "weights": None}
LATER |= {
    "trainer.max_steps": -1,
    "trainer.max_time": None,
    "trainer.overfit_batches": 0,
    "trainer.fast_dev_run": False,
}

LARGEST = 1e30  # of a number that float32 holds, with room to compute with it
DEEPEST, WIDEST = 1202, 4096
MOST_WEIGHTS = 500_000_000  # of the convolutions: two gigabytes, and several times that in training
MOST_IMAGES = 10**9
MOST_THREADS = 1024
SECRET = re.compile(r"api_?key|token|secret|passw|credential", re.IGNORECASE)


def is_plain_name(value: str) -> bool:
    """Whether it can name a file or a folder, on any disk and in one line.

    Names that begin with a dot are for what is not a run: `.sweeps`, `.lock`.
    """
    shown = value.isprintable() and value.strip() == value and not value.startswith(".")
    return value != "" and shown and "/" not in value and len(value.encode()) <= 150


def is_batches(value: Any) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return value is None or (whole and value <= MOST_IMAGES) or (isinstance(value, float) and 0 < value <= 1)


def seconds(max_time: str) -> int | None:
    """Of DD:HH:MM:SS; None where it is something else."""
    found = re.fullmatch(r"(\d{1,5}):(\d\d):(\d\d):(\d\d)", max_time)
    return (
        sum(int(part) * unit for part, unit in zip(found.groups(), (86400, 3600, 60, 1), strict=True))
        if found
        else None
    )


def is_devices(value: Any) -> bool:
    """A number of devices, their indices, or a word that lightning knows. 0 and below -1 it refuses itself."""
    if isinstance(value, ListConfig | list):
        return 0 < len(value) <= 256 and all(isinstance(v, int) and 0 <= v <= 256 for v in value)
    whole = isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, str) or (whole and abs(value) <= 256)


PROFILERS = ("simple", "advanced", "pytorch")
TORCHVISION = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
Rule = tuple[str, Callable[[Any], bool], str]
RULES: list[Rule] = [
    ("name", is_plain_name, "a plain folder name, without a slash or a leading dot"),
    ("sweep", lambda v: v is None or is_plain_name(v), "null or a plain file name, without a slash or a leading dot"),
    ("seed", lambda v: 0 <= v < 2**32, "a whole number from 0 to 4294967295"),
    ("threads", lambda v: v is None or 1 <= v <= MOST_THREADS, f"null or from 1 to {MOST_THREADS}"),
    ("save_minutes", lambda v: 0 <= v <= 1e6, "from 0 to 1e6"),
    ("data.holdout", lambda v: 1 <= v <= MOST_IMAGES, f"at least 1 and at most {MOST_IMAGES}"),
    ("data.batch_size", lambda v: 1 <= v <= MOST_IMAGES, f"at least 1 and at most {MOST_IMAGES}"),
    ("data.eval_batch_size", lambda v: 1 <= v <= MOST_IMAGES, f"at least 1 and at most {MOST_IMAGES}"),
    ("data.crop_padding", lambda v: 0 <= v <= 32, "from 0 to 32 pixels"),
    ("data.mean", lambda v: all(abs(m) <= 1e6 for m in v), "from -1e6 to 1e6 for each channel"),
    ("data.std", lambda v: all(s >= 1e-6 for s in v), "above 0 for each channel, at least 1e-6"),
    (
        "network.depth",
        lambda v: 8 <= v <= DEEPEST and (v - 2) % 6 == 0,
        f"6n+2: 8, 14, 20, 26, 32, ... up to {DEEPEST}",
    ),
    (
        "network.blocks",
        lambda v: v is None or (len(v) == 3 and min(v) >= 1 and sum(v) <= DEEPEST // 2),
        f"null or three numbers of blocks, each at least 1, together at most {DEEPEST // 2}",
    ),
    (
        "network.torchvision",
        lambda v: v is None or v in TORCHVISION,
        f"null or one of {', '.join(TORCHVISION)}",
    ),
    ("network.width", lambda v: 1 <= v <= WIDEST, f"at least 1 and at most {WIDEST}"),
    (
        "network.widths",
        lambda v: v is None or (len(v) == 3 and list(v) == sorted(v) and v[0] >= 1 and v[2] <= 4 * WIDEST),
        f"null or three numbers of channels, none below the one before, from 1 to {4 * WIDEST}",
    ),
    ("gate.threshold", lambda v: 0 < v < 1, "between 0 and 1, both excluded"),
    ("gate.predictor.hidden", lambda v: 1 <= v <= 1024, "at least 1 and at most 1024"),
    ("gate.predictor.switch_epoch", lambda v: v >= 0, "at least 0"),
    ("gate.quantile.low", lambda v: 0 <= v < 1, "at least 0 and below 1"),
    ("gate.quantile.high", lambda v: 0 < v <= 1, "above 0 and at most 1"),
    ("gate.quantile.fit", lambda v: v >= 0, "0 or more"),
    ("gate.quantile.temperature", lambda v: v > 0, "above 0"),
    ("gate.start", lambda v: v is None or 0 < v < 1, "null or between 0 and 1, both excluded"),
    ("gate.hidden", lambda v: 1 <= v <= 1024, "at least 1 and at most 1024"),
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
    ("objective.lambda_full", lambda v: v >= 0, "at least 0"),
    ("objective.lambda_exit", lambda v: v >= 0, "at least 0"),
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
    ("trainer.max_steps", lambda v: v == -1 or v >= 1, "at least 1, or -1 for as many as the epochs have"),
    ("trainer.max_time", lambda v: v is None or seconds(v), "null or DD:HH:MM:SS above zero, as in '00:12:00:00'"),
    (
        "trainer.fast_dev_run",
        lambda v: isinstance(v, int) and 0 <= v <= MOST_IMAGES,
        "true, false or a number of batches",
    ),
    (
        "trainer.overfit_batches",
        lambda v: v is not None and not isinstance(v, bool) and (v == 0 or is_batches(v)),
        "0, a number of batches (1, 2, ...) or a share (0.0 < x <= 1.0)",
    ),
    ("trainer.profiler", lambda v: v in (None, *PROFILERS), f"null, {' or '.join(PROFILERS)}"),
    ("trainer.devices", is_devices, "a number of devices up to 256, a list of their indices, or a word"),
    ("trainer.log_every_n_steps", lambda v: v >= 0, "at least 0"),
    ("trainer.num_sanity_val_steps", lambda v: v >= -1, "at least 0, or -1 for all"),
    ("trainer.gradient_clip_val", lambda v: v is None or v >= 0, "null or at least 0"),
    ("trainer.num_nodes", lambda v: v >= 1, "at least 1"),
    ("trainer.check_val_every_n_epoch", lambda v: v >= 1, "at least 1"),
    ("trainer.accumulate_grad_batches", lambda v: v >= 1, "at least 1"),
]


def require_schema(node: Any, path: str = "") -> None:
    """Ends with one line where a key is not the schema's, which `+` can add, or is gone, which `~` can bring about."""
    if not isinstance(node, DictConfig) or node._is_none() or node._is_missing() or node._is_interpolation():
        return
    known = schema_keys(OmegaConf.get_type(node))
    for key in known if path == "" else []:  # of the others OmegaConf itself lets none go
        if key not in list(node):
            raise UserError(not_left_out(key))
    for key in node:
        if known and key not in known and f"{path}{key}" != "hydra.env":  # Hydra's own, beside its schema
            raise UserError(no_such_key(f"{path}{key}", known))
        require_schema(node._get_node(key), f"{path}{key}.")


def schema_keys(schema: Any) -> list[str]:
    """The keys of a part of a config; none where any key may be."""
    return [field.name for field in dataclasses.fields(schema)] if dataclasses.is_dataclass(schema) else []


def not_left_out(full_key: str) -> str:
    return f"{full_key}: cannot be left out; give it a value, as in {full_key}=..."


def no_such_key(full_key: str, known: list[str]) -> str:
    """One line about a key that a part of a config does not have, with the one that may have been meant."""
    parent, _, key = full_key.rpartition(".")
    near = difflib.get_close_matches(key, known, n=1)
    hint = f", did you mean {near[0]}?" if near else ""
    where = f"{parent} has" if parent else "there are"
    return f"{full_key}: no such key{hint}" + (f" ({where} {', '.join(known)})" if known else "")


def require(config: DictConfig) -> None:
    """Ends with one line that names the first key that has no value."""
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise UserError(f"{missing[0]} has no value: give one on the command line, as in {missing[0]}=...")


def require_positive(config: DictConfig, *keys: str) -> None:
    """Ends with one line that names the first of the keys that is below 1, or beyond any use."""
    for key in keys:
        most = MOST_THREADS if key == "threads" else MOST_IMAGES
        if config[key] is not None and not 1 <= config[key] <= most:
            raise UserError(f"{key} = {config[key]}: must be at least 1 and at most {most}")


def validate(config: DictConfig) -> None:
    """Ends with one line that names the first key whose value is missing or out of range."""
    require(config)
    for key, value in leaves(primitives(config)).items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not abs(number) <= LARGEST:  # nor of what is no number
                raise UserError(f"{key} = {value}: must be a finite number, at most {LARGEST:g}")
        if SECRET.search(key.rpartition(".")[2]) and value is not None:  # it would lie in records and checkpoints
            raise UserError(
                f"{key}: a secret has no place in a config; W&B's key is for `wandb login` or WANDB_API_KEY"
            )
    for key, allowed, words in RULES:
        value = OmegaConf.select(config, key)
        if not allowed(value):
            raise UserError(f"{key} = {value}: must be {words}")
    for network in (config.network, reference(config.network)):
        weights = convolution_weights(network)
        if weights > MOST_WEIGHTS:
            given = "width" if network.widths is None else "widths"
            words = f"network.{given} = {network[given]} with {sum(blocks_per_stage(network))} blocks"
            most = f"must be at most {MOST_WEIGHTS // 10**6} million"
            raise UserError(f"{words}: {weights // 10**6} million weights; {most}")
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
    _check_reward(config)
    if config.objective.lambda_full > 0 and config.gate.kind is GateKind.none:
        raise UserError("objective.lambda_full: a dense network has no other path than the full one")
    _check_trunk(config)
    _check_exits(config)
    predicted = config.gate.kind is GateKind.cosine and config.gate.signal is Signal.predicted
    if config.network.torchvision is not None and predicted and config.gate.predictor.look is Look.stage:
        raise UserError("gate.predictor.look = stage: torchvision's networks need gate.predictor.look=block")
    if config.gate.kind is GateKind.controller and not config.gate.controller.enabled:
        raise UserError("gate.controller.enabled = False: gates of kind controller have nothing else to decide by")
    if config.optimizer.nesterov and config.optimizer.momentum == 0:
        raise UserError("optimizer.nesterov = True: needs optimizer.momentum above 0")
    if len(config.data.mean) != len(config.data.std):
        raise UserError(
            f"data.mean has {len(config.data.mean)} values and data.std {len(config.data.std)}: one a channel"
        )


def _check_exits(config: DictConfig) -> None:
    """Ends with one line where gates could not tell which images may leave."""
    gate = config.gate
    needed = {
        "gate.signal=predicted": gate.kind is GateKind.cosine and gate.signal is Signal.predicted,
        "gate.calibration=quantile": gate.calibration is Calibration.quantile,
        "gate.predictor.look=block": gate.predictor.look is Look.block,
        "gate.quantile.credit=change": gate.quantile.credit is Credit.change,
        "gate.quantile.fit above 0": gate.quantile.fit > 0,
        "gate.gamma.learnable=false": not gate.gamma.learnable,
        "objective.lambda_full=0": config.objective.lambda_full == 0,
        "network.torchvision=null": config.network.torchvision is None,
        "gate.quantile.begin=null": gate.quantile.begin is None,
        "gate.quantile.sharing=network": gate.quantile.sharing is Sharing.network,
        "gate.quantile.worth=null": gate.quantile.worth is None,
        "gate.predictor.switch_epoch=0": gate.predictor.switch_epoch == 0,  # training lets nobody leave: nothing pushes
        "objective.lambda_flops=0": config.objective.lambda_flops == 0,
    }
    if gate.exit_classifier is Classifier.own and not gate.exits and gate.kind is not GateKind.none:
        words = "there is none without gate.exits=true; begin with gate=exit, or add gate.exit_classifier=shared"
        raise UserError(f"gate.exit_classifier = own: {words}")
    lacking = [words for words, is_there in needed.items() if not is_there]
    if gate.exits and lacking:
        raise UserError(f"gate.exits = True: needs {lacking[0]}; begin with gate=exit objective=predictive")


def _check_trunk(config: DictConfig) -> None:
    """Ends with one line where a trunk that is held would leave nothing to learn."""
    for key in ("weights", "trunk"):
        path = Path(config[key] or "")
        if path.name == LATEST and path.is_symlink():  # the same command would ask for another run tomorrow
            raise UserError(f"{key} = {path}: give the run's own folder, {path.parent / os.readlink(path)}")
    if config.weights == "":
        raise UserError("weights: give a run's folder or a checkpoint, as in weights=runs/digits/...")
    if config.trunk is None:
        return
    if config.weights is not None:
        raise UserError(f"weights = {config.weights}: trunk = {config.trunk} gives weights too; leave one of them out")
    if not config.trunk:
        raise UserError("trunk: give the folder of a dense run, as in trunk=runs/resnet20/...")
    if config.gate.kind in (GateKind.none, GateKind.random, GateKind.fixed, GateKind.drop):
        raise UserError(f"trunk = {config.trunk}: only gates learn then, and gate.kind={config.gate.kind.name} cannot")
    if config.gate.exits and config.objective.lambda_exit > 0:
        words = "is held as it is: exits can teach it nothing, which needs objective.lambda_exit=0"
        raise UserError(f"trunk = {config.trunk}: {words}")


def _check_reward(config: DictConfig) -> None:
    """Ends with one line where a stage of reward was asked for that would teach nothing."""
    reinforce, kind = config.objective.reinforce, config.gate.kind
    if reinforce.weight == 0:
        return
    if kind is GateKind.none:
        raise UserError("objective.reinforce.weight: a dense network has no gates that could learn from a reward")
    if kind in (GateKind.random, GateKind.fixed, GateKind.drop):
        raise UserError(f"objective.reinforce.weight: gates of kind {kind.name} have nothing that could learn")
    if config.gate.calibration is Calibration.quantile:
        raise UserError("objective.reinforce.weight: needs gate.calibration=none; calibrated gates are not drawn")
    if reinforce.start_epoch >= config.trainer.max_epochs:
        needed = f"must be below trainer.max_epochs = {config.trainer.max_epochs}, or nothing learns by reward"
        raise UserError(f"objective.reinforce.start_epoch = {reinforce.start_epoch:g}: {needed}")


def check_one_of_several(config: DictConfig) -> None:
    """What a run alone may have and a job of a sweep, or a trial of a search, may not."""
    if config.run_dir is not None:
        raise UserError(f"run_dir = {config.run_dir}: several runs have a folder each; runs_dir is where they lie")
    if config.trainer.fast_dev_run:
        raise UserError("trainer.fast_dev_run: tries one run, and keeps nothing that a sweep or a search could show")


def is_number(value: Any) -> bool:
    """Whether it is a number that can be computed with: finite, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def blocks_per_stage(network: DictConfig) -> list[int]:
    return list(network.blocks or [(network.depth - 2) // 6] * 3)


def stage_widths(network: DictConfig) -> list[int]:
    """The channels of each stage."""
    return list(network.widths or (network.width, 2 * network.width, 4 * network.width))


def reference(network: DictConfig) -> DictConfig:
    """The network of its depth and width, which a benchmark's figures are ratios to, however it is shared out."""
    return OmegaConf.merge(network, {"blocks": None, "widths": None})


def convolution_weights(network: DictConfig) -> int:
    """How many weights the convolutions of the residuals have: nearly all of a network's, known before it is built."""
    widths = stage_widths(network)
    inner = sum(18 * channels**2 * number for channels, number in zip(widths, blocks_per_stage(network), strict=True))
    return inner - 9 * sum(after * (after - before) for before, after in pairwise(widths))


def primitives(config: DictConfig) -> dict[str, Any]:
    """The resolved config as plain dicts, lists, numbers and words."""
    return OmegaConf.to_container(config, resolve=True, enum_to_str=True, throw_on_missing=True)


def identity(config: DictConfig) -> str:
    """Ten hex digits that two configs share when they ask for the same computation, the seed aside."""
    copy = config.copy()
    copy.run_dir = None  # callbacks may point into it
    content = primitives(copy)
    unchanged = [key for key, value in LATER.items() if OmegaConf.select(copy, key) == value]
    for key in (*NOT_IDENTITY, *unchanged):
        *parents, last = key.split(".")
        node = content
        for parent in parents:
            node = node[parent]
        del node[last]
    for key in ("trunk", "weights"):
        if config[key]:  # runs of several seeds, each from the run of its own, are one configuration
            content[key] = re.sub(rf"-s{config.seed}$", "", str(Path(config[key])))
    if content["gate"]["kind"] == GateKind.none.name:
        content["gate"], content["objective"] = {"kind": "none"}, None  # a dense network looks at nothing else of them
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


LATEST = "latest"  # beside the runs of an experiment: a link to the newest
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
