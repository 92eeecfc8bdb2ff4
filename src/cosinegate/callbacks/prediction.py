"""Logs how well gates that decide before F know what F would have told them: R², and the share of equal decisions."""

from typing import Any

import lightning.pytorch as L
import torch

from cosinegate.callbacks.epoch_sums import EpochSums
from cosinegate.gates import PredictiveGate
from cosinegate.lit import LitCosineGate


class PredictionStatistics(L.Callback):
    """Over the batches of a training epoch, where F runs for every sample, or for none: then nothing is known of it."""

    def __init__(self, sums: EpochSums) -> None:
        self.sums = sums

    def setup(self, trainer: L.Trainer, pl_module: LitCosineGate, stage: str) -> None:
        blocks = pl_module.network.blocks
        self.places = [i for i, block in enumerate(blocks) if isinstance(block.gate, PredictiveGate)]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LitCosineGate, outputs: dict[str, Any], batch: Any, batch_idx: int
    ) -> None:
        if self.places:
            routing = outputs["output"].routing
            predicted, exact, agrees = (
                field[:, self.places].double() for field in (routing.cir, routing.exact, routing.agrees)
            )
            known = ~exact.isnan()
            terms = (known.double(), exact, exact.square(), (exact - predicted).square(), agrees)
            self.sums.add("prediction", torch.stack([term.where(known, 0.0).sum(0) for term in terms]))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        if not self.places:
            return
        count, total, squares, error, agrees = self.sums.total(trainer, "prediction")
        r2 = 1 - error / (squares - total.square() / count).clamp_min(1e-12)
        agreement = agrees / count
        known = count > 0
        names = {"predict/r2": r2[known].mean(), "predict/agreement": agreement[known].mean()}
        for k, place in enumerate(self.places):
            if not known[k]:
                continue
            names |= {f"predict/r2_block_{place:02d}": r2[k], f"predict/agreement_block_{place:02d}": agreement[k]}
        pl_module.log_dict({name: value.float() for name, value in names.items()}, sync_dist=True)
