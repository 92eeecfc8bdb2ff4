"""Every key of a training config: its type, default and range. `conf/` has the values that differ from defaults.

A key that a checkpoint's config lacks, because it is younger, has its default.
"""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig

from cosinegate.config.choices import (
    Annealing,
    Dataset,
    GateKind,
    Library,
    Polarity,
    Shortcut,
    Sided,
    Target,
    Validation,
    Weighting,
)
from cosinegate.config.ranges import (
    ANY_BATCHES,
    MOST_IMAGES,
    PLAIN_NAME,
    THREADS,
    Range,
    above,
    allowed,
    at_least,
    count,
    is_batches,
    is_devices,
    is_plain_name,
    or_null,
    seconds,
    within,
)

DEEPEST, WIDEST = 1202, 4096
MOST_CLASSES = 5_000  # their names lie in configs, cards and checkpoints
PROFILERS = ("simple", "advanced", "pytorch")


def is_class_name(value: str) -> bool:
    """Whether a config can hold the name of a class, and does not take it for a reference to another value."""
    return is_plain_name(value) and "${" not in value and value != MISSING


def _images(default: Any) -> Any:
    return allowed(default, *count())


def _batches() -> Any:
    return allowed(None, *ANY_BATCHES)


@dataclass
class ContentConfig:
    """What the images of a folder are. The program finds it out; nobody writes it."""

    sha256: str = allowed(MISSING, lambda v: bool(re.fullmatch("[0-9a-f]{64}", v)), "a SHA-256")  # of pixels and labels
    classes: list[str] = allowed(
        [],
        lambda v: 2 <= len(v) == len(set(v)) <= MOST_CLASSES and all(map(is_class_name, v)),
        f"from 2 to {MOST_CLASSES} different names",
    )
    train_size: int = _images(MISSING)
    test_size: int = _images(MISSING)


@dataclass
class DataConfig:
    name: Dataset = MISSING
    root: str = "data"  # where verified data is kept
    folder: str | None = None  # a folder that holds the original files; looked at first
    validation: Validation = Validation.test  # test: as the paper selects; holdout: on training images kept aside
    holdout: int = _images(5000)  # training images kept for selection with validation: holdout
    batch_size: int = _images(128)  # over all devices together
    eval_batch_size: int = _images(1000)
    drop_last: bool = False
    crop_padding: int = within(0, 32, 0, " pixels")  # 0: no random crop
    flip: bool = False
    mean: list[float] = allowed([], lambda v: all(abs(m) <= 1e6 for m in v), "from -1e6 to 1e6 for each channel")
    std: list[float] = allowed([], lambda v: all(s >= 1e-6 for s in v), "above 0 for each channel, at least 1e-6")
    # of data=folder alone, and null for every other data set
    size: int | None = allowed(  # height and width that images are resized to
        None, lambda v: v is None or 8 <= v <= 1024, "null or from 8 to 1024 pixels"
    )
    channels: int | None = allowed(None, lambda v: v in (None, 1, 3), "null, 1 (grey) or 3 (RGB)")
    test_fraction: float | None = allowed(  # of each class, where the folder has no test images of its own
        None, lambda v: v is None or 0 < v < 1, "null or between 0 and 1, both excluded"
    )
    content: ContentConfig | None = None


