"""Every key of the other commands: its type, description, default and range."""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from cosinegate.config.choices import Checkpoint, Cost, Dynamic, Sampler
from cosinegate.config.identity import FIGURES
from cosinegate.config.ranges import (
    ANY_BATCHES,
    FOLDERS,
    PLAIN_NAME,
    POSITIVE,
    THREADS,
    Range,
    count,
    each,
    field_of,
    is_number,
    or_null,
)
from cosinegate.config.schema import Config

MOST_TRIALS = 10**6
PART_OF_ITS_FLOPS = "FLOPs over the network's own"


def key(about: str, default: Any = MISSING, allowed: Range | None = None) -> Any:
    """Returns a field with the description that `--help` prints."""
    return field_of(default, about=about, **({"range": allowed} if allowed else {}))


@dataclass
class TrainedConfig:
    """A trained network and its data."""

    run: str = key("a run's folder, a checkpoint file, or the folder of an export or of exits")
    checkpoint: Checkpoint | None = key(
        "best or last, where run is a folder; null: the one that the record's test accuracy is of", None
    )
    root: str | None = key("null: where the run had its data", None)
    data_folder: str | None = key("a folder that holds the original files of the data", None)
    threads: int | None = key("of torch; null: its own choice", None, or_null(THREADS))


@dataclass
class EvaluateConfig(TrainedConfig):
    json: bool = key("true: JSON on stdout instead of tables", False)
    accelerator: str = key("lightning's", "cpu")
    limit_batches: Any = key("of the test set", None, ANY_BATCHES)


@dataclass
class DeployConfig(TrainedConfig):
    """Where a command writes, and how it compiles gates."""

    output: str | None = key("", None)
    dynamic: Dynamic = key(
        "blocks that some images open: keep (exact), round (as most have it), predict (an MLP decides before F)",
        Dynamic.keep,
    )
    tolerance: float = key(
        "a block counts as closed, or open, for all where at most this fraction of the images disagrees",
        0.0,
        Range(lambda v: 0 <= v < 0.5, "at least 0 and below 0.5"),
    )
    images: int | None = key("", None, or_null(count()))


@dataclass
class ExitsConfig(DeployConfig):
    run: str = key("a finished run's folder, a checkpoint file, or an export's folder; gates are compiled first")
    output: str | None = key("null: runs/<name>_exits/<run>", None)
    budgets: list[float] | None = key(
        f"{PART_OF_ITS_FLOPS}, as in [0.7,0.6]; the first is what the written network has; null: three that the exits "
        "reach",
        None,
        or_null(each(POSITIVE)),
    )
    after: list[int] | None = key(
        "the blocks that have an exit after them, from 0; null: all of the last stage but the last",
        None,
        or_null(each(count(0))),
    )
    images: int | None = key(
        "of the training set to fit to; null: all, and mirrored ones where training mirrors", None, or_null(count())
    )


@dataclass
class ExportConfig(DeployConfig):
    output: str | None = key("null: export/ in the run's folder", None)
    budget: float | None = key(
        f"of exits: {PART_OF_ITS_FLOPS}; null: the budget that they were fitted with", None, or_null(POSITIVE)
    )
    images: int | None = key("of the test set to compare the forms on; null: all", None, or_null(count()))


@dataclass
class BenchmarkConfig(ExportConfig):
    output: str | None = key("null: benchmark/ in the run's folder", None)
    against: list[str] = key(
        "runs of dense networks to time beside it, such as a smaller one's: their records get a latency too", []
    )
    batches: list[int] = key("images of a batch", [1, 8, 64, 256], each(count()))
    rounds: int = key("of every model at every batch, in turn", 15, count())
    torch_compile: bool = key("time networks that take one route through torch.compile too, with a C++ compiler", True)
    images: int | None = key(
        "of the test set that FLOPs and accuracy are measured on; null: all", None, or_null(count())
    )
    threads: int = key("of one stream of images; several streams fill several cores", 1, THREADS)


