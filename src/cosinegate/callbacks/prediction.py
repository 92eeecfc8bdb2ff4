"""Logs how well gates that decide before F know what F would have told them: R², and the share of equal decisions."""

from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from cosinegate.callbacks.epoch_sums import EpochSums
from cosinegate.gate_fit import at_exits
from cosinegate.gates import PredictiveGate
from cosinegate.lit import LitCosineGate
from cosinegate.networks import ResNet

IMAGES = 2048  # training images, as evaluation sees them, that exits are asked about


class PredictionStatistics(L.Callback):
    """Over the batches of a training epoch, where F runs for every sample, or for none: then nothing is known of it.

    Of exits, which are fitted after the epoch's last batch and let nobody go in training, over whole training images
    by the thresholds that evaluation has.
    """

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
            self.sums.add("prediction", _terms(predicted, exact, agrees))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        if not self.places:
            return
        if pl_module.network.blocks[self.places[0]].leaves:
            sums = self._of_exits(trainer, pl_module.network)
        else:
            sums = self.sums.total(trainer, "prediction")
        count, total, squares, error, agrees = sums
        r2 = 1 - error / (squares - total.square() / count).clamp_min(1e-12)
        agreement = agrees / count
        known = count > 0
        names = {"predict/r2": r2[known].mean(), "predict/agreement": agreement[known].mean()}
        for k, place in enumerate(self.places):
            if not known[k]:
                continue
            names |= {f"predict/r2_block_{place:02d}": r2[k], f"predict/agreement_block_{place:02d}": agreement[k]}
        pl_module.log_dict({name: value.float() for name, value in names.items()}, sync_dist=True)

    def _of_exits(self, trainer: L.Trainer, network: ResNet) -> Tensor:
        images = trainer.precision_plugin.convert_input(trainer.datamodule.whole_images("train", IMAGES)[0])
        was_training = network.training
        network.eval()
        with trainer.precision_plugin.val_step_context():
            at = at_exits(network, self.places, images)
            gates = [network.blocks[place].gate for place in self.places]
            told = [gate.foretold(*shown) for gate, *shown in zip(gates, at.statistics, at.exact, strict=True)]
        network.train(was_training)
        predicted, agrees = (torch.stack(parts, dim=1).double() for parts in zip(*told, strict=True))
        return _terms(predicted, at.exact.T.double(), agrees)


def _terms(predicted: Tensor, exact: Tensor, agrees: Tensor) -> Tensor:
    """Sums over samples (B, E) whose exact measure is known, that R² and agreement follow from: (5, E)."""
    known = ~exact.isnan()
    terms = (known.double(), exact, exact.square(), (exact - predicted).square(), agrees)
    return torch.stack([term.where(known, 0.0).sum(0) for term in terms])
