"""A run keeps two checkpoints: last.ckpt, from which it goes on, and best.ckpt, the best by validation accuracy."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from cosinegate.calibration import Budget
from cosinegate.files import replacing


class AtomicCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it: a kill leaves the old file or the new one."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            torch.save(checkpoint, file)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Both files are written over, never removed: a path out of a checkpoint's state is nothing to delete."""


class BestCheckpoint(ModelCheckpoint):
    """The best epoch by validation accuracy. Calibrated gates on the way to their budget do not count: they compute
    more than they will be allowed to.
    """

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if all(part.prog >= 1 for part in pl_module.modules() if isinstance(part, Budget)):
            super().on_train_epoch_end(trainer, pl_module)


def checkpoints(folder: Path) -> list[ModelCheckpoint]:
    """Both are written when an epoch is over; last.ckpt after best.ckpt, so that it knows of it.

    One ModelCheckpoint with `save_last` would not do: it writes last.ckpt only when there is a new best one.
    """
    common: dict[str, Any] = {"dirpath": folder / "checkpoints", "save_top_k": 1, "save_on_train_epoch_end": True}
    best = BestCheckpoint(filename="best", monitor="val/acc", mode="max", enable_version_counter=False, **common)
    last = ModelCheckpoint(filename="last", enable_version_counter=False, **common)
    return [best, last]
