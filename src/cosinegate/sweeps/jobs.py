"""A sweep: its jobs, those that are left to train, and how the chosen launcher trains them."""

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import joblib
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from cosinegate.cli import one_line
from cosinegate.config.checks import check_one_of_several, require_schema, validate
from cosinegate.config.identity import identity, run_folder
from cosinegate.data.folder import read_images
from cosinegate.runs.manifest import add_to_manifest, digest, how_to_draw
from cosinegate.runs.record import Record, read_record
from cosinegate.terminal.errors import UserError
from cosinegate.terminal.orphans import PATIENCE, end_with
from cosinegate.terminal.signals import Stopped, taking_signals

MOST_JOBS = 10_000


@dataclass
class Job:
    """A run of a sweep."""

    overrides: list[str]
    label: str  # what sets it apart from the others
    from_command: tuple[str, ...] = ()  # the part of the overrides that is the command line's
    number: int = 0  # from 1
    config: DictConfig | None = None  # none where it cannot be composed
    error: str | None = None  # why it did not finish

    @property
    def folder(self) -> Path:
        return run_folder(self.config)

    def record(self) -> Record | None:
        try:
            return read_record(self.folder)
        except UserError:
            return None  # the job itself says what is wrong with it

    def is_finished(self) -> bool:
        record = self.record()
        return record is not None and record.status == "finished"

    def epochs_done(self) -> int:
        record = self.record()
        return record.epochs.done if record else 0

    def epochs_left(self) -> int:
        return 0 if self.is_finished() else self.config.trainer.max_epochs - self.epochs_done()


def plan(
    loader: ConfigLoader, master: DictConfig, params: dict[str, Any], points: list[list[str]], arguments: list[str]
) -> list[Job]:
    """Returns every combination of the grid and of each point, with every combination of the command line's values.

    A key on the command line replaces the sweep's own. Jobs that would be the same run are one job.
    """
    parser = OverridesParser.create(config_loader=loader)
    command = parser.parse_overrides(arguments)
    given = {override.key_or_group for override in command}
    for override in command:
        if override.key_or_group == "sweeps" and override.is_sweep_override():
            raise UserError(f"{override.input_line}: one sweep at a time")
    if "sweeps" in given and not params and not points:
        raise UserError("the sweep has neither params nor points: an empty grid")
    grid = [_axes(parser, params)] if params or not points else []
    variants = []
    for axes in [*grid, *map(parser.parse_overrides, points)]:
        variants += itertools.product(*(_values(axis) for axis in axes if axis.key_or_group not in given))
    jobs = []
    for own in variants:
        for fixed in itertools.product(*map(_values, command)):
            swept = [value for value, override in zip(fixed, command, strict=True) if override.is_sweep_override()]
            label = " ".join([*own, *swept]) or "as it is"
            jobs.append(Job([*fixed, *own], label, from_command=fixed))
            if len(jobs) > MOST_JOBS:
                raise UserError(f"{label}: a sweep of more than {MOST_JOBS} jobs")
    for job in jobs:
        try:
            composed = loader.load_sweep_config(master, job.overrides)
            require_schema(composed.hydra, "hydra.")
            job.config = _task_config(composed)
            require_schema(job.config)
            validate(job.config)
            read_images(job.config.data)
            _check(job.config)
        except (HydraException, OmegaConfBaseException, UserError) as error:
            job.error = one_line(error)
    if jobs and all(job.error for job in jobs):
        alike = len({job.error for job in jobs}) == 1
        others = "" if alike else f" (nor can the other {len(jobs) - 1} of the {len(jobs)} jobs run)"
        raise UserError(jobs[0].error + others)
    jobs = _distinct(jobs)
    for number, job in enumerate(jobs, 1):
        job.number = number
    return jobs


def _axes(parser: OverridesParser, params: dict[str, Any]) -> list[Override]:
    for key, value in params.items():
        if isinstance(value, list):
            raise UserError(f"hydra.sweeper.params.{key}: write the values without brackets, as in {key}: 0.3,0.4")
        if value in (None, ""):
            raise UserError(f"hydra.sweeper.params.{key}: an empty grid")
    return parser.parse_overrides([f"{key}={value}" for key, value in params.items()])


def _values(override: Override) -> list[str]:
    """Returns the overrides that an override with several values stands for."""
    if not override.is_sweep_override():
        return [override.input_line]
    if not override.is_discrete_sweep():
        raise UserError(f"{override.input_line}: not a list of values; src/search.py searches in an interval")
    values = [f"{override.get_key_element()}={value}" for value in _few(override)]
    if not values:
        raise UserError(f"{override.input_line}: an empty grid")
    return values


def _few(override: Override) -> Iterator[str]:
    """Returns the values; of a range that is too long for a sweep, only as many as show that."""
    return itertools.islice(override.sweep_string_iterator(), MOST_JOBS + 1)


def _check(config: DictConfig) -> None:
    """Raises UserError for keys that a job of a sweep cannot have."""
    check_one_of_several(config)
    devices = config.trainer.devices  # what `auto` comes to the job itself finds out
    several = (isinstance(devices, int) and devices > 1) or (OmegaConf.is_list(devices) and len(devices) > 1)
    if several or config.trainer.num_nodes > 1:  # lightning's processes would each start the whole sweep again
        raise UserError(
            f"trainer.devices = {devices}: a multirun trains every job on one device; "
            "take trainer.devices=1, or start the runs one by one"
        )


