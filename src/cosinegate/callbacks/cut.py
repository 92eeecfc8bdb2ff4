"""Ends training after a number of steps or a time. The state by then is validated, kept and tested."""

import time
from typing import Any

import lightning.pytorch as L


class Cut(L.Callback):
    """A callback whose `cut` is the limit that ended training, if one did. Time counts over all attempts of a run."""

    def __init__(self, max_steps: int, max_seconds: float | None) -> None:
        self.max_steps, self.max_seconds = max_steps, max_seconds
        self.seconds_before = 0.0
        self.cut: str | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.begin = time.monotonic()
        self._look(trainer)  # it may have been stopped after its last step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._look(trainer)

    def _look(self, trainer: L.Trainer) -> None:
        late = self.max_seconds is not None and trainer.strategy.reduce_boolean_decision(
            self._seconds() >= self.max_seconds, all=False
        )
        if not (late or self.cut or 0 < self.max_steps <= trainer.global_step):
            return
        trainer.should_stop = True
        trainer.check_val_every_n_epoch = 1  # whichever epoch it is, it is the last
        if not (trainer.is_last_batch and trainer.current_epoch + 1 >= trainer.max_epochs):
            self.cut = self.cut or ("max_time" if late else "max_steps")

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.begin

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self._seconds(), "cut": self.cut}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds_before, self.cut = state_dict["seconds"], state_dict["cut"]
