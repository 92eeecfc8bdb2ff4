"""Logs the means of a training epoch: loss terms, accuracy, and how open the relaxed gates were."""

from typing import Any

import lightning.pytorch as L

from cosinegate.callbacks.epoch_sums import EpochSums
from cosinegate.lit import LitCosineGate

TERMS = {"total": "loss"} | {term: f"loss_{term}" for term in ("ce", "cons", "flops")}


class TrainingStatistics(L.Callback):
    """A callback that averages over the batches of an epoch and over all processes."""

    def __init__(self, sums: EpochSums) -> None:
        self.sums = sums

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LitCosineGate, outputs: dict[str, Any], batch: Any, batch_idx: int
    ) -> None:
        losses, output, target = outputs["losses"], outputs["output"], batch[1]
        batch_size = trainer.train_dataloader.share(batch_idx).total
        for term in TERMS:
            self.sums.add(term, getattr(losses, term).double() * batch_size)
        self.sums.add("batches", batch_size)
        self.sums.add("images", len(target))
        self.sums.add("correct", (output.logits.argmax(1) == target).sum())
        if output.routing is not None:
            self.sums.add("gates", output.routing.gates.double().sum(0))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        batches, images = (self.sums.total(trainer, name) for name in ("batches", "images"))
        means = {f"train/{name}": self.sums.total(trainer, term) / batches for term, name in TERMS.items()}
        means["train/weighted_cons"] = pl_module.objective.lambda_cons * means["train/loss_cons"]
        means["train/weighted_flops"] = pl_module.objective.lambda_flops * means["train/loss_flops"]
        means["train/acc"] = self.sums.total(trainer, "correct") / images
        if "gates" in self.sums.sums:
            relaxed = self.sums.total(trainer, "gates") / images
            means |= {f"gates/relaxed_block_{i:02d}": value for i, value in enumerate(relaxed)}
            means["gates/relaxed_mean"] = relaxed.mean()
            pl_module.log("gates/target", pl_module.objective.tau_target, sync_dist=True)
        pl_module.log_dict({name: mean.float() for name, mean in means.items()}, sync_dist=True)
