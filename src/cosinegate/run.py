"""Trains a run from its config, in its folder, from wherever it stopped."""

import contextlib
import difflib
import errno
import logging
import math
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from cosinegate import console
from cosinegate.build import build_module
from cosinegate.callbacks.calibrated import Calibrated
from cosinegate.callbacks.checkpoints import LAST, PREVIOUS, AtomicCheckpoints, Checkpoints
from cosinegate.callbacks.compiled import CompiledNetwork
from cosinegate.callbacks.console import EpochLine, count_from_one
from cosinegate.callbacks.cut import Cut
from cosinegate.callbacks.epoch_sums import EpochSums
from cosinegate.callbacks.flops import ExecutedFlops
from cosinegate.callbacks.gate_statistics import GateStatistics
from cosinegate.callbacks.not_finite import NotFiniteState
from cosinegate.callbacks.prediction import PredictionStatistics
from cosinegate.callbacks.route_collector import RouteCollector
from cosinegate.callbacks.run_record import RunRecord
from cosinegate.callbacks.schedule import Anneal, Reseed, ShareOut, SwitchOver, Warmup
from cosinegate.callbacks.training_statistics import TrainingStatistics
from cosinegate.choices import Calibration, GateKind, Validation
from cosinegate.config import identity, run_folder, seconds, validate
from cosinegate.data.module import ImageData
from cosinegate.deploy.flops import dense_flops
from cosinegate.dynamic import routed_percent
from cosinegate.errors import UserError
from cosinegate.files import write_atomically
from cosinegate.lock import locked
from cosinegate.loggers import MetricsCSV, failing_quietly
from cosinegate.memory import keep_freed_memory
from cosinegate.record import Record, read_record
from cosinegate.resume import ResumePoint, best_checkpoint, find_resume_point
from cosinegate.routing import RoutingSummary
from cosinegate.run_dir import link_latest, own_record, remove_scraps, run_stamp
from cosinegate.schema import NetworkConfig
from cosinegate.stop import Stopped, StopRequest, taking_signals
from cosinegate.sync_batchnorm import SyncBatchNormOnCPU
from cosinegate.trunk import begin_with_weights, hold_trunk

PROFILERS = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
MOST_LOOKED_AT = 1000
HELD = r"Found \d+ module\(s\) in eval mode at the start of training"  # a trunk that is held is
CLUSTER = ("MASTER_ADDR", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "LSB_JOBID")  # of the environment
NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


