"""The Python API beside add_gates and CosineGateLoss: compile a gated network, give one exits, load a trained one."""

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from cosinegate.config.choices import Dynamic
from cosinegate.deploy.card import read_network
from cosinegate.deploy.exits import EarlyExitNetwork
from cosinegate.deploy.exits.budget import default_budgets, path_costs, require_budget, set_budget
from cosinegate.deploy.exits.fit import default_exits, fit_exits, new_exits
from cosinegate.deploy.source import is_written_network
from cosinegate.networks import GatedNetwork
from cosinegate.networks import compile as compiling
from cosinegate.networks.adapt import AdaptedNetwork, adapted, plain
from cosinegate.networks.compile import Changes, Images
from cosinegate.terminal.errors import UserError
from cosinegate.training.load import chosen_path, load_checkpoint

HELD_OUT = 10  # every tenth image of a loader sets the exits' threshold, and fits nothing


def compile_gates(
    network: GatedNetwork, images: Images, dynamic: Dynamic | str = Dynamic.keep, tolerance: float = 0.0
) -> tuple[nn.Module, Changes]:
    """Returns the network without what its gates have settled on these images, and what was changed.

    Images, which training did not see, are a tensor (B, C, H, W) or a loader of batches. Where no gate is left, a model
    that `add_gates` was given comes back as itself: it returns class scores, and has a part of its own weights by their
    own names. For a block that some images open, `dynamic` is `keep` (exact), `round` (as most have it) or `predict`
    (an MLP decides before F).
    """
    if not isinstance(network, GatedNetwork):
        raise UserError(f"{type(network).__name__}: has no gates; cosinegate.add_gates gives it some")
    compiled, changes = compiling.compile_gates(network, images, dynamic, tolerance)
    is_plain = isinstance(compiled, AdaptedNetwork) and not compiled.has_gates
    return (plain(compiled) if is_plain else compiled), changes


def add_exits(
    model: nn.Module,
    loader: Iterable[Sequence[Tensor]],
    budget: float | None = None,
    *,
    after: Sequence[int] | None = None,
) -> EarlyExitNetwork:
    """Returns a copy of a trained model with early exits, fitted to a loader's images and labels; its weights stay.

    `budget` is the mean FLOPs over the model's own, and sets one threshold by every tenth image, to which nothing is
    fitted; None: half of what exits can save. `after` are the indices of the blocks that have an exit after them;
    None: of the last stage.
    """
    if isinstance(model, EarlyExitNetwork):
        raise UserError("EarlyExitNetwork: has exits already; give the model itself")
    images, labels = _whole(loader)
    if isinstance(model, GatedNetwork):
        network = copy.deepcopy(model).eval()
    else:
        network = adapted(model, images[:2].to(next(model.parameters()))).eval()
    held_out = (torch.arange(len(images)) % HELD_OUT == HELD_OUT - 1).to(images.device)
    after = default_exits(network, images[:1]) if after is None else sorted(set(after))
    if not after:
        words = "its last stage has one block alone; after=[...] names where exits stand"
        raise UserError(f"{type(model).__name__}: {words}")
    costs = path_costs(EarlyExitNetwork(network, new_exits(network, after, images[:1])), images[:1])
    wanted = default_budgets(costs)[0] if budget is None else budget
    require_budget(wanted, costs)
    fitted = fit_exits(network, after, images[~held_out], labels[~held_out])
    early = EarlyExitNetwork(network, fitted).eval().requires_grad_(False)
    set_budget(early, wanted, images[held_out])
    return early


def _whole(loader: Iterable[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
    """All images and labels of a loader."""
    found = []
    for batch in loader:
        if not (isinstance(batch, tuple | list) and len(batch) > 1 and all(isinstance(x, Tensor) for x in batch[:2])):
            raise UserError(f"the loader gives a {type(batch).__name__}: must give batches (images, labels)")
        found.append(batch[:2])
    images, labels = (torch.cat(tensors) for tensors in zip(*found, strict=True)) if found else (torch.empty(0),) * 2
    if len(images) < 2 * HELD_OUT:
        raise UserError(f"the loader has {len(images)} images; at least {2 * HELD_OUT} are needed")
    return images, labels


def load(run: str | Path) -> GatedNetwork | EarlyExitNetwork:
    """Returns the trained network of a run's folder, a checkpoint, or a folder of weights with their card."""
    path = Path(run)
    if is_written_network(path):
        return read_network(path)[1]
    module, _ = load_checkpoint(chosen_path(str(path), None))
    return module.network.eval()
