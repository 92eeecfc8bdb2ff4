"""The schemas of the other entry points' configs. The values live in `conf/`."""

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from cosinegate.config.choices import Checkpoint, Cost, Dynamic, Sampler
from cosinegate.config.schema import Config


@dataclass
class RangeConfig:
    key: str = MISSING  # of the training config
    low: float = MISSING
    high: float = MISSING
    log: bool = MISSING


@dataclass
class SearchOptions:
    study: str | None = None
    trials: int = MISSING
    sampler: Sampler = MISSING
    population: int = MISSING
    cost: Cost = MISSING
    space: dict[str, RangeConfig] = MISSING


@dataclass
class SearchConfig(Config):
    search: SearchOptions = MISSING


@dataclass
class EvaluateConfig:
    run: str = MISSING
    checkpoint: Checkpoint | None = None
    json: bool = MISSING
    root: str | None = None
    data_folder: str | None = None
    accelerator: str = MISSING
    threads: int | None = None
    limit_batches: Any = None


@dataclass
class TrainingSpeedConfig:
    output: str = MISSING
    name: str = MISSING
    threads: int = MISSING
    steps: int = MISSING
    batches: int = MISSING
    val_batches: int = MISSING
    rounds: int = MISSING


@dataclass
class ParetoConfig:
    runs: Any = MISSING  # a folder or a list of them
    sweep: str | None = None
    runs_dir: str = MISSING
    x: Cost = MISSING
    reference: list[float] | None = None
    output: str = MISSING


@dataclass
class TableConfig:
    sweep: str | None = None
    runs: Any = MISSING  # a folder or a list of them
    runs_dir: str = MISSING
    path: str | None = None


@dataclass
class ReportConfig:
    runs: Any = None  # a folder or a list of them
    sweep: str | None = None
    runs_dir: str = MISSING
    path: str | None = None
    threads: int | None = None
    limit_batches: int | None = None


@dataclass
class DashboardConfig:
    project: str = MISSING
    entity: str | None = None


@dataclass
class ExportConfig:
    run: str = MISSING
    checkpoint: Checkpoint | None = None
    output: str | None = None
    budget: float | None = None
    dynamic: Dynamic = MISSING
    tolerance: float = MISSING
    images: int | None = None
    root: str | None = None
    data_folder: str | None = None
    threads: int | None = None


@dataclass
class ExitsConfig:
    run: str = MISSING
    checkpoint: Checkpoint | None = None
    output: str | None = None
    budgets: list[float] | None = None
    after: list[int] | None = None
    dynamic: Dynamic = MISSING
    tolerance: float = MISSING
    images: int | None = None
    root: str | None = None
    data_folder: str | None = None
    threads: int | None = None


@dataclass
class BenchmarkConfig:
    run: str = MISSING
    checkpoint: Checkpoint | None = None
    output: str | None = None
    against: list[str] = MISSING
    budget: float | None = None
    dynamic: Dynamic = MISSING
    tolerance: float = MISSING
    batches: list[int] = MISSING
    rounds: int = MISSING
    compile: bool = MISSING
    images: int | None = None
    root: str | None = None
    data_folder: str | None = None
    threads: int = MISSING


ConfigStore.instance().store(name="evaluate_schema", node=EvaluateConfig)
ConfigStore.instance().store(name="training_speed_schema", node=TrainingSpeedConfig)
ConfigStore.instance().store(name="search_schema", node=SearchConfig)
ConfigStore.instance().store(name="report_schema", node=ReportConfig)
ConfigStore.instance().store(name="dashboard_schema", node=DashboardConfig)
ConfigStore.instance().store(name="pareto_schema", node=ParetoConfig)
ConfigStore.instance().store(name="table_schema", node=TableConfig)
ConfigStore.instance().store(name="export_schema", node=ExportConfig)
ConfigStore.instance().store(name="exits_schema", node=ExitsConfig)
ConfigStore.instance().store(name="benchmark_schema", node=BenchmarkConfig)
