"""Trains a run from its config, in its folder, from wherever it stopped."""

import contextlib
import errno
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from cosinegate import console
from cosinegate.build import build_module
from cosinegate.calibration import Budget
from cosinegate.callbacks.calibrated import Calibrated
from cosinegate.callbacks.checkpoints import BEST, LAST, PREVIOUS, AtomicCheckpoints, Checkpoints
from cosinegate.callbacks.console import EpochLine
from cosinegate.callbacks.epoch_sums import EpochSums
from cosinegate.callbacks.flops import ExecutedFlops
from cosinegate.callbacks.gate_statistics import GateStatistics
from cosinegate.callbacks.not_finite import NotFiniteState
from cosinegate.callbacks.prediction import PredictionStatistics
from cosinegate.callbacks.route_collector import RouteCollector
from cosinegate.callbacks.run_record import RunRecord
from cosinegate.callbacks.schedule import Anneal, Reseed, ShareOut, SwitchOver, Warmup
from cosinegate.callbacks.training_statistics import TrainingStatistics
from cosinegate.checkpoint import load_weights, read_checkpoint
from cosinegate.choices import Calibration, GateKind, Validation
from cosinegate.config import identity, run_folder, validate
from cosinegate.data.module import ImageData
from cosinegate.deploy.flops import dense_flops
from cosinegate.dynamic import routed_percent
from cosinegate.errors import UserError
from cosinegate.files import remove_parts, write_atomically
from cosinegate.lit import LitCosineGate
from cosinegate.lock import locked
from cosinegate.loggers import MetricsCSV, failing_quietly
from cosinegate.memory import keep_freed_memory
from cosinegate.record import Row, accuracies, read_record
from cosinegate.routing import RoutingSummary
from cosinegate.schema import NetworkConfig
from cosinegate.seal import is_intact
from cosinegate.stop import Stopped, StopRequest, taking_signals
from cosinegate.sync_batchnorm import SyncBatchNormOnCPU
from cosinegate.trunk import hold_trunk

HELD = r"Found \d+ module\(s\) in eval mode at the start of training"  # a trunk that is held is
NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


