"""A line an epoch, above the progress bar or, in a log or a batch job, instead of it."""

import time

import lightning.pytorch as L


class EpochLine(L.Callback):
    """The figures of an epoch and the time that is left."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.begin = time.monotonic()
        self.first = trainer.current_epoch

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
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
