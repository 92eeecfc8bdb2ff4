"""The input of deployment commands: a trained network, its config and its data."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig
from torch import Tensor

from cosinegate.config.choices import Checkpoint, Dynamic, Validation
from cosinegate.data.folder import move
from cosinegate.data.module import ImageData
from cosinegate.deploy.card import Network, actions_of, is_card_folder, read_network
from cosinegate.deploy.exits import EarlyExitNetwork
from cosinegate.deploy.fold import folded
from cosinegate.networks import GatedNetwork
from cosinegate.networks.compile import Action, Changes, compile_gates
from cosinegate.networks.flops import dense_flops
from cosinegate.terminal.errors import UserError
from cosinegate.training.build import dense_network, reference_flops, reference_network
from cosinegate.training.load import chosen_path, load_checkpoint, run_folder_of


@dataclass
class Source:
    """A trained or written network, with what compiling and measuring it need."""

    path: Path  # the checkpoint, or the folder of an export or of exits
    folder: Path  # the run's, or the same as `path`
    config: DictConfig
    network: Network
    data: ImageData
    actions: list[Action] | None = None  # what compiling did to each block

    @property
    def dense_flops(self) -> int:
        """Returns the FLOPs for one image of the trained network without its gates."""
        return dense_flops(dense_network(self.config), self.data.image_set.shape)

    @property
    def reference_flops(self) -> int:
        """Returns the FLOPs for one image of the dense network of the config's depth and width."""
        return reference_flops(self.config)

    def held_out(self) -> Tensor:
        """Returns the images that gates run on and thresholds are set on: never test images."""
        return self.data.held_out()[0]

    @property
    def held_out_words(self) -> str:
        kept = self.config.data.validation is Validation.holdout
        return "held-out images" if kept else "training images, for the run kept none aside"

    def compile(self, dynamic: Dynamic, tolerance: float) -> tuple[Network, Changes | None]:
        """Returns the network without settled gates and closed blocks, and the changes; one without gates as it is."""
        if isinstance(self.network, EarlyExitNetwork) or not self.network.has_gates:
            return self.network, None
        compiled, changes = compile_gates(self.network, self.held_out(), dynamic, tolerance)
        self.actions = actions_of(changes)
        return compiled, changes

    def dense(self) -> GatedNetwork:
        """Returns the dense network that times are compared with, BatchNorm folded."""
        return folded(reference_network(self.config))


def load_source(
    run: str, checkpoint: Checkpoint | None = None, root: str | None = None, data_folder: str | None = None
) -> Source:
    """Returns the network of a run's folder, a checkpoint, or a folder of an export or of exits, with its data."""
    actions = None
    if is_written_network(Path(run)):
        card, network, config = read_network(run)
        path = folder = Path(run)
        names = card["network"].get("actions")
        actions = None if names is None else [Action[name] for name in names]
    else:
        path = chosen_path(run, checkpoint)
        folder = run_folder_of(path)
        module, config = load_checkpoint(path)
        network = module.network.eval()
    move(config.data, root, data_folder)
    data = ImageData(config.data, config.seed)
    data.setup()
    return Source(path, folder, config, network, data, actions)


def is_written_network(run: Path) -> bool:
    """Returns whether a folder holds an export or exits rather than a run."""
    return is_card_folder(run) and not (run / "checkpoints").exists()


def is_the_records(checkpoint: Path) -> bool:
    """Returns whether a checkpoint is the one that its run's record has the test accuracy of."""
    if checkpoint.is_dir():
        return (checkpoint / "record.json").exists()
    folder = run_folder_of(checkpoint)
    return (folder / "record.json").exists() and checkpoint.samefile(chosen_path(str(folder), None))


def require_something_to_deploy(source: Source) -> None:
    """Raises UserError for a dense run without exits."""
    is_dense_run = source.actions is None and not isinstance(source.network, EarlyExitNetwork)
    if is_dense_run and not source.network.has_gates:
        raise UserError(f"{source.path}: a dense network has no gates, so there is nothing to compile")
