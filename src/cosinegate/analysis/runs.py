"""Reads run records and groups the runs that may be compared: one data set, network, number of epochs and validation.

Costs relative to the dense network compare runs of one network; absolute ones compare networks too.
"""

import functools
import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosinegate.config.identity import NOT_IDENTITY, leaves
from cosinegate.config.ranges import is_plain_name
from cosinegate.runs.record import Record, ended_early, read_record, require
from cosinegate.runs.untrusted import parse_yaml, read_text
from cosinegate.terminal.errors import UserError
from cosinegate.terminal.escape import printable

SYMBOLS = {
    "objective.tau_target": "τ",
    "objective.lambda_flops": "λ",
    "objective.lambda_cons": "λ_cons",
    "gate.gamma.init": "γ0",
    "gate.relaxation.temperature": "T",
}
COSTS: dict[str, Callable[[Record], float | None]] = {
    "counted": lambda record: record.flops.counted,
    "executed": lambda record: record.flops.compiled or record.flops.executed,
    "mflops": lambda record: _times(COSTS["executed"](record), record.flops.dense_per_image),
    "trained": lambda record: record.flops.executed,  # as trained, before anything is compiled
    "trained_mflops": lambda record: _times(record.flops.executed, record.flops.dense_per_image),
    "compiled": lambda record: record.flops.compiled,
    "compiled_mflops": lambda record: _times(record.flops.compiled, record.flops.dense_per_image),
    "latency": lambda record: record.latency_ms,
}
ABSOLUTE = ("mflops", "latency")
ALL_NETWORKS, UNKNOWN_NETWORK = "all-networks", "network-not-recorded"
Family = tuple[str, str, int | None, str]  # data set, network, epochs if known, what the epoch was chosen on


@dataclass(frozen=True)
class Run:
    """A finished run with the settings that it was trained with."""

    folder: Path
    record: Record
    settings: dict[str, Any]

    @property
    def accuracy(self) -> float:
        return self.record.accuracy.test

    @property
    def family(self) -> Family:
        record, settings = self.record, self.settings
        depth, width = settings.get("network.depth"), settings.get("network.width")
        built = UNKNOWN_NETWORK if depth is None else f"resnet{depth}-w{width}"
        network = record.network or (built if is_plain_name(built) else UNKNOWN_NETWORK)  # it names files
        epochs = record.epochs.done
        if record.weights is not None and epochs is not None:
            epochs += record.weights.epochs or 0
        epochs = (record.trunk and record.trunk.epochs) or epochs  # of the network, not of gates alone
        overfit = record.cut and record.cut.overfit_batches
        chosen_on = record.selected_on if overfit is None else f"{record.selected_on}-overfit-{overfit}"
        return record.data, network, epochs, chosen_on

    def cost(self, x: str) -> float | None:
        return COSTS[x](self.record)


def _times(part: float | None, dense_per_image: float | None) -> float | None:
    return None if None in (part, dense_per_image) else part * dense_per_image / 1e6


NEEDED = ("seed", "accuracy.test", "mean_gate", "flops.counted", "flops.executed", "dynamic_blocks", "paths")
NEEDED += ("experiment", "identity", "data", "gate", "selected_on", "blocks_open")
EPOCHS = ("epochs.planned", "epochs.done")  # exits of a checkpoint without its run have none


def read_run(folder: Path) -> Run | None:
    """Returns the run in a folder, or None if it is not finished. Raises UserError if it cannot be read."""
    record = read_record(folder)
    if record is None or record.status != "finished":
        return None
    require(record, folder / "record.json", *NEEDED, *(EPOCHS if record.exits is None else ()))
    return Run(folder, record, _settings(folder))


def find_runs(folders: Iterable[Path], complain: Callable[[str], None]) -> list[Run]:
    """Returns every finished run below the folders once. A run that cannot be read is skipped with a line."""
    runs: dict[tuple[str, int], Run] = {}
    unfinished = 0
    for folder in run_folders(folders):
        try:
            run = read_run(folder)
        except UserError as error:
            complain(f"skipped: {' '.join(str(error).split())}")
            continue
        if run is None:
            unfinished += 1
            continue
        same = runs.setdefault((run.record.identity, run.record.seed), run)
        if same is not run:
            complain(f"skipped: {run.folder} is the same run as {same.folder}")
    if unfinished:
        complain(f"skipped: {unfinished} runs that are not finished")
    return list(runs.values())


def run_folders(roots: Iterable[Path]) -> list[Path]:
    """Returns every folder below the roots that has a record.json, once, under its own name rather than a link's.

    Links are followed unless they lead to a parent folder.
    """
    seen: set[tuple[int, int]] = set()
    with_record, folders, links = [], list(roots), []
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        try:
            status = folder.stat()
            with os.scandir(folder) as entries:
                inside = list(entries)
        except OSError:  # of others, or gone by now
            continue
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        for entry in inside:
            path = folder / entry.name
            if entry.name == "record.json":
                with_record.append(folder)
            elif entry.is_dir(follow_symlinks=False):
                folders.append(path)
            elif entry.is_symlink() and path.is_dir() and not folder.resolve().is_relative_to(path.resolve()):
                links.append(path)
    return sorted(with_record)


