"""Fits calibrated gates and sets their thresholds after every epoch, before it is validated and kept."""

from typing import Any

import lightning.pytorch as L

from cosinegate.calibration import Quantile, calibrate
from cosinegate.gate_fit import fit
from cosinegate.lit import LitCosineGate
from cosinegate.skip_cost import running

IMAGES = 2048  # training images, as evaluation sees them: neither cropped nor mirrored


class Calibrated(L.Callback):
    """A cropped image has other statistics than a whole one: a training batch's quantile is no threshold for it.

    Gates are fitted to `fitted_to` whole images from the epoch on in which they begin to skip.
    """

    def __init__(self, fitted_to: int = 0) -> None:
        self.fitted_to = fitted_to

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LitCosineGate, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        gates = [block.gate for block in pl_module.network.blocks if block.gate is not None]
        if not (trainer.is_last_batch and gates and isinstance(gates[0].opening, Quantile)):
            return
        budget = gates[0].opening.budget
        images, target = trainer.datamodule.whole_images("train", max(IMAGES, self.fitted_to))
        images = trainer.precision_plugin.convert_input(images)
        with trainer.precision_plugin.val_step_context():
            if self.fitted_to and budget.prog > 0:
                places = running(pl_module.network, pl_module.places)
                fit(pl_module.network, places, images[: self.fitted_to], target[: self.fitted_to])
            calibrate(pl_module.network, budget.shares(), images[:IMAGES])
