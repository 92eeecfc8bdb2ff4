"""Multi-objective search with optuna for the most accuracy at the least compute. Every trial is an ordinary run.

The study is kept in SQLite beside the sweeps. A search that was stopped resumes its trial, tries failed trials once
more and then asks for new ones. No trial is pruned.
"""

import contextlib
import hashlib
import json
import os
import sqlite3
import sys
import time
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import optuna
from omegaconf import DictConfig
from optuna.trial import TrialState
from rich.console import Console
from rich.table import Table
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from cosinegate.cli import why_it_ended
from cosinegate.config.choices import Cost, Sampler, Validation
from cosinegate.config.identity import SWEEPS, identity, primitives, run_folder
from cosinegate.config.ranges import is_number
from cosinegate.data.folder import read_images
from cosinegate.runs.lock import locked
from cosinegate.runs.manifest import add_to_manifest, how_to_draw
from cosinegate.runs.record import Record, read_record
from cosinegate.runs.untrusted import first_line
from cosinegate.sweeps.space import Space
from cosinegate.terminal.console import cell, clock, complain, percent, say
from cosinegate.terminal.errors import UserError
from cosinegate.train import train

FINGERPRINT = "asked"  # what studies call it


def search(config: DictConfig, space: Space) -> None:
    """Trains until the study has as many finished trials as the config asks for. Exits with code 1 if one failed."""
    options, base = config.search, space.base
    fingerprint = _fingerprint(base, options)
    base.sweep = options.study or f"search-{fingerprint}"
    folder = Path(base.runs_dir) / SWEEPS / base.sweep
    _check_study(folder / "study.db")
    with locked(folder, wait=False), _using(folder / "study.db"):
        study = _open(folder / "study.db", base.sweep, fingerprint)
        failures = _run_trials(study, space, base, options)
        _show(study, space, base)
    for line in failures:
        complain(f"error: {line}")
    if failures:
        sys.exit(1)


def _fingerprint(base: DictConfig, options: DictConfig) -> str:
    """Returns ten hex digits that two searches share if their trials can be in one study."""
    base = base.copy()
    read_images(base.data)
    content = [identity(base), base.seed, primitives(options)["space"], options.cost.name, options.sampler.name]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


def _check_study(path: Path) -> None:
    """Raises UserError if the study's path holds another kind of file."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_file() or _first_bytes(path, 16) not in (b"", b"SQLite format 3\0"):
        raise UserError(f"{path} cannot be used: it is not a study; move it away or choose another search.study")


def _first_bytes(path: Path, number: int) -> bytes:
    """Returns the beginning of a file."""
    with path.open("rb") as file:
        return file.read(number)


def _open(path: Path, name: str, fingerprint: str) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # an address, sqlite:///<path>, would give ?, #, % and braces of the path a meaning
    storage = optuna.storages.RDBStorage("sqlite://", {"creator": lambda: sqlite3.connect(path), "poolclass": NullPool})
    study = optuna.create_study(
        storage=storage, study_name=name, directions=["maximize", "minimize"], load_if_exists=True
    )
    if study.user_attrs.setdefault(FINGERPRINT, fingerprint) != fingerprint:
        raise UserError(f"search.study = {name}: holds another search ({path}); choose another name")
    study.set_user_attr(FINGERPRINT, fingerprint)
    return study


@contextlib.contextmanager
def _using(path: Path) -> Iterator[None]:
    """Raises UserError for errors of the study's file: damaged, or a full disk."""
    try:
        yield
    except (optuna.exceptions.OptunaError, SQLAlchemyError, sqlite3.Error) as error:
        raise UserError(f"{path} cannot be used: {first_line(error.__cause__ or error)}") from error


def _sampler(options: DictConfig, seed: int) -> optuna.samplers.BaseSampler:
    if options.sampler is Sampler.tpe:
        return optuna.samplers.TPESampler(seed=seed)
    return optuna.samplers.NSGAIISampler(seed=seed, population_size=options.population)


def _run_trials(study: optuna.Study, space: Space, base: DictConfig, options: DictConfig) -> list[str]:
    """Trains the trials, and returns a line for each that failed."""
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
        begins = "resumes" if stopped else "starts"
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
    """Returns the accuracy on validation images: the test set's only if the config validates there."""
    return _figure(record, f"accuracy.{'best' if record.selected_on == Validation.holdout.name else 'last'}")


def _cost(record: Record, cost: Cost) -> float:
    """Returns the cost on the same images and, for counted FLOPs, in the same epoch."""
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
    """Prints the trials, best first, with the test accuracy, which was not searched for."""
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
