"""Collects the gates' decisions for every image of a test."""

from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor

from cosinegate.callbacks.routes import Routes
from cosinegate.gates import CosineGate
from cosinegate.lit import LitCosineGate
from cosinegate.networks import Output


class RouteCollector(L.Callback):
    """A callback whose `routes` are those of the last test; each process has those of its own images."""

    def __init__(self) -> None:
        self.routes: Routes | None = None

    def on_test_epoch_start(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        self.parts: list[tuple[Tensor, ...]] = []

    def on_test_batch_end(
        self, trainer: L.Trainer, pl_module: LitCosineGate, outputs: Output, batch: Any, *where: int
    ) -> None:
        part = [batch[1], outputs.logits.argmax(1)]
        if outputs.routing is not None:
            part += [outputs.routing.gates.bool(), outputs.routing.cir.float(), outputs.routing.logits.float()]
        self.parts.append(tuple(tensor.detach().cpu() for tensor in part))

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        label, predicted, *routing = (torch.cat(parts).numpy() for parts in zip(*self.parts, strict=True))
        index = trainer.global_rank + trainer.world_size * np.arange(len(label))
        if not routing:
            alike = [block.residual is not None for block in pl_module.network.blocks]
            computed = np.tile(np.array(alike), (len(label), 1))
            self.routes = Routes(index, label, predicted, computed, None, None)
            return
        computed, cir, logits = routing
        gates = [block.gate for block in pl_module.network.blocks]
        if not any(isinstance(gate, CosineGate) for gate in gates):  # a gate of another paper looks at no CIR
            self.routes = Routes(index, label, predicted, computed, None, None)
            return
        compares = [gate if isinstance(gate, CosineGate) else None for gate in gates]
        gamma = np.array([gate.gamma.item() if gate else np.nan for gate in compares])
        threshold = np.array([gate.threshold_logit if gate else np.nan for gate in compares])
        offset = (logits / gamma - cir).mean(0)  # c(x) of ℓ = γ·(CIR + c(x))
        self.routes = Routes(index, label, predicted, computed, cir, threshold / gamma - offset)
