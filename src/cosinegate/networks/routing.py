"""What the gates did over a data set: how open, for which class, by how many paths, and whether by input."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics import Metric

from cosinegate.networks import Output
from cosinegate.runs.dynamic import DYNAMIC


@dataclass
class RoutingSummary:
    """N blocks, K classes. A network without gates has one route for all images, and no CIR."""

    count: Tensor  # (K,) images
    correct: Tensor  # (K,)
    open_by_class: Tensor  # (K, N) fraction of the samples that compute the block
    open: Tensor  # (N,)
    cir: Tensor | None  # (N,)
    mean_gate: float
    dynamic_blocks: int
    paths: int  # distinct sets of open blocks

    @property
    def skip_percent(self) -> float:
        return 100 * (1 - self.mean_gate)


class RoutingMetric(Metric):
    """Gathers the hard gates of an evaluation, over all processes."""

    full_state_update = False

    def __init__(self, num_classes: int, has_residual: list[bool]) -> None:
        """`has_residual` (N,): without gates, the blocks that compute every image."""
        super().__init__()
        self.gated, num_blocks = True, len(has_residual)
        self.register_buffer("alike", torch.tensor(has_residual, dtype=torch.float32), persistent=False)
        self.add_state("count", torch.zeros(num_classes), dist_reduce_fx="sum")
        self.add_state("correct", torch.zeros(num_classes), dist_reduce_fx="sum")
        self.add_state("opened", torch.zeros(num_classes, num_blocks), dist_reduce_fx="sum")
        self.add_state("cir", torch.zeros(num_blocks), dist_reduce_fx="sum")
        self.add_state("paths", [], dist_reduce_fx="cat")

    def update(self, output: Output, target: Tensor) -> None:
        self.gated = output.routing is not None
        gates = output.routing.gates.float() if self.gated else self.alike.expand(len(target), -1)
        right = (output.logits.argmax(1) == target).float()
        self.count.index_add_(0, target, torch.ones_like(right))
        self.correct.index_add_(0, target, right)
        self.opened.index_add_(0, target, gates)
        self.paths.append(torch.unique(gates.bool(), dim=0))
        if self.gated:
            self.cir += output.routing.cir.float().sum(0)

    def compute(self) -> RoutingSummary:
        total = self.count.sum()
        opened = self.opened.sum(0) / total
        paths = torch.cat(self.paths) if isinstance(self.paths, list) else self.paths
        return RoutingSummary(
            count=self.count.long().cpu(),
            correct=self.correct.long().cpu(),
            open_by_class=(self.opened / self.count.clamp_min(1)[:, None]).cpu(),
            open=opened.cpu(),
            cir=(self.cir / total).cpu() if self.gated else None,
            mean_gate=opened.mean().item(),
            dynamic_blocks=int(((opened >= DYNAMIC[0]) & (opened <= DYNAMIC[1])).sum()),
            paths=len(torch.unique(paths, dim=0)),
        )
