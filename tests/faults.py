"""A callback that makes one run of several fail, while the environment asks for it."""

import os

import lightning.pytorch as L


class Fault(L.Callback):
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if os.environ.get("FAULT") and pl_module.hparams.seed == self.seed and trainer.current_epoch == 1:
            raise RuntimeError("a fault")
