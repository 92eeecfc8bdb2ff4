"""Callbacks that make a run fail, while the environment asks for it."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as L


class Fault(L.Callback):
    """Of several runs the one with this seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if os.environ.get("FAULT") and pl_module.hparams.seed == self.seed and trainer.current_epoch == 1:
            raise RuntimeError("a fault")


def fill(folder: Path) -> None:
    """The file system, to the last byte."""
    with (folder.parents[1] / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"0" * 4096):
            pass


def mount_read_only(folder: Path) -> None:
    for options in (["--bind", folder], ["-o", "remount,bind,ro"]):
        subprocess.run(["mount", *options, folder], check=True)


def lose_the_right(folder: Path) -> None:
    """root may write anywhere: become nobody."""
    for path in (folder, folder / "checkpoints"):
        path.chmod(0o555)
    if os.getuid() == 0:
        os.setuid(65534)


def no_file_above(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


FAULTS: dict[str, Callable[[Path], None]] = {
    "SIGTERM": lambda folder: os.kill(os.getpid(), signal.SIGTERM),
    "checkpoints do not fit": lambda folder: no_file_above(30_000),
    "records do not fit": lambda folder: no_file_above(1_000),
    "full": fill,
    "read-only": mount_read_only,
    "forbidden": lose_the_right,
    "removed": shutil.rmtree,
}


class Befalls(L.Callback):
    """What FAULT names, in the second step of the second epoch."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, step: int) -> None:
        if "FAULT" in os.environ and (trainer.current_epoch, step) == (1, 1):
            FAULTS[os.environ["FAULT"]](Path(trainer.logger.save_dir))
