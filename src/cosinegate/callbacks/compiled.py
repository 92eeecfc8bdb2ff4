"""Measures at the end of a run what compiling its gates would leave of the network."""

from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from cosinegate.lit import LitCosineGate
from cosinegate.networks import Output
from cosinegate.networks.compile import compile_gates
from cosinegate.networks.flops import counting


class CompiledNetwork(L.Callback):
    """A callback that compiles a copy of the network after a test; `figures` is what the record says of it.

    The cost is one more pass over the test set, and one over the held-out images for the gates.
    """

    def __init__(self, dense: int) -> None:
        self.dense = dense  # FLOPs without gates for an image
        self.figures: dict[str, float | int] | None = None

    def on_test_epoch_start(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        self.classes: list[Tensor] = []

    def on_test_batch_end(
        self, trainer: L.Trainer, pl_module: LitCosineGate, outputs: Output, batch: Any, *where: int
    ) -> None:
        self.classes.append(outputs.logits.argmax(1))

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        if not pl_module.network.has_gates:
            return
        data = trainer.datamodule
        with trainer.precision_plugin.forward_context():
            compiled, changes = compile_gates(pl_module.network, data.held_out()[0])
            like, same, number = next(compiled.parameters()), 0, 0
            with counting() as counter:
                for (images, _), classes in zip(data.test_dataloader(), self.classes, strict=False):
                    scores = compiled(images.to(like)).logits
                    same, number = same + int((scores.argmax(1) == classes).sum()), number + len(classes)
        counts = torch.tensor([counter.get_total_flops(), same, number], dtype=torch.float64, device=pl_module.device)
        flops, same, number = trainer.strategy.reduce(counts, reduce_op="sum").tolist()  # over all processes
        self.figures = changes.recorded(flops / (number * self.dense), int(same), int(number))
