"""Schedules: prog(t), learning rate, the gates' temperature and noise, the seed of a step, parts of a batch."""

from typing import Any

import lightning.pytorch as L
import torch

from cosinegate.config.schema import RelaxationConfig
from cosinegate.lit import LitCosineGate
from cosinegate.objective import prog
from cosinegate.relaxation import Relaxation, anneal


class Warmup(L.Callback):
    """A callback that gives the loss its warmup and t of prog(t) (Eq. 19): epochs, with `per_step` fractions too."""

    def __init__(self, warmup_epochs: float, per_step: bool) -> None:
        self.warmup_epochs, self.per_step = warmup_epochs, per_step

    def on_train_start(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        if trainer.fit_loop.restarted_mid_epoch:
            part = trainer.fit_loop.batch_idx / trainer.num_training_batches if self.per_step else 0
            self._set(pl_module, trainer.current_epoch + part)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        self._set(pl_module, trainer.current_epoch)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: LitCosineGate, batch: Any, batch_idx: int) -> None:
        if self.per_step:
            self._set(pl_module, trainer.current_epoch + batch_idx / trainer.num_training_batches)

    def _set(self, pl_module: LitCosineGate, t: float) -> None:
        pl_module.objective.warmup_epochs, pl_module.epoch = self.warmup_epochs, t

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        pl_module.log("schedule/prog", prog(pl_module.epoch, self.warmup_epochs), sync_dist=True)


class LearningRate(L.Callback):
    """A callback that logs the learning rate of the epoch: at its end the optimizer has the next one's."""

    def __init__(self) -> None:
        self.lr = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        self.lr = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        pl_module.log("schedule/lr", self.lr, sync_dist=True)

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self.lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.lr = state_dict["lr"]


class AtEpochStart(L.Callback):
    """A base for callbacks that also act at the start of an epoch when a run resumes inside it."""

    def on_train_start(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        if trainer.fit_loop.restarted_mid_epoch:
            self.on_train_epoch_start(trainer, pl_module)


class Anneal(AtEpochStart):
    """A callback that moves the gates' temperature over the run, and turns their noise off for its last part."""

    def __init__(self, config: RelaxationConfig | None) -> None:
        self.config = config  # None: no gate has a temperature

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        config = self.config
        if config is None:
            return
        progress = trainer.current_epoch / max(1, trainer.max_epochs - 1)  # 0 in the first epoch, 1 in the last
        for relaxation in _parts(pl_module, Relaxation):
            relaxation.temperature = anneal(config.annealing, config.temperature, config.temperature_end, progress)
            relaxation.noisy = trainer.current_epoch < config.noise_until * trainer.max_epochs

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        for relaxation in _parts(pl_module, Relaxation) if self.config is not None else ():
            pl_module.log("schedule/temperature", relaxation.temperature, sync_dist=True)


class Reseed(L.Callback):
    """A callback that seeds every step by (seed, epoch, step): a resumed run draws the same noise."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: LitCosineGate, batch: Any, batch_idx: int) -> None:
        step = (self.seed * 1_000_003 + trainer.current_epoch) * 1_000_003 + batch_idx
        torch.manual_seed(step % 2**63)


class ShareOut(L.Callback):
    """A callback that tells the loss and the gates which part of the global batch this process has."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: LitCosineGate, batch: Any, batch_idx: int) -> None:
        if trainer.world_size > 1:
            pl_module.objective.share = share = trainer.train_dataloader.share(batch_idx)
            for part in _parts(pl_module, Relaxation):
                part.share = share


def _parts(module: LitCosineGate, kind: Any) -> list[Any]:
    return [part for part in module.network.modules() if isinstance(part, kind)]