def train(config: DictConfig, job: str | None = None) -> Record:
    """Trains, evaluates with hard gates, and gives the run's record. A finished run is left as it is.

    `job` says which of several jobs this is; then whoever started them shows the results.
    """
    quiet()
    keep_freed_memory()
    validate(config)
    if config.trainer.fast_dev_run:
        return _try_a_few_batches(config)
    folder, facts = run_folder(config), _facts(config)
    before = own_record(folder, config, facts)
    if _is_finished(before):
        return before if job else _say_finished(before, folder)
    config.run_dir = str(folder)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    _say_where_no_budget_is_asked_for(config)
    _say_how_long_a_trunk_is_held(config)
    if job is None and before is None:
        _say_where_another_schedule_is(config, folder)
    data = ImageData(config.data, config.seed, shuffle=not config.trainer.overfit_batches)
    module = build_module(config)
    if config.trunk is not None:
        facts["trunk"] = hold_trunk(module, config, _earlier("trunk", folder, before))
        warnings.filterwarnings("ignore", HELD)
    if config.weights is not None:
        facts["weights"] = begin_with_weights(module, config, _earlier("weights", folder, before))
    metrics = MetricsCSV(folder)
    dense = dense_flops(module.network, data.image_set.shape)
    statistics, executed, compiled = GateStatistics(), ExecutedFlops(dense), CompiledNetwork(dense)
    record = RunRecord(folder, metrics, facts)
    schedule = [Reseed(config.seed), ShareOut(), Warmup(config.objective), Anneal(config.gate.relaxation)]
    schedule += [SwitchOver(config.gate.predictor.switch_epoch)]
    limits = _limits(config.trainer)
    collector, sums, stop = RouteCollector(), EpochSums(), StopRequest()
    kept = [
        *limits,
        sums,
        Calibrated(config.gate.quantile.fit, config.objective.start_epoch),
        TrainingStatistics(sums),
        statistics,
        PredictionStatistics(sums),
        executed,
        compiled,
        collector,
        *watching_wandb(config, collector),
        record,
        NotFiniteState(folder),
        EpochLine(job),
        Checkpoints(folder, metrics, stop, config.save_minutes, run_stamp(config)),
    ]
    trainer = build_trainer(config, [*schedule, *kept], metrics)
    _check_devices(config, trainer, job)
    for stage, number in data.batches(trainer.world_size).items():  # now, not after training
        overfits = config.trainer.overfit_batches and stage != "test"
        key = "overfit_batches" if overfits else f"limit_{stage}_batches"
        check_limit(f"trainer.{key}", getattr(trainer, f"limit_{stage}_batches"), number)
    data.prepare_data()
    # the first process of several holds the folder; a job of a sweep may find an earlier one of the same sweep at work
    with (
        contextlib.nullcontext() if rank_zero_only.rank > 0 else locked(folder, wait=job is not None),
        taking_signals(stop),
        writing_in(folder),
    ):
        before = own_record(folder, config, facts)  # another process may have trained it while this one was starting
        if _is_finished(before):
            return before if job else _say_finished(before, folder)
        metrics.read()
        point = find_resume_point(folder, config, before, metrics.rows, module)
        if rank_zero_only.rank == 0:
            _clear(folder, point)
        metrics.rows = {epoch: row for epoch, row in metrics.rows.items() if epoch <= point.epochs}
        changed = record.start(trainer, before, point.epochs, point.inside)
        write_atomically(folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
        if rank_zero_only.rank == 0 and folder.parent == Path(config.runs_dir) / config.name:
            link_latest(folder)
        if job is None:
            console.say(f"{'resuming' if point.path else 'training'} {config.name} in {folder}")
        if changed:
            console.say(f"{folder}: from epoch {point.epochs + 1} on another program trains it: {changed}")
        try:
            with asked_too_much():
                trainer.fit(module, datamodule=data, ckpt_path=point.path, weights_only=True)
                held_out = config.data.validation is Validation.holdout
                chosen = best_checkpoint(folder, metrics.rows, module) if held_out else None
                record.record = record.record.replace(**_cut(config.trainer, limits))
                (tested,) = trainer.test(module, datamodule=data, ckpt_path=chosen, weights_only=True, verbose=False)
        except BaseException as error:
            _finish_wandb(exit_code=error.code if isinstance(error, Stopped) else 1)
            raise
        _finish_wandb(exit_code=0)
        accuracy = {"test": tested["test/acc"], "test_of": "best" if chosen else "last"}
        record.finish(trainer, accuracy, _gates_and_flops(statistics.summary, executed, compiled))
    if job is None:
        console.show_record(record.record, folder)
        for path in sorted(folder.glob("*-profile*.txt")):
            console.say(f"profile {path}")
    return record.record


def _limits(trainer: DictConfig) -> list[Cut]:
    """What ends training before its last epoch, where that was asked for."""
    if trainer.max_steps == -1 and trainer.max_time is None:
        return []
    return [Cut(trainer.max_steps, None if trainer.max_time is None else seconds(trainer.max_time))]


def _cut(trainer: DictConfig, limits: list[Cut]) -> dict[str, Any]:
    """For the record: the keys by which a run saw less than its epochs have."""
    keys = [limit.cut for limit in limits if limit.cut] + ["overfit_batches"] * (trainer.overfit_batches > 0)
    return {"cut": {key: trainer[key] for key in keys}} if keys else {}


def _try_a_few_batches(config: DictConfig) -> Record:
    """Trains, validates and tests a few batches through everything that a run goes through, in a folder that goes."""
    batches = int(config.trainer.fast_dev_run)
    short = {f"limit_{stage}_batches": batches for stage in ("train", "val", "test")}
    short |= {"fast_dev_run": False, "max_epochs": 1, "max_steps": -1, "overfit_batches": 0, "num_sanity_val_steps": 0}
    short |= {"check_val_every_n_epoch": 1, "profiler": None}
    with tempfile.TemporaryDirectory() as folder:
        tried = OmegaConf.merge(config, {"trainer": short, "run_dir": f"{folder}/run", "runs_dir": folder})
        tried.logger = {}
        record = train(tried, "fast_dev_run")
    what = "a batch" if batches == 1 else f"{batches} batches"
    console.say(f"fast_dev_run: {what} of training, validation and test went through; nothing is kept")
    return record


def watching_wandb(config: DictConfig, collector: RouteCollector) -> list[L.Callback]:
    """W&B takes seconds to import: only where it is asked for."""
    if config.logger.get("wandb") is None:
        return []
    from cosinegate.callbacks.wandb_media import WandbMedia

    return [WandbMedia(collector)]


def build_trainer(config: DictConfig, callbacks: list[L.Callback], metrics: MetricsCSV | None) -> L.Trainer:
    """Lightning's Trainer with our callbacks, the config's, and metrics.csv beside the config's loggers."""
    _check_precision(config.trainer.precision, config.trainer.accelerator)
    _check_nodes(config.trainer.num_nodes)
    arguments = OmegaConf.to_container(config.trainer, resolve=True)
    for key in ("max_steps", "max_time", "fast_dev_run"):  # ours end where the epoch is validated and kept
        del arguments[key]
    overfit, profiler = arguments.pop("overfit_batches"), arguments.pop("profiler")
    if overfit:  # the loader does not shuffle then
        arguments |= {"limit_train_batches": overfit, "limit_val_batches": overfit}
    if profiler is not None and metrics is not None:
        arguments["profiler"] = PROFILERS[profiler](dirpath=metrics.folder, filename="profile")
    torch.utils.deterministic.fill_uninitialized_memory = False  # deterministic algorithms without filling every buffer
    try:
        extra = _made(config.callbacks, L.Callback)
        loggers = [metrics] if metrics is not None else []
        loggers += _made(config.logger, L.loggers.Logger)
    except InstantiationException as error:
        cause = error.__cause__ or error
        raise UserError(f"callbacks or logger: {' '.join(str(cause).split())}") from error
    arguments["enable_progress_bar"] &= sys.stdout.isatty()  # a log gets EpochLine's lines alone
    if not arguments["enable_progress_bar"]:
        extra = [callback for callback in extra if not isinstance(callback, L.callbacks.ProgressBar)]
    for bar in extra:
        if isinstance(bar, L.callbacks.RichProgressBar):
            count_from_one(bar)
    on_cpu = _on_cpu(config.trainer.accelerator)
    plugins = [AtomicCheckpoints(), *([SyncBatchNormOnCPU()] if config.trainer.sync_batchnorm and on_cpu else [])]
    arguments |= {"callbacks": callbacks + extra, "logger": loggers or False, "plugins": plugins}
    try:
        return L.Trainer(**arguments, enable_checkpointing=metrics is not None)
    except (MisconfigurationException, ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"trainer ({_described(config.trainer)}): {' '.join(str(error).split())}") from error


def _made(nodes: DictConfig, kind: type) -> list[Any]:
    """What the nodes name by `_target_`; null leaves one out."""
    made = {name: instantiate(node) for name, node in nodes.items() if node is not None}
    for name, one in made.items():
        if not isinstance(one, kind):
            raise UserError(f"{name} = {nodes[name]}: is no lightning {kind.__name__}")
    return list(made.values())


@contextlib.contextmanager
def writing_in(folder: Path) -> Iterator[None]:
    """A disk that is full or read-only is answered with a line. What was written before is whole."""
    try:
        yield
    except OSError as error:
        if error.errno not in NOT_WRITTEN:
            raise
        words = "the earlier files are as they were; make room and start the same command again to go on"
        raise UserError(f"{folder}: cannot be written: {error.strerror}; {words}") from error


@contextlib.contextmanager
def asked_too_much() -> Iterator[None]:
    """What lightning finds wrong with its arguments only once it runs is a person's mistake all the same."""
    try:
        yield
    except MisconfigurationException as error:
        raise UserError(f"trainer: {' '.join(str(error).split())}") from error
    except RuntimeError as error:
        lacking = re.match(r"Early stopping conditioned on metric `(.+?)` which.*following: `(.*)`", str(error))
        if lacking is None:
            raise
        known = lacking[2].split("`, `")
        near = difflib.get_close_matches(lacking[1], known, n=1)
        hint = f", did you mean {near[0]}?" if near else ""
        raise UserError(f"EarlyStopping: monitor = {lacking[1]}: no such metric{hint} ({', '.join(known)})") from error


def quiet() -> None:
    """Lightning's tips and hardware lines say nothing that the record does not."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for words in ("Checkpoint directory .* exists", r"`isinstance\(treespec, LeafSpec\)` is deprecated"):
        warnings.filterwarnings("ignore", words)


def _facts(config: DictConfig) -> dict[str, Any]:
    return {
        "experiment": config.name,
        "identity": identity(config),
        "data": config.data.name.name,
        "seed": config.seed,
        "gate": config.gate.kind.name,
        "signal": config.gate.signal.name,
        "calibration": config.gate.calibration.name,
        "polarity": config.gate.polarity.name,
        "tau_target": config.objective.tau_target,
        "lambda_flops": config.objective.lambda_flops,
        "selected_on": config.data.validation.name,
        "network": network_name(config.network),
        "sweep": config.sweep,
    }


def network_name(network: NetworkConfig) -> str:
    """What a table calls the network."""
    if network.torchvision is not None:
        return f"torchvision-{network.torchvision}"
    size = network.depth if network.blocks is None else "-".join(map(str, network.blocks))
    width = network.width if network.widths is None else "-".join(map(str, network.widths))
    return f"resnet{size}-w{width}"


def _gates_and_flops(summary: RoutingSummary, executed: ExecutedFlops, compiled: CompiledNetwork) -> dict[str, Any]:
    flops = {"counted": summary.mean_gate, "executed": executed.executed, "dense_per_image": executed.dense}
    if compiled.found is not None:
        flops["compiled"] = compiled.found["executed"]
    return {
        "mean_gate": summary.mean_gate,
        "skip_percent": summary.skip_percent,
        "routed_percent": routed_percent(summary.open.tolist()),
        "blocks_open": summary.open.tolist(),
        "dynamic_blocks": summary.dynamic_blocks,
        "paths": summary.paths,
        "flops": flops,
    } | ({} if compiled.found is None else {"compiled": compiled.found})


def _earlier(key: str, folder: Path, before: Record | None) -> dict[str, Any] | None:
    """Whose weights a run that goes on was given, by its record: its own checkpoint has them by now."""
    goes_on = any((folder / "checkpoints" / name).exists() for name in (LAST, PREVIOUS))
    taken = getattr(before, key, None) if goes_on else None
    return None if taken is None else taken.as_dict()


def _clear(folder: Path, point: ResumePoint) -> None:
    """Puts away what earlier starts left: a damaged checkpoint, a traceback, half a file."""
    if point.last_is_damaged:
        last = folder / "checkpoints" / LAST
        console.say(f"{last} is damaged: going on from {PREVIOUS}, the one before it")
        last.replace(last.with_name("damaged.ckpt"))
    (folder / "traceback.txt").unlink(missing_ok=True)
    remove_scraps(folder)


def _is_finished(record: Record | None) -> bool:
    return record is not None and record.status == "finished"


def _say_where_no_budget_is_asked_for(config: DictConfig) -> None:
    """A schedule that was written for a longer run would leave calibrated gates as they begin, without a word."""
    asked, epochs = config.objective.start_epoch, config.trainer.max_epochs
    calibrated = config.gate.kind is not GateKind.none and config.gate.calibration is Calibration.quantile
    if calibrated and asked >= epochs:
        what = f"objective.start_epoch = {asked:g} and trainer.max_epochs = {epochs}"
        console.say(f"{what}: this run ends before its gates are asked for their budget")


def _say_how_long_a_trunk_is_held(config: DictConfig) -> None:
    """A schedule that was written for a network that learns too would run its epochs for gates alone."""
    waits = config.gate.calibration is Calibration.quantile and config.objective.start_epoch >= 1
    if config.trunk is not None and waits:
        what = f"gates alone learn for {config.trainer.max_epochs} epochs, and skip from objective.start_epoch = "
        hint = "trainer.max_epochs=1 objective.start_epoch=0 would do"
        console.say(f"trunk: {what}{config.objective.start_epoch:g} on; {hint}")


def _say_where_another_schedule_is(config: DictConfig, folder: Path) -> None:
    """Who asks for more epochs of a finished run would wait for a run that begins anew, without a word."""
    if config.weights is not None:
        return
    others = sorted(folder.parent.glob(f"*-s{config.seed}"))[:MOST_LOOKED_AT]
    planned = {record.epochs.planned for other in others if (record := _finished_record(other))}
    for epochs in planned - {config.trainer.max_epochs, None}:
        other = run_folder(OmegaConf.merge(config, {"run_dir": None, "trainer": {"max_epochs": epochs}}))
        if _finished_record(other):
            words = f"{config.trainer.max_epochs} are another schedule, hence another run, which begins anew"
            console.say(f"{other} is this run on {epochs} epochs; {words}, or with those weights by weights={other}")
            return


def _finished_record(folder: Path) -> Record | None:
    try:
        record = read_record(folder)
    except UserError:
        return None
    return record if _is_finished(record) else None


def _say_finished(record: Record, folder: Path) -> Record:
    console.say(f"this run is finished; nothing was done. To train it again, change seed or move {folder} away")
    console.show_record(record, folder)
    return record


def _finish_wandb(exit_code: int) -> None:
    """Ends W&B's run, or the next job of a multirun would go on in it."""
    if "wandb" in sys.modules:
        with failing_quietly():
            sys.modules["wandb"].finish(exit_code=exit_code)


def _check_devices(config: DictConfig, trainer: L.Trainer, job: str | None) -> None:
    if trainer.world_size > 1 and job is not None:
        raise UserError(f"trainer.devices = {config.trainer.devices}: a multirun trains every job on one device")
    if config.data.batch_size % trainer.world_size:
        raise UserError(
            f"data.batch_size = {config.data.batch_size}: must divide by the {trainer.world_size} devices that share it"
        )


def check_limit(key: str, limit: int | float | None, batches: int) -> None:
    """Ends with one line where a share of so many batches is not one of them."""
    if isinstance(limit, float) and int(batches * limit) == 0:
        least = math.ceil(1000 / batches) / 1000
        raise UserError(f"{key} = {limit:g}: there are {batches} batches; at least {least:g}, or a number of batches")


def _check_nodes(number: int) -> None:
    """Lightning would wait for the other nodes without end, and without a word."""
    if number > 1 and not any(name in os.environ for name in CLUSTER):
        needed = "start it by torchrun or SLURM, or set MASTER_ADDR, MASTER_PORT and NODE_RANK on every node"
        raise UserError(f"trainer.num_nodes = {number}: {needed}")
    if number > 1:
        console.say(f"waiting for {number} nodes")


def _check_precision(precision: str, accelerator: str) -> None:
    """bf16 ends some virtual machines' processes with an illegal instruction: try it in a process that may die."""
    if not (_on_cpu(accelerator) and precision.startswith(("bf16", "16"))):  # lightning runs 16-mixed as bf16 on a CPU
        return
    probe = (
        "import torch; x = torch.randn(8, 8, 8, 8).bfloat16(); torch.nn.Conv2d(8, 8, 3).bfloat16()(x).sum().backward()"
    )
    if subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode != 0:
        raise UserError(f"trainer.precision = {precision}: this processor cannot run it; use 32-true")


def _on_cpu(accelerator: str) -> bool:
    return accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())


def _described(trainer: DictConfig) -> str:
    return ", ".join(f"{key}={trainer[key]}" for key in ("accelerator", "devices", "strategy", "precision"))
