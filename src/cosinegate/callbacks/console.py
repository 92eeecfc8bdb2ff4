"""Prints a line for each epoch, above the progress bar, or instead of it in a log or a batch job."""

import time

import lightning.pytorch as L
from lightning.pytorch.callbacks import RichProgressBar

from cosinegate.terminal.console import clock


def count_from_one(bar: RichProgressBar) -> None:
    """Makes lightning's bar count epochs from 1. A class of our own in the config would change the run's identity."""

    def described(epoch: int) -> str:
        return f"Epoch {epoch + 1}/{bar.trainer.max_epochs}".ljust(len(bar.validation_description))

    bar._get_train_description = described


class EpochLine(L.Callback):
    """A callback that prints an epoch's figures and the time left. `job` names the job among several."""

    def __init__(self, job: str | None = None) -> None:
        self.prefix = f"{job}  " if job else ""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.begin = time.monotonic()
        self.first = trainer.current_epoch

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        done = trainer.current_epoch + 1
        epochs_left = 0 if trainer.should_stop else trainer.max_epochs - done
        left = (time.monotonic() - self.begin) / (done - self.first) * epochs_left
        known = trainer.callback_metrics
        shown = ("train/loss", "train/acc", "val/acc", "gates/mean", "gates/relaxed_mean", "flops/executed")
        figures = "  ".join(f"{name} {known[name].item():.4f}" for name in shown if name in known)
        print(f"{self.prefix}epoch {done}/{trainer.max_epochs}  {figures}  {clock(left)} left", flush=True)
