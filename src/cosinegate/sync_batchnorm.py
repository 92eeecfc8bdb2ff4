"""BatchNorm over the global batch: with `trainer.sync_batchnorm` several devices normalise as one would."""

import torch
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch import Tensor, nn

from cosinegate.processes import SumOverProcesses


class GlobalBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm with the mean and variance of the global batch, as torch's SyncBatchNorm has it on GPUs alone."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        values = x.to(self.running_mean.dtype)  # sums of half precision would lose what they add
        count = values.new_tensor([x.numel() / x.shape[1]])
        sums = SumOverProcesses.apply(torch.cat((values.sum((0, 2, 3)), count)))
        count = sums[-1]
        mean = (sums[:-1] / count).view(1, -1, 1, 1)
        centred = values - mean
        variance = SumOverProcesses.apply(centred.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean.flatten(), self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        scale = (self.weight * torch.rsqrt(variance + self.eps)).view(1, -1, 1, 1)
        return (centred * scale + self.bias.view(1, -1, 1, 1)).to(x.dtype)


class SyncBatchNormOnCPU(TorchSyncBatchNorm):
    """What lightning does with `trainer.sync_batchnorm` where torch's own layer cannot run."""

    def apply(self, model: nn.Module) -> nn.Module:
        return _turned(model, nn.BatchNorm2d, GlobalBatchNorm2d)

    def revert(self, model: nn.Module) -> nn.Module:
        return _turned(model, GlobalBatchNorm2d, nn.BatchNorm2d)


def _turned(model: nn.Module, old: type, new: type) -> nn.Module:
    for module in model.modules():
        if type(module) is old:
            module.__class__ = new  # the same parameters, buffers and hooks
    return model
