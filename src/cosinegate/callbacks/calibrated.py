"""Fits calibrated gates and sets their thresholds after every epoch, before it is validated and kept."""

import math
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from cosinegate.calibration import Quantile, calibrate
from cosinegate.data.module import ImageData
from cosinegate.gate_fit import fit
from cosinegate.gates import Gate
from cosinegate.lit import LitCosineGate

MOST = 16384  # images that thresholds are found from, whose maps are in memory all at once
IMAGES = 2048  # training images, as evaluation sees them: neither cropped nor mirrored


class Calibrated(L.Callback):
    """A cropped image has other statistics than a whole one: a training batch's quantile is no threshold for it.

    Gates are fitted to `fitted_to` whole images before they skip, in `start_epoch`, and after every later epoch.
    """

    def __init__(self, fitted_to: int, start_epoch: float) -> None:
        self.fitted_to, self.start_epoch = fitted_to, start_epoch

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LitCosineGate, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        gates = [block.gate for block in pl_module.network.blocks if block.gate is not None]
        is_last = trainer.is_last_batch or trainer.should_stop
        if not (is_last and gates and isinstance(gates[0].opening, Quantile)):
            return
        budget = gates[0].opening.budget
        fits = self.fitted_to > 0 and trainer.current_epoch + 1 >= math.floor(self.start_epoch)
        images, target = trainer.datamodule.whole_images("train", max(IMAGES, fits * self.fitted_to))
        images = trainer.precision_plugin.convert_input(images)
        with trainer.precision_plugin.val_step_context():
            if fits:
                never = budget.never_opened()
                places = [p for p in pl_module.places if not never[pl_module.network.blocks[p].gate.opening.place]]
                if places:
                    fit(pl_module.network, places, *self._fitted(images, target, trainer.datamodule, gates[0]))
            shares = budget.shares()
            if budget.by_chance:  # which is for training: evaluation computes what will be computed
                shares = [float(share > 0) for share in shares]
            calibrate(pl_module.network, shares, images[:MOST])

    def _fitted(self, images: Tensor, target: Tensor, data: ImageData, gate: Gate) -> tuple[Tensor, Tensor]:
        """Whole images; what classifiers of exits learn anew they learn of mirrored ones too, where training does."""
        images, target = images[: self.fitted_to], target[: self.fitted_to]
        if getattr(gate, "own", None) is None or not data.config.flip:
            return images, target
        return torch.cat((images, images.flip(3))), target.repeat(2)
