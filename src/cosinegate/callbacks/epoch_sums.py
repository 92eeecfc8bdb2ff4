"""Sums over a training epoch. A checkpoint inside the epoch keeps them, so that the epoch can resume there."""

from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from torch import Tensor


class EpochSums(L.Callback):
    """A callback with named sums in double precision. Each process has its own; a checkpoint has those of all."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.kept: list[dict[str, Tensor]] = []  # of each process, from a checkpoint

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.fit_loop.restarted_mid_epoch:
            return
        if len(self.kept) == trainer.world_size:
            mine = self.kept[trainer.global_rank]
        else:  # as many processes as before had each its own; of another number the first has them all
            mine = {name: sum(part[name] for part in self.kept) for name in self.kept[0]}
            mine = {name: total * (trainer.global_rank == 0) for name, total in mine.items()}
        self.sums = {name: total.to(pl_module.device) for name, total in mine.items()}

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.sums = {}

    def add(self, name: str, value: Tensor | float) -> None:
        value = torch.as_tensor(value, dtype=torch.float64).detach()
        self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()

    def total(self, trainer: L.Trainer, name: str) -> Tensor:
        """Returns a sum over all processes."""
        total = self.sums[name].to(trainer.strategy.root_device, copy=True)
        return trainer.strategy.reduce(total, reduce_op="sum")

    def state_dict(self) -> dict[str, Any]:
        mine = {name: total.cpu() for name, total in self.sums.items()}
        if not (dist.is_available() and dist.is_initialized()):
            return {"processes": [mine]}
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        return {"processes": parts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict["processes"]
