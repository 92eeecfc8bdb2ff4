"""Keeps last.ckpt, from which a run resumes, previous.ckpt, the one before it, and best.ckpt.

last.ckpt is written after every epoch, every few minutes inside a long one, and when the run is asked to stop. A run
that resumes from it ends with the same bits as one that never stopped.
"""

import io
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from cosinegate.callbacks.loggers import MetricsCSV
from cosinegate.runs.checksum import sealed
from cosinegate.runs.files import make_folder, replacing
from cosinegate.runs.record import accuracies
from cosinegate.terminal.errors import UserError
from cosinegate.terminal.signals import Stopped, StopRequest

LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"


class AtomicCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file and renames it: after a kill the file is the old one or the new one."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        path = Path(path)
        make_folder(path.parent)
        content = io.BytesIO()  # in memory first, where torch would hide what a full disk says
        torch.save(checkpoint, content)
        with replacing(path, kept_as=path.with_name(PREVIOUS) if path.name == LAST else None) as file:
            file.write(sealed(content.getvalue()))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes nothing: both files are written over, and a path from a checkpoint's state is not trusted."""


class Checkpoints(Checkpoint):
    """A callback that keeps last, previous and best. The best epoch is chosen from the rows of metrics.csv."""

    def __init__(
        self, *, folder: Path, metrics: MetricsCSV, stop: StopRequest, minutes: float, run_stamp: dict[str, Any]
    ) -> None:
        self.folder = folder / "checkpoints"
        self.metrics = metrics
        self.stop = stop
        self.seconds = 60 * minutes
        self.run_stamp = run_stamp

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.saved_at = time.monotonic()
        self.stop.listen()  # lightning has taken SIGTERM
        self.stop.patient = True

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        is_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        is_last = trainer.is_last_batch or trainer.should_stop
        if is_step and not is_last:  # after the last one the epoch's end or its validation saves
            self._look(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # a validation that starts again counts its batches again
        trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.reset()
        self._look(trainer)

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        # several processes may have a different number of batches: they cannot agree
        if trainer.world_size == 1:
            self._look(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        known = {number: row for number, row in self.metrics.rows.items() if number <= epoch}
        is_best = accuracies(known).get("best_epoch") == epoch
        if trainer.strategy.broadcast(is_best):
            self._save(trainer, BEST)
        self._save(trainer, LAST)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stop.patient = False
        if self.stop.signum is not None:
            raise Stopped(self.stop.signum)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.stop.patient = False

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stop.listen()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["run"] = self.run_stamp
        if trainer.validating:  # for lightning, in the middle of the first batch: there it goes back to validation
            begun = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
            progress = {"total": begun, "current": dict(begun), "is_last_batch": False}
            checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"] = progress

    def _look(self, trainer: L.Trainer) -> None:
        """Saves when it is time to, and ends the run if it was asked to stop. All processes act alike.

        Does nothing after a limit has ended training: lightning would not return to the validation that is left.
        """
        if trainer.should_stop:
            return
        due = trainer.is_global_zero and time.monotonic() - self.saved_at >= self.seconds
        request = torch.tensor([self.stop.signum or 0, due], device=trainer.strategy.root_device)
        if trainer.world_size > 1:
            torch.distributed.all_reduce(request, torch.distributed.ReduceOp.MAX)
        signum, due = request.tolist()
        if signum or due:
            self._save(trainer, LAST)
        if signum:
            raise Stopped(signum)

    def _save(self, trainer: L.Trainer, name: str) -> None:
        weights = trainer.lightning_module.parameters()
        if not all(bool(torch.isfinite(part).all()) for part in weights):
            raise UserError(f"weights are not finite in epoch {trainer.current_epoch + 1}: {name} was not written")
        trainer.save_checkpoint(self.folder / name)
        if name == LAST:
            self.saved_at = time.monotonic()
