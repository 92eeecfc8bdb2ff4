"""Multi-objective search with optuna: the most accuracy for the least compute. Every trial is an ordinary run.

The study lies in SQLite beside the sweeps. A search that was stopped goes on with the trial it was in, tries failed
trials once more and then asks for new ones. No trial is pruned.
"""

import contextlib
import hashlib
import json
import os
import sqlite3
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import optuna
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState
from rich.console import Console
from rich.table import Table
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from cosinegate.cli import why_it_ended
from cosinegate.config.checks import check_one_of_several, is_number, validate
from cosinegate.config.choices import Cost, GateKind, Sampler, Validation
from cosinegate.config.identity import SWEEPS, identity, primitives, run_folder
from cosinegate.config.schema import is_plain_name
from cosinegate.data.folder import read_images
from cosinegate.runs.lock import locked
from cosinegate.runs.manifest import add_to_manifest, how_to_draw
from cosinegate.runs.record import Record, read_record
from cosinegate.runs.untrusted import first_line
from cosinegate.terminal.console import cell, clock, complain, percent, say
from cosinegate.terminal.errors import UserError
from cosinegate.train import train

MOST_TRIALS = 10**6


def search(config: DictConfig) -> None:
    """Trains until the study has as many finished trials as were asked for. Exit code 1 if one failed."""
    options = config.search
    _check(options, config.gate.kind)
    check_one_of_several(config)
    base = OmegaConf.masked_copy(config, [key for key in config if key != "search"])
    space = Space(options.space, base)
    asked = _fingerprint(base, options)
    base.sweep = options.study or f"search-{asked}"
    folder = Path(base.runs_dir) / SWEEPS / base.sweep
    _check_study(folder / "study.db")
    with locked(folder, wait=False), _using(folder / "study.db"):
        study = _open(folder / "study.db", base.sweep, asked)
        failures = _run_trials(study, space, base, options)
        _show(study, space, base)
    for line in failures:
        complain(f"error: {line}")
    if failures:
        sys.exit(1)


def _check(options: DictConfig, gate: GateKind) -> None:
    for key, least in (("trials", 1), ("population", 2)):
        if not least <= options[key] <= MOST_TRIALS:
            raise UserError(f"search.{key} = {options[key]}: must be at least {least} and at most {MOST_TRIALS}")
    if options.cost not in (Cost.counted, Cost.executed):
        raise UserError(f"search.cost = {options.cost.name}: a search's trials have counted or executed FLOPs")
    if gate is GateKind.none:
        raise UserError("gate.kind = none: a dense network has nothing to search for")
    if not options.space:
        raise UserError("search.space: has nothing to vary")
    if options.study is not None and not is_plain_name(options.study):
        raise UserError(f"search.study = {options.study}: must be a plain name, without a slash or a leading dot")


@dataclass
class Space:
    """What is varied, and between which values."""

    nodes: DictConfig
    base: DictConfig

    def __post_init__(self) -> None:
        self.distributions = {name: self._distribution(name) for name in self.nodes}
        for edge in ("low", "high"):
            try:
                validate(self.place({name: getattr(part, edge) for name, part in self.distributions.items()}))
            except UserError as error:
                raise UserError(f"search.space, at its {edge} edge: {error}") from error

    def _distribution(self, name: str) -> BaseDistribution:
        node = self.nodes[name]
        try:
            now = OmegaConf.select(self.base, node.key)
        except OmegaConfBaseException:  # not even the form of a key
            now = None
        if not isinstance(now, int | float) or isinstance(now, bool):
            raise UserError(f"search.space.{name}.key = {node.key}: not the key of a number")
        kind = IntDistribution if isinstance(now, int) else FloatDistribution
        try:
            return kind(type(now)(node.low), type(now)(node.high), log=node.log)
        except ValueError as error:
            raise UserError(f"search.space.{name}: {error}") from error

    def place(self, params: dict[str, Any]) -> DictConfig:
        """The config of a run at this place."""
        config = self.base.copy()
        for name, value in params.items():
            OmegaConf.update(config, self.nodes[name].key, value)
        return config


def _fingerprint(base: DictConfig, options: DictConfig) -> str:
    """What two searches share when their trials can lie in one study."""
    base = base.copy()
    read_images(base.data)
    content = [identity(base), base.seed, primitives(options)["space"], options.cost.name, options.sampler.name]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


def _check_study(path: Path) -> None:
    """Ends with one line, before anything is written, where another file lies in the study's place."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_file() or _first_bytes(path, 16) not in (b"", b"SQLite format 3\0"):
        raise UserError(f"{path} cannot be used: it is not a study; move it away or choose another search.study")


def _first_bytes(path: Path, number: int) -> bytes:
    with path.open("rb") as file:
        return file.read(number)


def _open(path: Path, name: str, asked: str) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # an address, sqlite:///<path>, would give ?, #, % and braces of the path a meaning
    storage = optuna.storages.RDBStorage("sqlite://", {"creator": lambda: sqlite3.connect(path), "poolclass": NullPool})
    study = optuna.create_study(
        storage=storage, study_name=name, directions=["maximize", "minimize"], load_if_exists=True
    )
    if study.user_attrs.setdefault("asked", asked) != asked:
        raise UserError(f"search.study = {name}: holds another search ({path}); choose another name")
    study.set_user_attr("asked", asked)
    return study


@contextlib.contextmanager
def _using(path: Path) -> Iterator[None]:
    """Makes one line of what the study's file refuses: a file that is damaged, a disk that is full."""
    try:
        yield
    except (optuna.exceptions.OptunaError, SQLAlchemyError, sqlite3.Error) as error:
        raise UserError(f"{path} cannot be used: {first_line(error.__cause__ or error)}") from error