def _settings(folder: Path) -> dict[str, Any]:
    """Returns the run's config with dotted keys, without keys that change no figure.

    It is parsed part by part and cached: thousands of runs have most parts of their configs in common.
    """
    path = folder / "config.yaml"
    try:
        text = read_text(path)
    except FileNotFoundError:
        return {}
    try:
        parts = [_flat(part) for part in re.split(r"^(?=[^\s#-])", text, flags=re.MULTILINE)]
    except UserError:  # not as we write it: then as a whole, or not at all
        try:
            parts = [_flat(text)]
        except UserError as error:
            raise UserError(f"{folder / error.args[0]}") from error
    return {key: value for part in parts for key, value in part.items()}


@functools.lru_cache(maxsize=4096)
def _flat(text: str) -> dict[str, Any]:
    apart = (*NOT_IDENTITY, "callbacks")
    content = parse_yaml(text, Path("config.yaml")) or {}
    if not isinstance(content, dict):
        raise UserError("config.yaml cannot be read: it is not a config")
    flat = leaves(content)
    return {k: v for k, v in flat.items() if not any(k == key or k.startswith(f"{key}.") for key in apart)}


@dataclass
class Configuration:
    """Runs that differ only in their seed."""

    runs: list[Run]
    label: str = ""
    on_frontier: bool = False

    def over_seeds(self, figure: Callable[[Run], float | None]) -> tuple[float, float | None]:
        """Returns the mean and, for two or more seeds, the standard deviation of a figure."""
        values = [value for run in self.runs if (value := figure(run)) is not None]
        mean = statistics.fmean(values)
        if len(values) == 1:
            return mean, None
        return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))

    def accuracy(self) -> tuple[float, float | None]:
        return self.over_seeds(lambda run: run.accuracy)

    def cost(self, x: str) -> tuple[float, float | None]:
        return self.over_seeds(lambda run: run.cost(x))

    @property
    def first(self) -> Record:
        return self.runs[0].record

    @property
    def is_dense(self) -> bool:
        return self.first.gate == "none"


def families(runs: list[Run], x: str) -> dict[Family, list[Configuration]]:
    """Returns the runs grouped by what may be compared, then by configuration, most accurate first, with labels."""
    sorted_runs: dict[Family, dict[str, list[Run]]] = {}
    for run in sorted(runs, key=lambda run: run.record.seed):
        data, network, epochs, chosen_on = run.family
        family = (data, ALL_NETWORKS if x in ABSOLUTE else network, epochs, chosen_on)
        sorted_runs.setdefault(family, {}).setdefault(run.record.identity, []).append(run)
    return {
        family: _labelled(list(by_identity.values())) for family, by_identity in sorted(sorted_runs.items(), key=_order)
    }


def _order(item: tuple[Family, Any]) -> tuple[str, str, int, str]:
    data, network, epochs, chosen_on = item[0]
    return data, network, -1 if epochs is None else epochs, chosen_on


def _labelled(groups: list[list[Run]]) -> list[Configuration]:
    settings = [group[0].settings for group in groups]
    known = set.intersection(*map(set, settings))  # what an older version did not know says nothing
    usual = {key: _usual([str(config[key]) for config in settings]) for key in sorted(known)}
    several = [len({name(group[0]) for group in groups}) > 1 for name in (_experiment, _network)]
    configurations = [Configuration(group, _label(group[0], usual, *several)) for group in groups]
    return sorted(configurations, key=lambda group: (-group.accuracy()[0], group.label))


def _usual(values: list[str]) -> str | None:
    """Returns the value that more than half of the configurations have; labels leave it out."""
    common, count = Counter(values).most_common(1)[0]
    return common if 2 * count > len(values) else None


def _experiment(run: Run) -> str:
    return run.record.experiment


def _network(run: Run) -> str:
    return run.family[1]


def _label(run: Run, usual: dict[str, str | None], experiments: bool, networks: bool) -> str:
    dense = run.record.gate == "none"
    shown = [key for key in usual if key in run.settings and str(run.settings[key]) != usual[key]]
    shown = [key for key in shown if not (dense and key.startswith(("gate.", "objective.")))]
    shown = [key for key in shown if not (networks and key.startswith("network."))]
    words = [_experiment(run)] if experiments else []
    words += [_network(run)] if networks else []
    words += ["dense"] if dense else []
    words += [f"{SYMBOLS.get(key, key)}={_short(run.settings[key])}" for key in shown if key != "gate.kind"]
    return printable(f"{' '.join(words) or f'{_experiment(run)} as it is'}{mark_early(run.record)}")


def mark_early(record: Record) -> str:
    """Returns what a table adds to the name of a run that ended early or was trained on a part of the images."""
    overfit = record.cut and record.cut.overfit_batches
    words = ended_early(record) or (overfit and f"trainer.overfit_batches={overfit}")
    return f" ({words})" if words else ""


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