def train(config: DictConfig, job: str | None = None) -> dict[str, Any]:
    """Trains, evaluates with hard gates, and gives the run's record. A finished run is left as it is.

    `job` says which of several jobs this is; then whoever started them shows the results.
    """
    quiet()
    keep_freed_memory()
    validate(config)
    folder, facts = run_folder(config), _facts(config)
    before = _own_record(folder, facts)
    if _is_finished(before):
        return before if job else _say_finished(before, folder)
    config.run_dir = str(folder)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    _say_where_no_budget_is_asked_for(config)
    _say_how_long_a_trunk_is_held(config)
    data = ImageData(config.data, config.seed)
    module = build_module(config)
    if config.trunk is not None:
        facts["trunk"] = hold_trunk(module, config, _earlier_trunk(folder, before))
        warnings.filterwarnings("ignore", HELD)
    metrics = MetricsCSV(folder)
    statistics, executed = GateStatistics(), ExecutedFlops(dense_flops(module.network, data.image_set.shape))
    record = RunRecord(folder, metrics, facts)
    schedule = [Reseed(config.seed), ShareOut(), Warmup(config.objective), Anneal(config.gate.relaxation)]
    schedule += [SwitchOver(config.gate.predictor.switch_epoch)]
    collector, sums, stop = RouteCollector(), EpochSums(), StopRequest()
    kept = [
        sums,
        Calibrated(config.gate.quantile.fit, config.objective.start_epoch),
        TrainingStatistics(sums),
        statistics,
        PredictionStatistics(sums),
        executed,
        collector,
        *watching_wandb(config, collector),
        record,
        NotFiniteState(folder),
        EpochLine(job),
        Checkpoints(folder, metrics, stop, config.save_minutes),
    ]
    trainer = build_trainer(config, [*schedule, *kept], metrics)
    _check_devices(config, trainer, job)
    data.prepare_data()
    # the first process of several holds the folder; a job of a sweep may find an earlier one of the same sweep at work
    with (
        contextlib.nullcontext() if rank_zero_only.rank > 0 else locked(folder, wait=job is not None),
        taking_signals(stop),
        writing_in(folder),
    ):
        before = _own_record(folder, facts)  # another process may have trained it while this one was starting
        if _is_finished(before):
            return before if job else _say_finished(before, folder)
        (folder / "traceback.txt").unlink(missing_ok=True)  # of an earlier attempt
        if rank_zero_only.rank == 0:
            remove_parts(folder)
        metrics.read()
        record.start(trainer, before)
        write_atomically(folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
        best = folder / "checkpoints" / BEST
        resumed = _last_intact(folder / "checkpoints", module)
        if job is None:
            console.say(f"{'resuming' if resumed else 'training'} {config.name} in {folder}")
        try:
            with asked_too_much():
                trainer.fit(module, datamodule=data, ckpt_path=resumed, weights_only=True)
                held_out = config.data.validation is Validation.holdout
                chosen = _best_intact(best, metrics.rows, module) if held_out else None
                (tested,) = trainer.test(module, datamodule=data, ckpt_path=chosen, weights_only=True, verbose=False)
        except BaseException as error:
            _finish_wandb(exit_code=error.code if isinstance(error, Stopped) else 1)
            raise
        _finish_wandb(exit_code=0)
        accuracy = {"test": tested["test/acc"], "test_of": "best" if chosen else "last"}
        record.finish(trainer, accuracy, _gates_and_flops(statistics.summary, executed))
    if job is None:
        console.show_record(record.record, folder)
    return record.record


def watching_wandb(config: DictConfig, collector: RouteCollector) -> list[L.Callback]:
    """W&B takes seconds to import: only where it is asked for."""
    if config.logger.get("wandb") is None:
        return []
    from cosinegate.callbacks.wandb_media import WandbMedia

    return [WandbMedia(collector)]


def build_trainer(config: DictConfig, callbacks: list[L.Callback], metrics: MetricsCSV | None) -> L.Trainer:
    """Lightning's Trainer with our callbacks, the config's, and metrics.csv beside the config's loggers."""
    _check_precision(config.trainer.precision, config.trainer.accelerator)
    arguments = OmegaConf.to_container(config.trainer, resolve=True)
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


def _gates_and_flops(summary: RoutingSummary, executed: ExecutedFlops) -> dict[str, Any]:
    return {
        "mean_gate": summary.mean_gate,
        "skip_percent": summary.skip_percent,
        "routed_percent": routed_percent(summary.open.tolist()),
        "blocks_open": summary.open.tolist(),
        "dynamic_blocks": summary.dynamic_blocks,
        "paths": summary.paths,
        "flops": {"counted": summary.mean_gate, "executed": executed.executed, "dense_per_image": executed.dense},
    }


def _own_record(folder: Path, facts: dict[str, Any]) -> dict[str, Any] | None:
    """This run's record. A folder that was named by hand may hold something else: that is never written over."""
    before = read_record(folder)
    if before is None and any((folder / name).exists() for name in ("config.yaml", "metrics.csv", "checkpoints")):
        raise UserError(f"run_dir = {folder}: holds files of a run but no record.json; choose another folder")
    if before is not None and any(before.get(key) != facts[key] for key in ("identity", "seed")):
        raise UserError(f"run_dir = {folder}: holds a run of another config; choose another folder")
    return before


def _earlier_trunk(folder: Path, before: dict[str, Any] | None) -> dict[str, Any] | None:
    """What the record says of the trunk of a run that goes on: its own checkpoint has it, wherever the dense run is."""
    goes_on = any((folder / "checkpoints" / name).exists() for name in (LAST, PREVIOUS))
    return before.get("trunk") if before is not None and goes_on else None


def _last_intact(folder: Path, module: LitCosineGate) -> Path | None:
    """The checkpoint to go on from. A damaged one is put aside, and the one before it is taken."""
    last, previous = folder / LAST, folder / PREVIOUS
    if last.exists() and not is_intact(last):
        if not (previous.exists() and is_intact(previous)):
            raise UserError(f"{last} is damaged and there is no earlier one; move the run's folder away to train again")
        console.say(f"{last} is damaged: going on from {PREVIOUS}, the one before it")
        if rank_zero_only.rank == 0:
            last.replace(last.with_name("damaged.ckpt"))
    found = next((path for path in (last, previous) if path.exists()), None)
    if found is not None:
        load_weights(module, read_checkpoint(found), found)  # what is something else is answered with a line
    return found


def _best_intact(best: Path, rows: dict[int, Row], module: LitCosineGate) -> Path | None:
    """The checkpoint that is tested. A run that ends before its gates are at their budget has none."""
    budgeted = any(isinstance(part, Budget) for part in module.modules())
    epoch = accuracies(rows, budgeted).get("best_epoch")
    if epoch is None or (budgeted and rows[epoch].get("schedule/prog", 1.0) < 1):
        return None
    if not best.exists() or not is_intact(best):
        what = f"is {'damaged' if best.exists() else 'gone'}, and epoch {epoch} is the one to test"
        raise UserError(f"{best} {what}; move the run's folder away to train again")
    load_weights(module, read_checkpoint(best), best)
    return best


def _is_finished(record: dict[str, Any] | None) -> bool:
    return record is not None and record["status"] == "finished"


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


def _say_finished(record: dict[str, Any], folder: Path) -> dict[str, Any]:
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