@dataclass
class RunsConfig:
    """The runs to read: those below folders, or those of a sweep."""

    runs: Any = key("a folder or a list of folders; every run below them is read", ["runs"], FOLDERS)
    sweep: str | None = key("a sweep's name: its runs alone", None, or_null(PLAIN_NAME))
    runs_dir: str = key("where the sweep's runs are", "runs")


@dataclass
class ParetoConfig(RunsConfig):
    x: Cost = key(
        "counted (the paper's mean gate), executed; mflops and latency compare networks of any size", Cost.counted
    )
    reference: list[float] | None = key(
        "[cost, accuracy] for the hypervolume; null: 1.1 of the dense network's cost, and chance",
        None,
        or_null(Range(lambda v: len(v) == 2 and all(map(is_number, v)), "two numbers, [cost, accuracy]")),
    )
    output: str | None = key("the folder of figures and tables; null: figures/ in runs_dir", None)


@dataclass
class TableConfig(RunsConfig):
    sweep: str | None = key("whose runs are compared; null: those that `runs` names", "peers", or_null(PLAIN_NAME))
    path: str | None = key(
        "null: figures/<sweep>.md in runs_dir, of one folder figures/<folder>.md; the figure has its name",
        None,
        or_null(Range(lambda v: not v.endswith(".png"), "the table's name, as in peers.md: .png is the figure's")),
    )


@dataclass
class ReportConfig(RunsConfig):
    runs: Any = key("a run's folder, or a list of them", None, or_null(FOLDERS))
    path: str | None = key("null: report.html in the run's folder; of several runs, in figures/ of runs_dir", None)
    threads: int | None = key("of torch; null: its own choice", None, or_null(THREADS))
    limit_batches: Any = key("of the test set", None, ANY_BATCHES)


@dataclass
class DashboardConfig:
    project: str = key("of W&B", "cosinegate")
    entity: str | None = key("null: the account's own", None)


@dataclass
class TrainingSpeedConfig:
    output: str = key("the folder of the table", f"runs/{FIGURES}")
    name: str = key("the experiment with the gated network; beside it is resnet20", "conservative")
    threads: int = key("of torch", 2, THREADS)
    steps: int = key("of each network, in turn", 30, count())
    batches: int = key("training batches of the shortened epoch", 60, count())
    val_batches: int = key("validation batches of it", 2, count())
    rounds: int = key("epochs that are timed", 4, count())


@dataclass
class RangeConfig:
    key: str = MISSING  # of the training config
    low: float = MISSING
    high: float = MISSING
    log: bool = MISSING


@dataclass
class SearchOptions:
    study: str | None = key("a name; null: follows from what is searched", None, or_null(PLAIN_NAME))
    trials: int = key("finished ones; the same command goes on until there are as many", 20, count(1, MOST_TRIALS))
    sampler: Sampler = key("nsga2 or tpe", Sampler.nsga2)
    population: int = key("of a generation of nsga2", 10, count(2, MOST_TRIALS))
    cost: Cost = key(
        "what is minimised beside the error",
        Cost.counted,
        Range(lambda v: v in (Cost.counted, Cost.executed), "counted or executed FLOPs"),
    )
    space: dict[str, RangeConfig] = key("", MISSING, Range(lambda v: len(v) > 0, "at least one key to vary"))


@dataclass
class SearchConfig(Config):
    search: SearchOptions = field(default_factory=SearchOptions)


COMMANDS: dict[str, type] = {
    "benchmark": BenchmarkConfig,
    "dashboard": DashboardConfig,
    "evaluate": EvaluateConfig,
    "exits": ExitsConfig,
    "export": ExportConfig,
    "pareto": ParetoConfig,
    "report": ReportConfig,
    "table": TableConfig,
    "training_speed": TrainingSpeedConfig,
}

for name, schema in (COMMANDS | {"search": SearchConfig}).items():
    ConfigStore.instance().store(name=f"{name}_schema", node=schema)
