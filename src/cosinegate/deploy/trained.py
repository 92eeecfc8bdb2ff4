"""A trained run as deployment meets it: its network, its data, and the thresholds of any budget."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from cosinegate.build import reference_network
from cosinegate.calibration import Budget, Quantile, calibrate
from cosinegate.choices import Checkpoint, Credit, Sharing, Validation
from cosinegate.data import IMAGE_SETS
from cosinegate.data.module import ImageData
from cosinegate.deploy.flops import flops_beside_blocks
from cosinegate.deploy.folded import FoldedNetwork, folded
from cosinegate.deploy.specialise import settled
from cosinegate.errors import UserError
from cosinegate.gates import PredictiveGate
from cosinegate.networks import ResNet
from cosinegate.saved import chosen_path, load_checkpoint, run_folder_of

ROUNDING = 5e-4  # a budget is told with three digits


@dataclass
class Trained:
    """`eager` is the network as it was trained, `folded` as it is deployed, both with the same thresholds."""

    path: Path  # of the checkpoint
    config: DictConfig
    eager: ResNet
    folded: FoldedNetwork
    data: ImageData

    @property
    def held_out_words(self) -> str:
        kept = self.config.data.validation is Validation.holdout
        return "held-out images" if kept else "training images, for the run kept none aside"

    def held_out(self) -> Tensor:
        """Images for calibration, never of the test set."""
        return self.held_out_and_labels()[0]

    def held_out_and_labels(self) -> tuple[Tensor, Tensor]:
        split = "val" if self.config.data.validation is Validation.holdout else "train"
        return self.data.whole_images(split, self.config.data.holdout)

    def dense(self) -> FoldedNetwork:
        """The network that times are ratios to."""
        return folded(reference_network(self.config), self.folded.size)

    def calibrate(self, budget: float, images: Tensor) -> list[float]:
        """Moves the thresholds so that the mean gate over all blocks is `budget` on these images; gives the shares."""
        self.check_budget(budget)
        plan, (least, most) = self._plan, self.budgets()
        shares = plan.shares(min(max(budget, least), most), bounded=False)
        for place, gate in enumerate(self._gates):
            if not isinstance(gate.opening, Quantile):
                gate.opening = Quantile(plan, place, temperature=1.0).eval()
        reached = calibrate(self.eager, shares, images)
        self.folded = folded(self.eager, self.folded.size)
        return reached

    def settle(self) -> list[dict[str, Any]]:
        """Takes gates away that no image can open or close, and says which. Ends with one line where training has left
        no other, and nothing is skipped."""
        before, (self.folded, changes) = self.folded, settled(self.folded)
        if not any(block.head is not None or block.removed for block in self.folded.blocks):
            self.folded = before
            why = f"its exits {self._not_fitted}" if self._is_unfitted else "its gates are open for every image"
            raise UserError(f"{self.path}: {why}, so there is nothing to skip")
        return changes

    def flops_settled(self, before: FoldedNetwork) -> float:
        """How many more FLOPs an image takes than `before` for all but the residuals: gates that are gone take none."""
        shape = self.data.image_set.shape
        return flops_beside_blocks(self.folded, self.eager, shape) - flops_beside_blocks(before, self.eager, shape)

    def check_budget(self, budget: float) -> None:
        if not all(gate.ranks for gate in self._gates):
            kind = self.config.gate.kind.name
            raise UserError(f"budget = {budget}: gates of kind {kind} have no threshold that could be moved")
        if self._is_unfitted:
            raise UserError(f"budget = {budget}: its exits {self._not_fitted}")
        least, most = self.budgets()
        if not least - ROUNDING <= budget <= most + ROUNDING:
            why = f"{len(self.eager.blocks) - len(self._gates)} of {len(self.eager.blocks)} blocks have no gate"
            never = sum(self._plan.never_opened())
            why += f", and {never} were never opened in training" if never else ""
            raise UserError(f"budget = {budget}: must lie from {least:.3f} to {most:.3f}; {why}")

    def budgets(self) -> tuple[float, float]:
        """The least and the most that its gates can be calibrated to."""
        plan = self._plan
        opened = [cost for cost, never in zip(plan.costs, plan.never_opened(), strict=True) if not never]
        total = plan.free + sum(plan.costs)
        return plan.free / total, (plan.free + sum(opened)) / total

    @property
    def _plan(self) -> Budget:
        """How the trained network shares a budget out; to all blocks alike where it learned nothing of it."""
        first = self._gates[0].opening
        if isinstance(first, Quantile):
            return first.budget
        gated, blocks = len(self._gates), len(self.eager.blocks)
        return Budget(1.0, torch.ones(gated) / blocks, 1 - gated / blocks, Sharing.block, Credit.slope, 0.0, 1.0)

    @property
    def _is_unfitted(self) -> bool:
        """Whether it has exits that know nothing yet."""
        return self._plan.exits and self._plan.seen.min().item() == 0

    @property
    def _not_fitted(self) -> str:
        start = self.config.objective.start_epoch
        return f"were not fitted yet, which begins with objective.start_epoch = {start:g}"

    @property
    def _gates(self) -> list[PredictiveGate]:
        return [block.gate for block in self.eager.blocks if block.gate is not None]


def is_the_records(checkpoint: Path) -> bool:
    """Whether a checkpoint is the one that its run's record has the test accuracy of."""
    folder = run_folder_of(checkpoint)
    return (folder / "record.json").exists() and checkpoint.samefile(chosen_path(str(folder), None))


def load_trained(
    run: str, checkpoint: Checkpoint | None = None, root: str | None = None, folder: str | None = None
) -> Trained:
    """Ends with one line where there is nothing that could be skipped."""
    path = chosen_path(run, checkpoint)
    module, config = load_checkpoint(path)
    if all(block.gate is None for block in module.network.blocks):
        raise UserError(f"{path}: a dense network has no gates, so there is nothing to skip")
    try:
        plain = folded(module.network, IMAGE_SETS[config.data.name.name].shape[:2])
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    if not any(block.head is not None or block.removed for block in plain.blocks):
        raise UserError(f"{path}: its gates are open for every image, so there is nothing to skip")
    config.data.root, config.data.folder = root or config.data.root, folder or config.data.folder
    data = ImageData(config.data, config.seed)
    data.setup()
    return Trained(path, config, module.network.eval(), plain, data)
