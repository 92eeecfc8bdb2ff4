"""A run keeps two checkpoints: last.ckpt, from which it goes on, and best.ckpt, the best by validation accuracy."""

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint


def checkpoints(folder: Path) -> list[ModelCheckpoint]:
    """Both are written when an epoch is over; last.ckpt after best.ckpt, so that it knows of it.

    One ModelCheckpoint with `save_last` would not do: it writes last.ckpt only when there is a new best one.
    """
    common: dict[str, Any] = {"dirpath": folder / "checkpoints", "save_top_k": 1, "save_on_train_epoch_end": True}
    best = ModelCheckpoint(filename="best", monitor="val/acc", mode="max", enable_version_counter=False, **common)
    last = ModelCheckpoint(filename="last", enable_version_counter=False, **common)
    return [best, last]
