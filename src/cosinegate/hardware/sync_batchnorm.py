"""BatchNorm over the global batch on CPUs: several devices normalise as one would."""

import torch
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch import Tensor, nn

from cosinegate.hardware.processes import SumOverProcesses


class GlobalBatchNorm(nn.Module):
    """BatchNorm with the mean and variance of the global batch, as torch's SyncBatchNorm has them on GPUs."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        places, shape = [0, *range(2, x.dim())], [1, -1] + [1] * (x.dim() - 2)  # all but the channels
        values = x.to(self.running_mean.dtype)  # sums of half precision would lose what they add
        count = values.new_tensor([x.numel() / x.shape[1]])
        sums = SumOverProcesses.apply(torch.cat((values.sum(places), count)))
        count = sums[-1]
        mean = (sums[:-1] / count).view(shape)
        centred = values - mean
        variance = SumOverProcesses.apply(centred.square().sum(places)) / count
        if self.track_running_stats:
            with torch.no_grad():
                self.num_batches_tracked += 1
                self.running_mean.lerp_(mean.flatten(), self.momentum)
                self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        scale = (self.weight * torch.rsqrt(variance + self.eps)).view(shape)
        return (centred * scale + self.bias.view(shape)).to(x.dtype)


class GlobalBatchNorm1d(GlobalBatchNorm, nn.BatchNorm1d):
    """The same for a gate's layers."""


class GlobalBatchNorm2d(GlobalBatchNorm, nn.BatchNorm2d):
    """The same for feature maps."""


GLOBAL = {nn.BatchNorm1d: GlobalBatchNorm1d, nn.BatchNorm2d: GlobalBatchNorm2d}


class SyncBatchNormOnCPU(TorchSyncBatchNorm):
    """A plugin that does what lightning's `sync_batchnorm` does, where torch's own layer cannot run."""

    def apply(self, model: nn.Module) -> nn.Module:
        return _turned(model, GLOBAL)

    def revert(self, model: nn.Module) -> nn.Module:
        return _turned(model, {new: old for old, new in GLOBAL.items()})


def _turned(model: nn.Module, into: dict[type, type]) -> nn.Module:
    for module in model.modules():
        module.__class__ = into.get(type(module), type(module))  # the same parameters, buffers and hooks
    return model
