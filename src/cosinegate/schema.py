"""The schema of a training config. The values themselves live in `conf/`, their ranges in `config.py`.

A key with a value here is younger than the others: a checkpoint that lacks it was written before, and meant this value.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from cosinegate.choices import (
    Annealing,
    Calibration,
    Classifier,
    Credit,
    Dataset,
    GateKind,
    Look,
    Measure,
    Polarity,
    Sharing,
    Shortcut,
    Sided,
    Signal,
    Target,
    Validation,
    Weighting,
)


@dataclass
class DataConfig:
    name: Dataset = MISSING
    root: str = MISSING  # where verified data is kept
    folder: str | None = None  # a folder that holds the original files; looked at first
    validation: Validation = MISSING
    holdout: int = MISSING  # training images kept for selection with validation: holdout
    batch_size: int = MISSING  # over all devices together
    eval_batch_size: int = MISSING
    drop_last: bool = MISSING
    crop_padding: int = MISSING  # 0: no random crop
    flip: bool = MISSING
    mean: list[float] = MISSING
    std: list[float] = MISSING


@dataclass
class NetworkConfig:
    depth: int = MISSING  # 6n+2
    blocks: list[int] | None = None  # of each stage; none: n in all three, as the depth says
    width: int = MISSING  # channels of the first stage
    widths: list[int] | None = None  # channels of each stage; none: width, twice and four times that
    shortcut: Shortcut = MISSING
    post_activation: bool = MISSING
    torchvision: str | None = None  # resnet18, resnet50, ...: torchvision's, and no other key of these is looked at


@dataclass
class GammaConfig:
    init: float = MISSING  # γ_0
    learnable: bool = MISSING


@dataclass
class ControllerConfig:
    enabled: bool = MISSING
    reduction: int = MISSING


@dataclass
class RelaxationConfig:
    hard: bool = MISSING  # straight-through
    temperature: float = MISSING
    temperature_end: float = MISSING  # for every annealing but none
    annealing: Annealing = MISSING
    noise_until: float = MISSING  # share of the run after which the noise is off


@dataclass
class PredictorConfig:
    look: Look = Look.block
    hidden: int = 16
    switch_epoch: float = 0.0  # before it, training decides by the exact measure


@dataclass
class QuantileConfig:
    sharing: Sharing = Sharing.block
    low: float = 0.15  # the least and the greatest share of a block, with sharing: network
    high: float = 0.95
    worth: list[float] | None = None  # of each gated block, with sharing: network; null: learned
    begin: list[float] | None = None  # share of each gated block before the budget is asked for; null: all open
    temperature: float = 0.5  # of the straight-through gradient, in standard deviations of the logit; credit: slope
    credit: Credit = Credit.slope
    fit: int = 0  # training images, to which gates are fitted between epochs, not by steps; not with credit: slope


@dataclass
class GateConfig:
    kind: GateKind = MISSING
    signal: Signal = Signal.exact
    measure: Measure = Measure.cir
    first_blocks: bool = True  # whether the first block of each stage has a gate
    exits: bool = False  # one policy, for the last stage alone: where an image leaves it
    exit_classifier: Classifier = Classifier.shared
    calibration: Calibration = Calibration.none
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    quantile: QuantileConfig = field(default_factory=QuantileConfig)
    polarity: Polarity = MISSING
    threshold: float = MISSING  # δ
    gamma: GammaConfig = MISSING
    controller: ControllerConfig = MISSING
    relaxation: RelaxationConfig = MISSING
    start: float | None = None  # how open a gate with a bias begins; null: as its layers are drawn
    hidden: int = 16  # units of a gate's own layer
    rate: float = 0.7  # of random gates; what the last block of stochastic depth keeps
    pattern: list[int] | None = None  # of fixed gates: 1 open, 0 closed, one for each gated block


@dataclass
class ReinforceConfig:
    """SkipNet's second stage: gates are sampled and learn by reward."""

    weight: float = 0.0  # of the reward's loss; 0: there is no such stage
    alpha: float = 0.1  # what skipping all blocks is worth, in units of cross-entropy
    start_epoch: float = 0.0


