"""One global batch over several processes, so that together they compute what one process would."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Share(NamedTuple):
    """A process's part, images `start` to `stop`, of a global batch of `total` images."""

    total: int
    start: int
    stop: int
    world_size: int

    @property
    def weight(self) -> float:
        """What this process's mean counts for when the processes' means are averaged; 1 where all have as many."""
        return (self.stop - self.start) * self.world_size / self.total


def sum_over_processes(tensor: Tensor) -> Tensor:
    """Of all processes; it has no gradient."""
    if not (dist.is_available() and dist.is_initialized()):
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


def over_processes(mean: Tensor) -> Tensor:
    """The mean over all processes, with the gradient of this process's own mean.

    Each process then adds the gradient of its own share and DDP averages them: the gradient of the global mean.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return mean
    return mean + (sum_over_processes(mean) / dist.get_world_size() - mean).detach()


class SumOverProcesses(torch.autograd.Function):
    """The sum of all processes' tensors. Each of their losses depends on it, so the gradients add up as well."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.contiguous().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return SumOverProcesses.apply(gradient)
