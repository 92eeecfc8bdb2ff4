"""Measures the FLOPs that every evaluation executes, beside the mean gate that the paper counts."""

from typing import Any

import lightning.pytorch as L
import torch
from torch.utils.flop_counter import FlopCounterMode

from cosinegate.lit import LitCosineGate


class ExecutedFlops(L.Callback):
    """A callback whose `executed` is the FLOPs of the last evaluation over `dense`, those without gates."""

    def __init__(self, dense: int) -> None:
        self.dense = dense
        self.executed: float | None = None
        self.counter: FlopCounterMode | None = None  # while a batch is evaluated

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        self.images = 0
        self.flops = 0

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: LitCosineGate, batch: Any, *where: int) -> None:
        self.images += len(batch[1])
        self.counter = FlopCounterMode(display=False)
        self.counter.__enter__()

    on_test_batch_start = on_validation_batch_start

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: LitCosineGate, outputs: Any, batch: Any, *where: int
    ) -> None:
        self.counter.__exit__(None, None, None)
        self.flops += self.counter.get_total_flops()
        self.counter = None

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        self._finish(trainer, pl_module)
        pl_module.log("flops/executed", self.executed, sync_dist=True)

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        self._finish(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: LitCosineGate, exception: BaseException) -> None:
        if self.counter is not None:
            self.counter.__exit__(None, None, None)

    def _finish(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        counts = torch.tensor([self.flops, self.images], dtype=torch.float64, device=pl_module.device)
        flops, images = trainer.strategy.reduce(counts, reduce_op="sum").tolist()  # over all processes
        self.executed = flops / (images * self.dense)
