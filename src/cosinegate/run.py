"""Trains a run from its config, in its folder, from wherever it stopped."""

import contextlib
import fcntl
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf

from cosinegate import console
from cosinegate.build import build_module
from cosinegate.callbacks.console import EpochLine
from cosinegate.callbacks.flops import ExecutedFlops
from cosinegate.callbacks.gate_statistics import GateStatistics
from cosinegate.callbacks.run_record import RunRecord
from cosinegate.callbacks.schedule import Anneal, Reseed, Warmup
from cosinegate.choices import Validation
from cosinegate.config import identity, validate
from cosinegate.data.module import ImageData
from cosinegate.errors import UserError
from cosinegate.files import write_atomically
from cosinegate.loggers import MetricsCSV
from cosinegate.record import read_record


def run_folder(config: DictConfig) -> Path:
    """Where the run lives: what was asked for, or a folder that follows from what the run computes."""
    if config.run_dir is not None:
        return Path(config.run_dir)
    return Path(config.runs_dir) / config.name / f"{identity(config)}-s{config.seed}"


def train(config: DictConfig) -> dict[str, Any]:
    """Trains, evaluates with hard gates, and gives the run's record. A finished run is left as it is."""
    quiet()
    validate(config)
    _refuse_ddp_in_multirun(config)
    folder = run_folder(config)
    before = read_record(folder)
    facts = _facts(config)
    _refuse_foreign(folder, facts, before)
    if before is not None and before["status"] == "finished":
        console.say(f"this run is finished; nothing was done. To train it again, change seed or move {folder} away")
        console.show_record(before, folder)
        return before
    config.run_dir = str(folder)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    data = ImageData(config.data, config.seed)
    module = build_module(config)
    metrics = MetricsCSV(folder)
    statistics, executed = GateStatistics(), ExecutedFlops(data.image_set.shape)
    record = RunRecord(folder, metrics, facts, before)
    schedule = [Reseed(config.seed), Warmup(config.objective), Anneal(config.gate.relaxation)]
    trainer = build_trainer(config, [*schedule, statistics, executed, record, EpochLine()], metrics)
    data.prepare_data()
    with _locked(folder):
        record.start(trainer)
        write_atomically(folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True))
        last = folder / "checkpoints" / "last.ckpt"
        resumed = last if last.exists() else None
        console.say(f"{'resuming' if resumed else 'training'} {config.name} in {folder}")
        try:
            trainer.fit(module, datamodule=data, ckpt_path=resumed, weights_only=True)
        except SystemExit as error:  # what lightning makes of Ctrl-C
            raise KeyboardInterrupt from error
        holdout = config.data.validation is Validation.holdout
        best = folder / "checkpoints" / "best.ckpt"
        (tested,) = trainer.test(
            module, datamodule=data, ckpt_path=best if holdout else None, weights_only=True, verbose=False
        )
        summary = statistics.summary
        results = {
            "accuracy": {"test": tested["test/acc"], "test_of": "best" if holdout else "last"},
            "mean_gate": summary.mean_gate,
            "skip_percent": summary.skip_percent,
            "blocks_open": summary.open.tolist(),
            "dynamic_blocks": summary.dynamic_blocks,
            "paths": summary.paths,
            "flops": {
                "counted": summary.mean_gate,
                "executed": executed.executed,
                "dense_per_image": executed.dense,
            },
        }
        record.finish(trainer, results)
    if trainer.is_global_zero:
        console.show_record(record.record, folder)
    return record.record


def build_trainer(config: DictConfig, callbacks: list[L.Callback], metrics: MetricsCSV | None) -> L.Trainer:
    """Lightning's Trainer with our callbacks, the config's, and metrics.csv beside the config's loggers."""
    _check_precision(config.trainer.precision, config.trainer.accelerator)
    arguments = OmegaConf.to_container(config.trainer, resolve=True)
    try:
        extra = [instantiate(node) for node in config.callbacks.values() if node is not None]
        arguments["enable_progress_bar"] &= sys.stdout.isatty()  # elsewhere EpochLine prints a line an epoch
        if not arguments["enable_progress_bar"]:
            extra = [callback for callback in extra if not isinstance(callback, L.callbacks.ProgressBar)]
        loggers = [metrics] if metrics is not None else []
        loggers += [instantiate(node) for node in config.logger.values() if node is not None]
        return L.Trainer(**arguments, callbacks=callbacks + extra, logger=loggers or False, enable_checkpointing=None)
    except UserError:
        raise
    except (MisconfigurationException, ValueError, TypeError) as error:
        words = " ".join(str(error).split())
        raise UserError(f"trainer ({_described(config.trainer)}): {words}") from error
    except Exception as error:  # hydra's InstantiationException carries what the callback or logger said
        words = " ".join(str(error.__cause__ or error).split())
        raise UserError(f"callbacks or logger: {words}") from error


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
        "polarity": config.gate.polarity.name,
        "tau_target": config.objective.tau_target,
        "lambda_flops": config.objective.lambda_flops,
        "selected_on": config.data.validation.name,
    }


def _refuse_foreign(folder: Path, facts: dict[str, Any], before: dict[str, Any] | None) -> None:
    """A folder that was named by hand may hold something else: that is never written over."""
    if before is None and any((folder / name).exists() for name in ("config.yaml", "metrics.csv", "checkpoints")):
        raise UserError(f"run_dir = {folder}: holds files of a run but no record.json; choose another folder")
    if before is not None and any(before.get(key) != facts[key] for key in ("identity", "seed")):
        raise UserError(f"run_dir = {folder}: holds a run of another config; choose another folder")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process trains in a folder. The lock goes with the process, however it ends."""
    if int(os.environ.get("LOCAL_RANK", 0)) > 0:
        yield  # the process that started this one holds it
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise UserError(f"run_dir = {folder}: cannot be written: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"run_dir = {folder}: another process is training here") from error
        yield


def _refuse_ddp_in_multirun(config: DictConfig) -> None:
    several = config.trainer.devices not in (1, "1", "auto", [0])
    if several and HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN:
        raise UserError(f"trainer.devices = {config.trainer.devices}: a multirun trains every job on one device")


def _check_precision(precision: str, accelerator: str) -> None:
    """bf16 ends some virtual machines' processes with an illegal instruction: try it in a process that may die."""
    if not precision.startswith("bf16") or accelerator not in ("cpu", "auto") or torch.cuda.is_available():
        return
    probe = "import torch; x = torch.randn(8, 8, 8, 8).bfloat16(); torch.nn.Conv2d(8, 8, 3).bfloat16()(x)"
    if subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode != 0:
        raise UserError(f"trainer.precision = {precision}: this processor cannot run it; use 32-true")


def _described(trainer: DictConfig) -> str:
    return ", ".join(f"{key}={trainer[key]}" for key in ("accelerator", "devices", "strategy", "precision"))
