"""Compiles gates that have settled: a block that is closed for all images needs no F(x) to be skipped.

    network, changes = compile_gates(network, images)

Without its settled gates and closed blocks the network computes the same with less. Where every gate has settled, a
plain residual network is left.
"""

import copy
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.config.choices import Dynamic
from cosinegate.gates.pooled import PooledGate
from cosinegate.networks import GatedNetwork, ResidualBlock
from cosinegate.networks.adapt import AdaptedNetwork, prune
from cosinegate.networks.block import PadShortcut
from cosinegate.networks.network import Step
from cosinegate.terminal.errors import UserError

Images = Tensor | Iterable[Tensor | Sequence[Tensor]]

BATCH = 250
HIDDEN = 16  # units of a predicting MLP
FEWEST = 10  # images that the rarer decision needs for an MLP to be fitted to it and tested


class Action(Enum):
    """What became of a block."""

    removed = "removed"  # closed for all images: its shortcut stays where the shape changes
    always = "gate dropped"  # open for all images
    kept = "kept"  # its gate still decides for each image
    predicted = "predicted"  # an MLP decides for each image, before F runs
    ungated = "no gate"


@dataclass(frozen=True)
class BlockChange:
    """What became of one block, and why."""

    block: int
    action: Action
    open_fraction: float  # of the images that its gate ran on
    other_route: float = 0.0  # fraction of those images for which the block decides otherwise now
    agreement: float | None = None  # of an MLP with the gate, on images that it was not fitted to
    random_agreement: float | None = None  # of a gate that is open as often, by chance
    needs_f: bool = False  # whether what decides needs F(x), so that nothing is saved here

    def __str__(self) -> str:
        images = {0.0: "no image", 1.0: "all images"}.get(self.open_fraction, f"{self.open_fraction:.2%} of the images")
        words = f"block {self.block}: open for {images}: {self.action.value}"
        if self.agreement is not None:
            words += f"; agrees with its gate on {self.agreement:.2%} of other images, a random gate as often open on "
            words += f"{self.random_agreement:.2%}"
        return f"{words}; it needs F(x), so nothing is saved there" if self.needs_f else words


@dataclass(frozen=True)
class Changes:
    """What compiling did, block by block."""

    images: int  # that the gates ran on
    blocks: tuple[BlockChange, ...]

    def blocks_with(self, *actions: Action) -> list[int]:
        """The indices of the blocks to which one of these happened."""
        return [change.block for change in self.blocks if change.action in actions]

    def recorded(self, executed: float, same_class: int, images: int) -> dict[str, float | int]:
        """What a run's record says of the compiled network: its FLOPs over the dense network's, its blocks, and for how
        many test images it has the trained network's class."""
        counts = {"blocks": self.computed, "dynamic_blocks": self.dynamic, "same_class": same_class, "images": images}
        return {"executed": executed} | counts

    @property
    def computed(self) -> int:
        """The number of blocks that have an F left."""
        return len(self.blocks) - len(self.blocks_with(Action.removed))

    @property
    def dynamic(self) -> int:
        """The number of blocks that still decide for each image."""
        return len(self.blocks_with(Action.kept, Action.predicted))


@torch.no_grad()
def compile_gates(
    network: GatedNetwork, images: Images, dynamic: Dynamic | str = Dynamic.keep, tolerance: float = 0.0
) -> tuple[GatedNetwork, Changes]:
    """Returns the network without what its gates have settled on these images, and what was changed.

    Images are a tensor (B, C, H, W), or a loader of batches.

    A block counts as closed, or open, for all images where at most a fraction `tolerance` of them disagrees. For the
    others `dynamic` says what happens: `keep` leaves the gate, which is exact and saves nothing where it needs F(x);
    `round` settles it as most images have it; `predict` fits an MLP to a gate that needs F(x), so that the block can
    skip. The network that is given stays as it is; the weights of the one returned have the same names.
    """
    dynamic = _checked(dynamic, tolerance)
    compiled = copy.deepcopy(network).eval()
    if not compiled.has_gates:
        raise UserError("a dense network has no gates, so there is nothing to compile")
    predicts = [
        dynamic is Dynamic.predict and block.gate is not None and not block.gate.decides_first
        for block in compiled.blocks
    ]
    gates, statistics = _run_gates(compiled, images, predicts)
    changes = []
    for index, block in enumerate(compiled.blocks):
        if block.gate is None:
            removed = block.residual is None  # by an earlier compilation
            changes.append(BlockChange(index, Action.removed if removed else Action.ungated, 0.0 if removed else 1.0))
        else:
            changes.append(_settle(block, index, gates[:, index], statistics.get(index), dynamic, tolerance))
    _finish(compiled)
    return compiled, Changes(len(gates), tuple(changes))


def _settle(
    block: ResidualBlock, index: int, is_open: Tensor, statistics: Tensor | None, dynamic: Dynamic, tolerance: float
) -> BlockChange:
    """Takes out of a block what its gate has settled, by decisions (B,); with statistics (B, 3C), a gate is fitted."""
    fraction = is_open.double().mean().item()
    rounds = dynamic is Dynamic.round or (statistics is not None and _too_few(is_open))
    if fraction <= tolerance or (rounds and fraction < 0.5):
        block.residual = block.gate = None
        return BlockChange(index, Action.removed, fraction, other_route=fraction)
    if fraction >= 1 - tolerance or rounds:
        block.gate = None
        return BlockChange(index, Action.always, fraction, other_route=1 - fraction)
    if statistics is not None:
        block.gate, agreement, by_chance = _fit_gate(statistics, is_open)
        return BlockChange(index, Action.predicted, fraction, 1 - agreement, agreement, by_chance)
    action = Action.predicted if isinstance(block.gate, PooledGate) else Action.kept  # by an earlier compilation
    return BlockChange(index, action, fraction, needs_f=not block.gate.decides_first)


