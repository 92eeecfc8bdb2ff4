"""A trained run as deployment meets it: its network, its data, what compiling makes of it, thresholds of any budget."""

from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor

from cosinegate.build import reference_network
from cosinegate.calibration import Budget, Quantile, calibrate
from cosinegate.choices import Checkpoint, Credit, Dynamic, Sharing, Validation
from cosinegate.data import IMAGE_SETS
from cosinegate.data.module import ImageData
from cosinegate.deploy.compile import Changes, compile_gates
from cosinegate.deploy.folded import FoldedNetwork, folded
from cosinegate.errors import UserError
from cosinegate.gates import PredictiveGate
from cosinegate.networks import GatedNetwork
from cosinegate.saved import chosen_path, load_checkpoint, run_folder_of

ROUNDING = 5e-4  # a budget is told with three digits


@dataclass
class Trained:
    """`eager` is the network as it was trained, `compiled` without what its gates have settled, `folded` as it is
    deployed, all with the same thresholds.
    """

    path: Path  # of the checkpoint
    config: DictConfig
    eager: GatedNetwork
    folded: FoldedNetwork | None
    data: ImageData
    compiled: GatedNetwork | None = None

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of its images."""
        return IMAGE_SETS[self.config.data.name.name].shape[:2]

    def compile(self, images: Tensor, dynamic: Dynamic, tolerance: float) -> Changes:
        """Makes `compiled` and, of that, `folded`. Says what was changed."""
        self.compiled, changes = compile_gates(self.eager, images, dynamic, tolerance)
        self.folded = folded(self.compiled, self.size, compares=True)
        return changes

    @property
    def held_out_words(self) -> str:
        kept = self.config.data.validation is Validation.holdout
        return "held-out images" if kept else "training images, for the run kept none aside"

    def held_out(self) -> Tensor:
        """Images that gates are asked for, never of the test set."""
        return self.data.held_out()[0]

    def dense(self) -> FoldedNetwork:
        """The network that times are ratios to."""
        return folded(reference_network(self.config), self.size)

    def calibrate(self, budget: float, images: Tensor) -> list[float]:
        """Moves the thresholds so that the mean gate over all blocks is `budget` on these images; gives the shares."""
        self.check_budget(budget)
        plan, (least, most) = self._plan, self.budgets()
        shares = plan.shares(min(max(budget, least), most), bounded=False)
        for place, gate in enumerate(self._gates):
            if not isinstance(gate.opening, Quantile):
                gate.opening = Quantile(plan, place, temperature=1.0).eval()
        reached = calibrate(self.eager, shares, images)
        if self.folded is not None:
            self.folded = folded(self.eager, self.folded.size)
        return reached

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


def load_gated(
    run: str, checkpoint: Checkpoint | None = None, root: str | None = None, folder: str | None = None
) -> Trained:
    """A run whose gates can be compiled; of a dense one it ends with one line."""
    path = chosen_path(run, checkpoint)
    module, config = load_checkpoint(path)
    if all(block.gate is None for block in module.network.blocks):
        raise UserError(f"{path}: a dense network has no gates, so there is nothing to compile")
    config.data.root, config.data.folder = root or config.data.root, folder or config.data.folder
    data = ImageData(config.data, config.seed)
    data.setup()
    return Trained(path, config, module.network.eval(), None, data)


def load_trained(
    run: str, checkpoint: Checkpoint | None = None, root: str | None = None, folder: str | None = None
) -> Trained:
    """A run that can be calibrated. Ends with one line where its gates cannot skip."""
    trained = load_gated(run, checkpoint, root, folder)
    try:
        trained.folded = folded(trained.eager, trained.size)
    except UserError as error:
        raise UserError(f"{trained.path}: {error}") from error
    if not any(block.head is not None or block.removed for block in trained.folded.blocks):
        raise UserError(f"{trained.path}: its gates are open for every image, so there is nothing to skip")
    return trained
