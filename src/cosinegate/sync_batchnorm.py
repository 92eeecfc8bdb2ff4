"""BatchNorm over the global batch: with `trainer.sync_batchnorm` several devices normalise as one would."""

import torch
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch import Tensor, nn

from cosinegate.processes import SumOverProcesses


class GlobalBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm with the mean and variance of the global batch, on any device. torch's own does it on GPUs alone."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        count = x.new_tensor([x.numel() / x.shape[1]])
        sums = SumOverProcesses.apply(torch.cat((x.sum((0, 2, 3)), count)))
        count = sums[-1]
        mean = (sums[:-1] / count).view(1, -1, 1, 1)
        centred = x - mean
        variance = SumOverProcesses.apply(centred.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean.flatten(), self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        scale = (self.weight * torch.rsqrt(variance + self.eps)).view(1, -1, 1, 1)
        return centred * scale + self.bias.view(1, -1, 1, 1)


class SyncBatchNorm(TorchSyncBatchNorm):
    """What lightning does with `trainer.sync_batchnorm`: torch's own on GPUs, ours elsewhere."""

    def apply(self, model: nn.Module) -> nn.Module:
        if next(model.parameters()).is_cuda:
            return super().apply(model)
        _turn(model, nn.BatchNorm2d, GlobalBatchNorm2d)
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        _turn(model, GlobalBatchNorm2d, nn.BatchNorm2d)
        return super().revert(model)


def _turn(model: nn.Module, old: type, new: type) -> None:
    for module in model.modules():
        if type(module) is old:
            module.__class__ = new  # the same parameters, buffers and hooks
