"""Statistics of the hard gates in evaluation: logged after every epoch, and summed over the test set."""

from typing import Any

import lightning.pytorch as L

from cosinegate.lit import LitCosineGate
from cosinegate.networks import Output
from cosinegate.networks.routing import RoutingMetric, RoutingSummary


def _metric(module: LitCosineGate) -> RoutingMetric:
    has_residual = [block.residual is not None for block in module.network.blocks]
    return RoutingMetric(module.network.num_classes, has_residual).to(module.device)


class TestRouting(L.Callback):
    """A callback whose `summary` is the routing of the last test."""

    __test__ = False  # for pytest, which takes the name for a test

    def __init__(self) -> None:
        self.summary: RoutingSummary | None = None

    def on_test_epoch_start(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        self.metric = _metric(pl_module)

    def on_test_batch_end(
        self, trainer: L.Trainer, pl_module: LitCosineGate, outputs: Output, batch: Any, *where: int
    ) -> None:
        self.metric.update(outputs, batch[1])

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        self.summary = self.metric.compute()


class GateStatistics(L.Callback):
    """A callback that logs each block's open fraction and CIR, dynamic blocks and paths of every validation."""

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        self.metric = _metric(pl_module)

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: LitCosineGate, outputs: Output, batch: Any, *where: int
    ) -> None:
        self.metric.update(outputs, batch[1])

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        summary = self.metric.compute()
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