def remove_blocks(network: GatedNetwork, actions: list[Action]) -> None:
    """Gives an untrained network the shape of a compiled one, in place: what each block became is known."""
    for block, action in zip(network.blocks, actions, strict=True):
        if action is Action.predicted:
            block.gate = PooledGate(block.channels, HIDDEN)
        elif action is not Action.kept:
            block.gate = None
        if action is Action.removed:
            block.residual = None
    _finish(network)


def _finish(network: GatedNetwork) -> None:
    """Takes out what only removed blocks had a use for."""
    if isinstance(network, AdaptedNetwork):
        prune(network)
    else:
        _drop_activations(network)


def batches(images: Images) -> Iterator[Tensor]:
    """The images alone, some at a time, of a tensor or of a loader with labels or without."""
    if isinstance(images, Tensor):
        yield from images.split(BATCH) if len(images) else ()
        return
    for batch in images:
        part = batch[0] if isinstance(batch, tuple | list) and batch else batch
        if not isinstance(part, Tensor):
            raise UserError(f"images: the loader gives a {type(part).__name__}: must give tensors (B, C, H, W)")
        yield part


def _checked(dynamic: Dynamic | str, tolerance: float) -> Dynamic:
    if not 0 <= tolerance < 0.5:
        raise UserError(f"tolerance = {tolerance}: must be at least 0 and below 0.5")
    try:
        return Dynamic(dynamic)
    except ValueError as error:
        raise UserError(f"dynamic = {dynamic}: must be one of {', '.join(Dynamic.__members__)}") from error


def _run_gates(network: GatedNetwork, images: Images, wanted: list[bool]) -> tuple[Tensor, dict[int, Tensor]]:
    """The gates (B, N) of all images, and the pooled statistics (B, 3C) of the wanted blocks' inputs."""
    statistics: dict[int, list[Tensor]] = {index: [] for index, is_wanted in enumerate(wanted) if is_wanted}
    like, gates = next(network.parameters()), []

    def collect(step: Step) -> None:
        if step.routing is None:
            columns.append(torch.full((len(step.x),), step.block.residual is not None, device=step.x.device))
        else:
            columns.append(step.routing.decision.gate.bool())
        if step.index in statistics:
            statistics[step.index].append(geometry.pooled_statistics(step.block.as_map(step.x)))

    for part in batches(images):
        columns: list[Tensor] = []
        network.run(part.to(like), collect)
        gates.append(torch.stack(columns, dim=1))
    if not gates:
        raise UserError("there are no images to run the gates on")
    return torch.cat(gates), {index: torch.cat(parts) for index, parts in statistics.items()}


def _too_few(is_open: Tensor) -> bool:
    """Whether one of the two decisions is too rare to be fitted."""
    return min(int(is_open.sum()), int((~is_open).sum())) < FEWEST


def _fit_gate(statistics: Tensor, is_open: Tensor) -> tuple[PooledGate, float, float]:
    """A gate that is fitted to decisions (B,), its agreement with them on a fifth of the images, which it was not
    fitted to, and that of a random gate that is open as often."""
    from sklearn.model_selection import train_test_split  # takes a second to load, and only this needs it
    from sklearn.neural_network import MLPClassifier

    x, y = statistics.double().cpu().numpy(), is_open.cpu().numpy()
    known, tested, known_y, tested_y = train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)
    mean, deviation = known.mean(0), known.std(0).clip(1e-6)
    mlp = MLPClassifier((HIDDEN,), alpha=1e-3, max_iter=200, early_stopping=len(known) >= 500, random_state=0)
    with warnings.catch_warnings(action="ignore"):  # that it could go on: the agreement says how good it is
        mlp.fit((known - mean) / deviation, known_y)
    agreement = float((mlp.predict((tested - mean) / deviation) == tested_y).mean())
    (w1, w2), (b1, b2) = ([torch.from_numpy(array) for array in arrays] for arrays in (mlp.coefs_, mlp.intercepts_))
    w1 = w1 / torch.from_numpy(deviation)[:, None]
    with torch.random.fork_rng(devices=[]):  # its first weights are drawn, and none of them stays
        gate = PooledGate(x.shape[1] // 3, HIDDEN).eval().to(statistics)
    for layer, weight, bias in ((gate.score[0], w1, b1 - torch.from_numpy(mean) @ w1), (gate.score[2], w2, b2)):
        layer.weight.copy_(weight.T)
        layer.bias.copy_(bias)
    fraction = float(tested_y.mean())
    return gate, agreement, fraction**2 + (1 - fraction) ** 2


def _ends_with_relu(stem: nn.Module) -> bool:
    """Whether what it gives is never negative."""
    layers = [layer for layer in stem.modules() if not isinstance(layer, nn.Sequential | nn.MaxPool2d)]
    return bool(layers) and isinstance(layers[-1], nn.ReLU)


def _drop_activations(network: GatedNetwork) -> None:
    """Of blocks without F: a ReLU of what is never negative does nothing, and none may write over its input."""
    never_negative = _ends_with_relu(network.stem)
    for block in network.blocks:
        is_relu = isinstance(block.activation, nn.ReLU)
        if block.residual is None:
            never_negative = never_negative and isinstance(block.shortcut, nn.Identity | PadShortcut)
            if is_relu:
                block.activation = nn.Identity() if never_negative else nn.ReLU()
            never_negative = never_negative or is_relu
        else:
            never_negative = is_relu
