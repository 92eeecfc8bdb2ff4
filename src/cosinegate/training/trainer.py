"""Makes lightning's Trainer from a config, and turns its complaints into one line."""

import contextlib
import difflib
import logging
import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as L
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from omegaconf import DictConfig, OmegaConf

from cosinegate.callbacks.checkpoints import AtomicCheckpoints
from cosinegate.callbacks.console import count_from_one
from cosinegate.callbacks.loggers import MetricsCSV
from cosinegate.data.module import ImageData
from cosinegate.hardware.sync_batchnorm import SyncBatchNormOnCPU
from cosinegate.terminal import console
from cosinegate.terminal.errors import UserError

PROFILERS = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
CLUSTER = ("MASTER_ADDR", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "LSB_JOBID")  # of the environment


def build_trainer(
    config: DictConfig, first: list[L.Callback], last: list[L.Callback], metrics: MetricsCSV | None
) -> L.Trainer:
    """Returns lightning's Trainer with the config's callbacks between `first` and `last`, and its loggers and
    metrics.csv.

    The callbacks in `last` keep what the config's callbacks log.
    """
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
        extra = _instances(config.callbacks, L.Callback)
        loggers = [metrics] if metrics is not None else []
        loggers += _instances(config.logger, L.loggers.Logger)
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
    plugins = [AtomicCheckpoints(), *([SyncBatchNormOnCPU()] if on_cpu else [])]
    arguments |= {"callbacks": [*first, *extra, *last], "logger": loggers or False, "plugins": plugins}
    # without a warning of few batches; BatchNorm sees the batch of all devices
    arguments |= {"num_sanity_val_steps": 0, "log_every_n_steps": 1, "sync_batchnorm": True}
    try:
        return L.Trainer(**arguments, enable_checkpointing=metrics is not None)
    except (MisconfigurationException, ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"trainer ({_described(config.trainer)}): {' '.join(str(error).split())}") from error


def _instances(nodes: DictConfig, kind: type) -> list[Any]:
    """Returns the objects that the nodes name by `_target_`; null leaves one out."""
    objects = {name: instantiate(node) for name, node in nodes.items() if node is not None}
    for name, instance in objects.items():
        if not isinstance(instance, kind):
            raise UserError(f"{name} = {nodes[name]}: is not a lightning {kind.__name__}")
    return list(objects.values())


@contextlib.contextmanager
def lightning_mistakes() -> Iterator[None]:
    """Raises UserError for arguments that lightning refuses only when it runs."""
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
    """Turns off lightning's tips and hardware lines, which the record has."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for words in ("Checkpoint directory .* exists", r"`isinstance\(treespec, LeafSpec\)` is deprecated"):
        warnings.filterwarnings("ignore", words)


def check_batches(config: DictConfig, trainer: L.Trainer, data: ImageData, job: str | None) -> None:
    """Raises UserError if the batches cannot be limited or divided as the config asks."""
    if trainer.world_size > 1 and job is not None:
        raise UserError(f"trainer.devices = {config.trainer.devices}: a multirun trains every job on one device")
    if config.data.batch_size % trainer.world_size:
        raise UserError(
            f"data.batch_size = {config.data.batch_size}: must divide by the {trainer.world_size} devices that share it"
        )
    for stage, number in data.batches(trainer.world_size).items():
        overfits = config.trainer.overfit_batches and stage != "test"
        key = "overfit_batches" if overfits else f"limit_{stage}_batches"
        check_limit(f"trainer.{key}", getattr(trainer, f"limit_{stage}_batches"), number)


def check_limit(key: str, limit: int | float | None, batches: int) -> None:
    """Raises UserError if a fraction of the batches is less than one."""
    if isinstance(limit, float) and int(batches * limit) == 0:
        least = math.ceil(1000 / batches) / 1000
        raise UserError(f"{key} = {limit:g}: there are {batches} batches; at least {least:g}, or a number of batches")


def _check_nodes(number: int) -> None:
    """Raises UserError if other nodes are missing: lightning would wait for them silently."""
    if number > 1 and not any(name in os.environ for name in CLUSTER):
        needed = "start it by torchrun or SLURM, or set MASTER_ADDR, MASTER_PORT and NODE_RANK on every node"
        raise UserError(f"trainer.num_nodes = {number}: {needed}")
    if number > 1:
        console.say(f"waiting for {number} nodes")


def _check_precision(precision: str, accelerator: str) -> None:
    """Raises UserError if bf16 fails here: some virtual machines end the process, so another process tries it."""
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