def _task_config(config: DictConfig) -> DictConfig:
    with read_write(config), open_dict(config):
        del config["hydra"]
    return config


def _distinct(jobs: list[Job]) -> list[Job]:
    """Returns the jobs without those that are the same run as a single point or another job."""
    sound = [job for job in jobs if job.error is None]
    last = {(identity(job.config), job.config.seed, job.from_command): job for job in sound}
    last = {job.folder: job for job in last.values()}
    kept = {id(job) for job in last.values()}
    return [job for job in jobs if job.error is not None or id(job) in kept]


def run(jobs: list[Job], launcher: Launcher, launcher_config: DictConfig, dry_run: bool) -> None:
    """Trains the jobs that are not finished. Ends with a table, a line for each failure and, if any, exit code 1."""
    if dry_run:
        show_plan(jobs)
        return
    from cosinegate.analysis.runs import find_runs
    from cosinegate.analysis.tables import show_runs
    from cosinegate.sweeps.progress import Progress
    from cosinegate.terminal.console import complain, say

    sound = [job for job in jobs if job.error is None]
    left = [job for job in sound if not job.is_finished()]
    threads = _shared_threads(launcher_config, len(left))
    name = "multirun"
    if sound:
        runs_dir, folders = sound[0].config.runs_dir, [job.folder for job in sound]
        name = sound[0].config.sweep or f"multirun-{digest(folders, runs_dir)}"
        add_to_manifest(name, runs_dir, folders)
    before = len(sound) - len(left)
    say(f"{name}: {len(jobs)} jobs, {before} finished before, {len(left)} to train")
    for job in jobs:
        if job.error:
            say(f"job {job.number} of {len(jobs)} cannot run: {job.label}: {job.error}")
    if left:
        with Progress(jobs, left), taking_signals(_stop_workers):
            _launch(left, launcher, len(jobs), threads)
    finished = [job.folder for job in sound if job.is_finished()]
    show_runs(find_runs(finished, say))
    if finished:
        say(how_to_draw(name, runs_dir))
    failed = [job for job in jobs if job.error is not None]
    for job in failed:
        complain(f"error: job {job.number} of {len(jobs)} ({job.label}): {job.error}")
    if failed:
        sys.exit(1)


def show_plan(jobs: list[Job]) -> None:
    """Prints the jobs that would be trained."""
    for job in jobs:
        if job.error is not None:
            state = f"cannot run: {job.error}"
        else:
            state = "finished" if job.is_finished() else f"{job.epochs_left()} epochs left"
        print(f"job {job.number} of {len(jobs)}  {job.label}  ({state})")


def _launch(left: list[Job], launcher: Launcher, total: int, threads: int | None) -> None:
    """Trains the jobs, and starts the launcher again if it gives up.

    Some launchers give up on all jobs when one is killed. The launcher is started again while jobs get further, and
    after that for one job at a time.
    """
    from cosinegate.sweeps.progress import wait_until_nobody_trains
    from cosinegate.terminal.console import say

    if hasattr(launcher, "joblib"):  # a worker that has no job yet, or none any more, must end with this process too
        launcher.joblib |= {"initializer": end_with, "initargs": (os.getpid(),)}
    batches = [left]
    while batches:
        batch = batches.pop(0)
        reached = [job.epochs_done() for job in batch]
        try:
            returns = launcher.launch([[*job.overrides, *_for_a_job(job, total, threads)] for job in batch], 0)
        except Exception as error:
            wait_until_nobody_trains([job.folder for job in batch])
            words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            further = reached != [job.epochs_done() for job in batch]
            unfinished = [job for job in batch if not job.is_finished()]
            if len(batch) == 1 and not further:
                batch[0].error = f"the launcher gave up: {words}"
            elif unfinished:
                say(f"the launcher gave up ({words}): starting the {len(unfinished)} jobs that are left again")
                batches += [unfinished] if further else [[job] for job in unfinished]
            continue
        for job, result in zip(batch, returns, strict=True):
            if result.status is not JobStatus.COMPLETED:
                job.error = one_line(result._return_value)


def _stop_workers(signum: int, frame: FrameType | None) -> None:
    """Lets jobs in other processes save and end. A job in this process receives signals itself."""
    workers = multiprocessing.active_children()
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE
    while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    raise Stopped(signum)


def _for_a_job(job: Job, total: int, threads: int | None) -> list[str]:
    """Returns the overrides of every job beside its own; none changes what it computes."""
    words = [f"hydra.job.name='job {job.number} of {total}'", "trainer.enable_progress_bar=false"]
    return words if threads is None or job.config.threads is not None else [*words, f"threads={threads}"]


def _shared_threads(launcher: DictConfig, jobs: int) -> int | None:
    """Returns how many threads a job gets when several run side by side; None for one at a time."""
    if launcher.get("n_jobs") == 0:
        raise UserError("hydra.launcher.n_jobs = 0: must be a number of jobs, or -1 for as many as there are cores")
    if launcher.get("n_jobs") is not None:
        beside = joblib.effective_n_jobs(launcher.n_jobs)
    elif launcher.get("cpus_per_task") is not None:
        return launcher.cpus_per_task
    elif launcher._target_.endswith("LocalLauncher"):
        beside = jobs  # submitit starts them all at once
    else:
        return None
    return max(1, joblib.cpu_count() // max(1, min(beside, jobs)))
