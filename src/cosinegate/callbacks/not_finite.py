"""Writes not_finite.pt, with what is needed to examine a loss that is not finite, into the run's folder."""

import io
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from cosinegate.lit import LitCosineGate
from cosinegate.runs.files import replacing
from cosinegate.terminal.errors import NotFinite


class NotFiniteState(L.Callback):
    """A callback that keeps the state before a step whose loss is not finite.

    Weights and optimizer have not moved by then. What the forward pass moves, such as BatchNorm's moments, is copied
    before every step.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "not_finite.pt"
        self.buffers: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: LitCosineGate, batch: Any, batch_idx: int) -> None:
        self.batch_idx = batch_idx
        self.buffers = {name: buffer.clone() for name, buffer in pl_module.named_buffers()}

    def on_exception(self, trainer: L.Trainer, pl_module: LitCosineGate, exception: BaseException) -> None:
        if not (isinstance(exception, NotFinite) and trainer.is_global_zero):
            return
        weights = pl_module.state_dict()
        content = io.BytesIO()
        kept = {
            "epoch": trainer.current_epoch,  # from 0, as the checkpoints count
            "step": self.batch_idx,
            "images": trainer.datamodule.of_training_set(trainer.train_dataloader.images_of(self.batch_idx)),
            "losses": exception.terms,
            "state_dict": weights | {name: old for name, old in self.buffers.items() if name in weights},
            "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "hyper_parameters": dict(pl_module.hparams),
        }
        torch.save(kept, content)
        with replacing(self.path) as file:
            file.write(content.getvalue())
