"""A line an epoch where no progress bar can be drawn: in a log, a pipe or a batch job."""

import sys
import time

import lightning.pytorch as L


class EpochLine(L.Callback):
    """Prints nothing on a terminal, which has the progress bar."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.begin = time.monotonic()
        self.first = trainer.current_epoch

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if sys.stdout.isatty() or not trainer.is_global_zero:
            return
        done = trainer.current_epoch + 1
        left = (time.monotonic() - self.begin) / (done - self.first) * (trainer.max_epochs - done)
        known = trainer.callback_metrics
        shown = ("train/loss", "train/acc", "val/acc", "gates/mean", "gates/relaxed_mean", "flops/executed")
        figures = "  ".join(f"{name} {known[name].item():.4f}" for name in shown if name in known)
        print(f"epoch {done}/{trainer.max_epochs}  {figures}  {_clock(left)} left", flush=True)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