@dataclass
class ConsistencyConfig:
    detach_target: bool = MISSING


@dataclass
class ObjectiveConfig:
    lambda_flops: float = MISSING
    lambda_cons: float = MISSING
    tau_target: float = MISSING
    weighting: Weighting = MISSING
    sided: Sided = Sided.one
    target: Target = Target.network
    targets: list[float] | None = None  # of each gated block, with target: block; null: tau_target for all
    bounds: float = 0.0  # share of the run in which every block is kept near tau_target; 0: none is
    reinforce: ReinforceConfig = field(default_factory=ReinforceConfig)
    lambda_predict: float = 1.0  # of the predicted measure's squared error
    lambda_full: float = 0.0  # of what the network learns from its own full path
    lambda_exit: float = 1.0  # of what it would say where an image may leave, with gate.exits
    start_epoch: float = 0.0  # prog(t) is 0 until then
    warmup_epochs: float = MISSING  # T_warmup
    per_step: bool = MISSING  # t counts fractions of an epoch
    consistency: ConsistencyConfig = MISSING


@dataclass
class OptimizerConfig:
    lr: float = MISSING
    momentum: float = MISSING
    weight_decay: float = MISSING
    nesterov: bool = MISSING
    gate_lr: float = 1.0  # of the gates' parameters, as a multiple of lr
    decay_gates: bool = MISSING  # weight decay on the gates' parameters too


@dataclass
class TrainerConfig:
    """Arguments of lightning's Trainer, under their own names."""

    accelerator: str = MISSING
    devices: Any = MISSING  # a number, a list of device indices, or "auto"
    strategy: str = MISSING
    num_nodes: int = MISSING
    precision: str = MISSING
    max_epochs: int = MISSING
    max_steps: int = -1  # -1: as many as the epochs have
    max_time: str | None = None  # DD:HH:MM:SS of training, over all attempts of a run
    limit_train_batches: Any = None  # a share (float) or a number (int) of batches
    limit_val_batches: Any = None  # a share (float) or a number (int) of batches
    limit_test_batches: Any = None  # a share (float) or a number (int) of batches
    overfit_batches: Any = 0.0  # a share or a number of batches, the same in every epoch; 0: none
    fast_dev_run: Any = False  # true, or a number of batches: tries one epoch of them and keeps nothing
    check_val_every_n_epoch: int = MISSING
    num_sanity_val_steps: int = MISSING
    log_every_n_steps: int = MISSING
    gradient_clip_val: float | None = None
    accumulate_grad_batches: int = MISSING
    sync_batchnorm: bool = MISSING
    deterministic: bool = MISSING
    detect_anomaly: bool = MISSING
    profiler: str | None = None  # simple, advanced or pytorch: into the run's folder
    enable_progress_bar: bool = MISSING
    enable_model_summary: bool = MISSING


@dataclass
class Config:
    name: str = MISSING  # the experiment, and the folder of its runs
    seed: int = MISSING
    threads: int | None = None  # torch threads; none leaves torch's own choice
    runs_dir: str = MISSING
    run_dir: str | None = None  # none: runs_dir/name/<hash of the config>-s<seed>
    sweep: str | None = None  # the sweep that the run is a job of
    save_minutes: float = 10.0  # the longest time in an epoch without a checkpoint
    weights: str | None = None  # a run, or a checkpoint, whose weights this one begins with
    trunk: str | None = None  # a dense run, whose network this one's gates are given and leave as it is
    data: DataConfig = MISSING
    network: NetworkConfig = MISSING
    gate: GateConfig = MISSING
    objective: ObjectiveConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    trainer: TrainerConfig = MISSING
    callbacks: dict[str, Any] = MISSING  # lightning callbacks by `_target_`
    logger: dict[str, Any] = MISSING  # loggers beside metrics.csv, by `_target_`


ConfigStore.instance().store(name="schema", node=Config)