@dataclass
class NetworkConfig:
    depth: int = allowed(  # 6n+2
        20, lambda v: 8 <= v <= DEEPEST and (v - 2) % 6 == 0, f"6n+2: 8, 14, 20, 26, 32, ... up to {DEEPEST}"
    )
    blocks: list[int] | None = allowed(  # of each stage, as in [2,2,3]; null: n in all three, as the depth says
        None,
        lambda v: v is None or (len(v) == 3 and min(v) >= 1 and sum(v) <= DEEPEST // 2),
        f"null or three numbers of blocks, each at least 1, together at most {DEEPEST // 2}",
    )
    width: int = allowed(16, lambda v: 1 <= v <= WIDEST, f"at least 1 and at most {WIDEST}")  # of the first stage
    widths: list[int] | None = allowed(  # channels of each stage; null: width, twice and four times that
        None,
        lambda v: v is None or (len(v) == 3 and list(v) == sorted(v) and v[0] >= 1 and v[2] <= 4 * WIDEST),
        f"null or three numbers of channels, none below the one before, from 1 to {4 * WIDEST}",
    )
    shortcut: Shortcut = Shortcut.pad  # pad: no parameters; projection
    post_activation: bool = True
    library: Library | None = None  # timm or torchvision; then `model` and `options` are used, and no key above
    model: str | None = None  # the library's name for it, as in convnext_atto
    options: Any = allowed(  # the library's own, as in {img_size: 32, patch_size: 4}
        None, lambda v: v is None or isinstance(v, DictConfig | dict), "null or a mapping, as in {img_size: 32}"
    )


@dataclass
class GammaConfig:
    init: float = -2.5  # γ_0
    learnable: bool = True


@dataclass
class ControllerConfig:
    enabled: bool = True
    reduction: int = at_least(1, default=8)  # hidden units: channels / reduction


@dataclass
class RelaxationConfig:
    hard: bool = False  # true: straight-through
    temperature: float = above(0, default=1.0)
    temperature_end: float = above(0, default=0.1)  # reached in the last epoch, unless annealing is none
    annealing: Annealing = Annealing.none
    noise_until: float = within(0, 1, 1.0, " of the run")  # fraction of the run after which the noise is off


def _start(default: float | None) -> Any:
    return allowed(default, lambda v: v is None or 0 < v < 1, "null or between 0 and 1, both excluded")


def _threshold(default: float) -> Any:
    return allowed(default, lambda v: 0 < v < 1, "between 0 and 1, both excluded")


def _straight_through(**others: Any) -> Any:
    return field(default_factory=lambda: RelaxationConfig(hard=True, **others))


@dataclass
class GateConfig:
    """The gate in every block. Each kind has its own schema, so that `gate=<kind>` shows only its own keys."""

    kind: GateKind = MISSING


@dataclass
class NoGateConfig(GateConfig):
    kind: GateKind = GateKind.none


@dataclass
class OpeningConfig(GateConfig):
    """Keys of all gates that have a logit."""

    first_blocks: bool = True  # false: the first block of each stage has no gate
    threshold: float = _threshold(0.45)  # δ: open in evaluation where σ(ℓ) is above it
    relaxation: RelaxationConfig = field(default_factory=RelaxationConfig)


@dataclass
class CosineGateConfig(OpeningConfig):
    kind: GateKind = GateKind.cosine
    polarity: Polarity = Polarity.paper  # paper: high CIR closes (γ < 0, as printed); novelty: high CIR opens
    gamma: GammaConfig = field(default_factory=GammaConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)


@dataclass
class SkipNetGateConfig(OpeningConfig):
    kind: GateKind = GateKind.skipnet
    threshold: float = _threshold(0.5)
    relaxation: RelaxationConfig = _straight_through(noise_until=0.0)
    start: float | None = _start(None)  # how open it starts; null: as its layers are drawn


@dataclass
class AigGateConfig(OpeningConfig):
    kind: GateKind = GateKind.aig
    threshold: float = _threshold(0.5)
    relaxation: RelaxationConfig = _straight_through()
    start: float | None = _start(0.85)  # how open it starts; null: as its layers are drawn
    hidden: int = allowed(16, lambda v: 1 <= v <= 1024, "at least 1 and at most 1024")  # units of its first layer


@dataclass
class ConstantGateConfig(OpeningConfig):
    kind: GateKind = GateKind.constant
    threshold: float = _threshold(0.5)
    relaxation: RelaxationConfig = _straight_through()
    start: float = allowed(0.85, lambda v: 0 < v < 1, "between 0 and 1, both excluded")  # how open it starts


@dataclass
class RandomGateConfig(GateConfig):
    kind: GateKind = GateKind.random
    first_blocks: bool = True  # false: the first block of each stage has no gate
    rate: float = allowed(0.7, lambda v: 0 < v <= 1, "above 0 and at most 1")  # fraction of the images it is open for


@dataclass
class ConsistencyConfig:
    detach_target: bool = False  # true: the full path is a constant to the consistency term


@dataclass
class ObjectiveConfig:
    lambda_flops: float = at_least(0, default=3.0)
    lambda_cons: float = at_least(0, default=0.01)
    tau_target: float = allowed(0.70, lambda v: 0 < v <= 1, "above 0 and at most 1")
    weighting: Weighting = Weighting.mean  # what a block counts for in the mean gate: mean (alike) or flops
    sided: Sided = Sided.one  # one: only a mean gate above tau_target costs; two: below it too
    target: Target = Target.network  # network: the mean gate of all blocks has the target; block: that of each
    warmup_epochs: float = at_least(0, default=40.0)  # T_warmup
    per_step: bool = False  # true: t counts fractions of an epoch
    consistency: ConsistencyConfig = field(default_factory=ConsistencyConfig)


@dataclass
class OptimizerConfig:
    """SGD with cosine annealing to zero over trainer.max_epochs."""

    lr: float = above(0, default=0.1)
    momentum: float = allowed(0.9, lambda v: 0 <= v < 1, "at least 0 and below 1")
    weight_decay: float = at_least(0, default=5e-4)
    nesterov: bool = False
    gate_lr_factor: float = at_least(0, default=1.0)  # of the gates' parameters: their learning rate is this times lr
    decay_gates: bool = True  # false: no weight decay on the gates' parameters


@dataclass
class TrainerConfig:
    """Arguments of lightning's Trainer, by their own names."""

    accelerator: str = "cpu"
    devices: Any = allowed(1, is_devices, "a number of devices up to 256, a list of their indices, or a word")
    strategy: str = "auto"
    num_nodes: int = at_least(1, default=1)
    precision: str = "32-true"
    max_epochs: int = at_least(1, default=160)
    max_steps: int = allowed(  # ends training there, in the middle of an epoch too; the record says so
        -1, lambda v: v == -1 or v >= 1, "at least 1, or -1 for as many as the epochs have"
    )
    max_time: str | None = allowed(  # ends training then, over all attempts of a run
        None, lambda v: v is None or bool(seconds(v)), "null or DD:HH:MM:SS above zero, as in '00:12:00:00'"
    )
    limit_train_batches: Any = _batches()
    limit_val_batches: Any = _batches()
    limit_test_batches: Any = _batches()
    overfit_batches: Any = allowed(  # trains on the same ones in every epoch, unshuffled; validates as many
        0,
        lambda v: v is not None and not isinstance(v, bool) and (v == 0 or is_batches(v)),
        "0, a number of batches (1, 2, ...) or a fraction (0.0 < x <= 1.0)",
    )
    fast_dev_run: Any = allowed(  # true, or a number of batches: one short epoch of everything, and nothing is kept
        False, lambda v: isinstance(v, int) and 0 <= v <= MOST_IMAGES, "true, false or a number of batches"
    )
    check_val_every_n_epoch: int = at_least(1, default=1)
    gradient_clip_val: float | None = allowed(None, lambda v: v is None or v >= 0, "null or at least 0")
    accumulate_grad_batches: int = at_least(1, default=1)
    deterministic: bool = True
    detect_anomaly: bool = False
    profiler: str | None = allowed(  # writes where the time goes into the run's folder
        None, lambda v: v in (None, *PROFILERS), f"null, {' or '.join(PROFILERS)}"
    )
    enable_progress_bar: bool = True
    enable_model_summary: bool = False


@dataclass
class Config:
    name: str = allowed("custom", is_plain_name, "a plain folder name, without a slash or a leading dot")
    seed: int = allowed(0, lambda v: 0 <= v < 2**32, "a whole number from 0 to 4294967295")
    threads: int | None = allowed(None, *or_null(THREADS))  # torch threads; null leaves torch's own choice
    runs_dir: str = "runs"
    run_dir: str | None = None  # null: runs_dir/name/<hash of the config>-s<seed>
    sweep: str | None = allowed(None, *or_null(PLAIN_NAME))  # that the run is a job of: +sweeps=... sets it
    save_minutes: float = within(0, 1e6, 10.0)  # the longest time in an epoch without a checkpoint
    weights: str | None = None  # a run's folder or a checkpoint: this run begins with its weights
    data: DataConfig = field(default_factory=DataConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    callbacks: dict[str, Any] = field(default_factory=dict)  # lightning callbacks by `_target_`
    logger: dict[str, Any] = field(default_factory=dict)  # loggers beside metrics.csv, by `_target_`


GATES: dict[GateKind, type[GateConfig]] = {
    GateKind.none: NoGateConfig,
    GateKind.cosine: CosineGateConfig,
    GateKind.controller: CosineGateConfig,
    GateKind.skipnet: SkipNetGateConfig,
    GateKind.aig: AigGateConfig,
    GateKind.constant: ConstantGateConfig,
    GateKind.random: RandomGateConfig,
}


def ranges(schema: type) -> dict[str, Range]:
    """Returns the ranges of a schema's keys."""
    return {f.name: f.metadata["range"] for f in dataclasses.fields(schema) if "range" in f.metadata}


store = ConfigStore.instance()
store.store(name="schema", node=Config)
for kind, schema in GATES.items():
    store.store(group="gate/schema", name=kind.name, node=schema)
