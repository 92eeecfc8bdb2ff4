"""Logs what the hard gates do in evaluation."""

from typing import Any

import lightning.pytorch as L

from cosinegate.lit import LitCosineGate
from cosinegate.networks import Output
from cosinegate.routing import RoutingMetric, RoutingSummary


class GateStatistics(L.Callback):
    """`summary` is what the last evaluation found."""

    def __init__(self) -> None:
        self.summary: RoutingSummary | None = None

    def setup(self, trainer: L.Trainer, pl_module: LitCosineGate, stage: str) -> None:
        head, blocks = pl_module.network.head, pl_module.network.blocks
        self.hard = RoutingMetric(head.out_features, len(blocks))

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        self.hard.to(pl_module.device).reset()

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: LitCosineGate, outputs: Output, batch: Any, *where: int
    ) -> None:
        self.hard.update(outputs, batch[1])

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        self.summary = summary = self.hard.compute()
        names = {
            "gates/skip_percent": summary.skip_percent,
            "gates/dynamic_blocks": float(summary.dynamic_blocks),
            "gates/paths": float(summary.paths),
            "flops/counted": summary.mean_gate,
        }
        names |= {f"gates/block_{i:02d}": value for i, value in enumerate(summary.open.tolist())}
        if summary.cir is not None:
            names |= {f"cir/block_{i:02d}": value for i, value in enumerate(summary.cir.tolist()) if value == value}
        pl_module.log_dict(names, sync_dist=True)
        pl_module.log("gates/mean", summary.mean_gate, prog_bar=True, sync_dist=True)

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        self.summary = self.hard.compute()
