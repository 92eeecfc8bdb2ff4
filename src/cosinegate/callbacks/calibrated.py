"""Sets the thresholds of calibrated gates after every epoch, before it is validated and kept."""

from typing import Any

import lightning.pytorch as L

from cosinegate.calibration import Quantile, calibrate
from cosinegate.lit import LitCosineGate

IMAGES = 2048  # training images, as evaluation sees them: neither cropped nor mirrored


class Calibrated(L.Callback):
    """A cropped image has other statistics than a whole one: a training batch's quantile is no threshold for it."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LitCosineGate, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        gates = [block.gate for block in pl_module.network.blocks if block.gate is not None]
        if trainer.is_last_batch and gates and isinstance(gates[0].opening, Quantile):
            images = trainer.precision_plugin.convert_input(trainer.datamodule.whole_images("train", IMAGES)[0])
            with trainer.precision_plugin.val_step_context():
                calibrate(pl_module.network, gates[0].opening.budget.shares(), images)