def _sampler(options: DictConfig, seed: int) -> optuna.samplers.BaseSampler:
    if options.sampler is Sampler.tpe:
        return optuna.samplers.TPESampler(seed=seed)
    return optuna.samplers.NSGAIISampler(seed=seed, population_size=options.population)


def _run_trials(study: optuna.Study, space: Space, base: DictConfig, options: DictConfig) -> list[str]:
    """A line for each trial that failed."""
    stopped = []
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        if trial.params.keys() == space.distributions.keys():
            stopped.append(trial)
        else:  # stopped while its values were being chosen
            study.tell(trial.number, state=TrialState.FAIL)
    again = {trial.user_attrs.get("again") for trial in study.trials}
    for trial in study.get_trials(states=(TrialState.FAIL,)):
        if trial.number not in again and trial.params.keys() == space.distributions.keys():
            study.enqueue_trial(trial.params, user_attrs={"again": trial.number})
    finished = len(study.get_trials(states=(TrialState.COMPLETE,)))
    say(f"{base.sweep}: {finished} of {options.trials} trials finished before")
    failures, begin = [], time.monotonic()
    left = options.trials - finished
    for count in range(left):
        study.sampler = _sampler(options, base.seed + len(study.trials))  # a new one a trial: a restart changes nothing
        begins = "goes on" if stopped else "starts"
        trial = stopped.pop() if stopped else study.ask(space.distributions)
        words = " ".join(f"{name}={value:.4g}" for name, value in trial.params.items())
        name = f"trial {trial.number + 1}"
        each = (time.monotonic() - begin) / max(count, 1)
        pace = f"{clock(each * (left - count))} left" if count else "time left not known yet"
        say(f"{name} {begins}: {words}  [{finished} of {options.trials} finished, {pace}]")
        config = space.place(trial.params)
        try:
            record = train(config, name)
            accuracy, cost = _accuracy(record), _cost(record, options.cost)
        except Exception as error:
            study.tell(trial.number, state=TrialState.FAIL)
            failures.append(f"{name} ({words}): {why_it_ended(error, config)}")
            say(f"{name} failed")
            continue
        finished += 1
        study.tell(trial.number, [accuracy, cost])
        say(f"{name} finished with {percent(accuracy)}, {options.cost.name} {cost:.3f}")
    return failures


def _accuracy(record: Record) -> float:
    """On the images that the run validates on: never the test set, unless the config validates there."""
    return _figure(record, f"accuracy.{'best' if record.selected_on == Validation.holdout.name else 'last'}")


def _cost(record: Record, cost: Cost) -> float:
    """Of the same images and the same epoch, where the gates count."""
    if cost is Cost.counted and record.selected_on == Validation.holdout.name:
        return 1 - _figure(record, "accuracy.best_skip_percent") / 100
    return _figure(record, f"flops.{cost.name}")


def _figure(record: Record, key: str) -> float:
    value = attrgetter(key)(record)
    if not is_number(value):
        raise UserError(f"its record has no {key}")
    return value


def _folder(config: DictConfig) -> Path:
    read_images(config.data)
    return run_folder(config)


def _show(study: optuna.Study, space: Space, base: DictConfig) -> None:
    """The trials, best first; what was searched for, and beside it the test accuracy that was not."""
    trials = study.get_trials(states=(TrialState.COMPLETE,))
    if not trials:
        return
    folders = {trial.number: _folder(space.place(trial.params)) for trial in trials}
    add_to_manifest(base.sweep, base.runs_dir, list(folders.values()))
    best = {trial.number for trial in study.best_trials}
    table = Table(title=cell(base.sweep), title_justify="left", caption_justify="left")
    table.caption = "★ no other trial has more validation accuracy at no more cost"
    for name in ("", "trial", "validation", "cost", *space.distributions, "test"):
        table.add_column(cell(name), justify="right" if name else "left")
    for trial in sorted(trials, key=lambda trial: -trial.values[0]):
        values = (f"{trial.params[name]:.4g}" for name in space.distributions)
        record = read_record(folders[trial.number])
        test = percent(record.accuracy.test) if record else ""
        accuracy, cost = trial.values
        star = "★" if trial.number in best else ""
        table.add_row(star, str(trial.number + 1), percent(accuracy), f"{cost:.3f}", *values, test)
    Console(width=max(Console().width, 120)).print(table)
    say(how_to_draw(base.sweep, base.runs_dir))
