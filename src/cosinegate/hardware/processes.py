"""One global batch over several processes, which together compute what one process would."""

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
        """Returns the weight of this process's mean when the processes' means are averaged; 1 where parts are equal."""
        return (self.stop - self.start) * self.world_size / self.total


def sum_over_processes(tensor: Tensor) -> Tensor:
    """Returns the sum over all processes, without a gradient."""
    if not (dist.is_available() and dist.is_initialized()):
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


def over_processes(mean: Tensor) -> Tensor:
    """Returns the mean over all processes, with the gradient of this process's own mean.

    Each process adds the gradient of its own part and DDP averages them, which is the gradient of the global mean.
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
