"""Gates in anybody's residual network: a block is seen as parts act(s + z·F) that are made of its own modules.

    net = add_gates(model, gate="cosine", gamma=-2.5, example=images[:2])

An adapter says what the parts of a block class are. Those of timm and torchvision are in `adapters/`; one for a class
of yours is a small function:

    @cosinegate.parts(MyBlock)
    def my_block(block):
        return [cosinegate.Part([block.norm, block.mlp])]
"""

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.gates import Gate
from cosinegate.gates.make import GateMaker, gate_config
from cosinegate.networks.block import ResidualBlock
from cosinegate.networks.network import AfterBlock, GatedNetwork, Step
from cosinegate.terminal.errors import UserError

GATED = "cosinegate"  # under this name a block of the model holds its gated parts
LIBRARIES = ("timm", "torchvision")  # that have a file in adapters/
LOST = 1e-7  # |F(x)|² over |s|² at which float32 loses F in the sum

Layers = Sequence[Callable[[Tensor], Tensor] | None]


class Part(NamedTuple):
    """act(s + z·F) of a block's own modules. Layers run one after the other; None is left out."""

    residual: Layers  # F
    shortcut: Layers = ()  # s; none: the identity
    activation: Layers = ()
    channels_last: bool = False  # tokens (B, N, C) or maps (B, H, W, C) instead of maps (B, C, H, W)


Adapter = Callable[[Any], Sequence[Part]]
ADAPTERS: dict[type[nn.Module], Adapter] = {}
TURN_OFF: dict[type[nn.Module], Callable[[Any], None]] = {}


def parts(*classes: type[nn.Module]) -> Callable[[Adapter], Adapter]:
    """Registers a function that takes a block and returns its parts, for these classes and those derived from them."""
    for of in classes:
        if not (isinstance(of, type) and issubclass(of, nn.Module)):
            raise UserError(f"parts({of!r}): must be a class of torch.nn.Module")

    def register(adapter: Adapter) -> Adapter:
        ADAPTERS.update(dict.fromkeys(classes, adapter))
        return adapter

    return register


def turns_off(of: type[nn.Module]) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Registers a function that turns off a layer of stochastic depth: a sample that it drops has a CIR of 1."""

    def register(turn_off: Callable[[Any], None]) -> Callable[[Any], None]:
        TURN_OFF[of] = turn_off
        return turn_off

    return register


def adapter_of(block: nn.Module) -> Adapter | None:
    """Returns the adapter of a block's class, or of the nearest class that it is derived from."""
    classes = type(block).__mro__
    for library in {of.__module__.partition(".")[0] for of in classes}.intersection(LIBRARIES):
        importlib.import_module(f"cosinegate.networks.adapters.{library}")
    return next((ADAPTERS[of] for of in classes if of in ADAPTERS), None)


def _run(layers: Layers, x: Tensor) -> Tensor:
    for layer in layers:
        x = x if layer is None else layer(x)
    return x


class GatedPart(ResidualBlock):
    """A part of a model's block, with a gate of its own. Its modules are the block's, and stay registered there."""

    def __init__(self, block: nn.Module, place: int, current: SimpleNamespace) -> None:
        nn.Module.__init__(self)
        self.gate: Gate | None = None
        self.consistency, self.has_residual = True, True
        self.place = place  # among the block's parts
        self.index = -1  # among the network's, in the order in which they run
        self.input_shape = self.output_shape = torch.Size()  # of one sample
        self.only_in_f: set[str] = set()  # names of the block's modules that F alone runs
        self.adapter: Adapter | None = None
        self.__dict__.update(block=block, current=current)  # not registered: their weights have the model's names

    @property
    def part(self) -> Part:
        """Made anew from the block's modules, so that it follows them through copies and moves."""
        self.adapter = self.adapter or adapter_of(self.block)
        return self.adapter(self.block)[self.place]

    def is_made(self) -> bool:
        """Whether the adapter still makes the part; one that looks into a module fails where that was taken out."""
        try:
            return self.part is not None
        except (TypeError, AttributeError, IndexError):
            return False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"adapter": None}  # any function may be one, and not all can be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.adapter = adapter_of(self.block)  # now: torch.compile cannot import a library's adapters

    @property
    def residual(self) -> Callable[[Tensor], Tensor] | None:
        return partial(_run, self.part.residual) if self.has_residual else None

    @residual.setter
    def residual(self, removed: None) -> None:
        self.has_residual = False

    @property
    def shortcut(self) -> Callable[[Tensor], Tensor]:
        return partial(_run, self.part.shortcut)

    @property
    def activation(self) -> Callable[[Tensor], Tensor]:
        return partial(_run, self.part.activation)

    @property
    def channels(self) -> int:
        """The number of channels of the part's input."""
        return self.input_shape[-1 if self.part.channels_last else 0]

    @property
    def changes_shape(self) -> bool:
        return self.input_shape != self.output_shape

    def as_map(self, x: Tensor) -> Tensor:
        x = x.movedim(-1, 1) if self.part.channels_last else x
        while x.dim() < 4:
            x = x.unsqueeze(-1)  # tokens (B, C, N) as a map (B, C, N, 1), and features (B, C) as one (B, C, 1, 1)
        return x

    def plain(self, x: Tensor) -> Tensor:
        if self.has_residual:
            return super().plain(x)
        s, activation = self.shortcut(x), self.part.activation
        return _run(activation, s.clone()) if activation and s is x else _run(activation, s)  # it may write in place

    def run(self, x: Tensor) -> Tensor:
        """The part's output, in a pass of the network or of the model alone."""
        return self(x, x)[0] if self.current.run is None else self.current.run(self, x)

    def extra_repr(self) -> str:
        return f"index={self.index}, has_residual={self.has_residual}"


class RunParts:
    """What a block of the model runs in the place of its own forward: its parts, one after the other."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __call__(self, x: Tensor, *args, **kwargs) -> Tensor:
        if any(value is not None and value is not False for value in (*args, *kwargs.values())):
            raise UserError(f"{type(self.block).__name__}: takes more than one input, so it cannot have a gate")
        for part in getattr(self.block, GATED):
            x = part.run(x)
        return x


class _AllExited(Exception):
    """No sample is left, so the rest of the model need not run."""


class AdaptedNetwork(GatedNetwork):
    """A model whose blocks take gates. Its weights keep the model's names; those of the gates are added."""

    def __init__(self, model: nn.Module, current: SimpleNamespace, *, num_classes: int, detach_target: bool) -> None:
        nn.Module.__init__(self)
        self.model, self.classes, self.detach_target = model, num_classes, detach_target
        self.__dict__["current"] = current  # what parts call while a pass runs
        self._register_load_state_dict_pre_hook(_add_prefix)

    @property
    def blocks(self) -> list[GatedPart]:
        """The parts of the model's blocks, in the order in which they run."""
        found = (module for module in self.model.modules() if isinstance(module, GatedPart))
        return sorted(found, key=lambda part: part.index)

    @property
    def num_classes(self) -> int:
        return self.classes

    def run(self, images: Tensor, after_block: AfterBlock | None = None) -> Tensor | None:
        left, has_gradients = images, torch.is_grad_enabled()

        def run_part(part: GatedPart, x: Tensor) -> Tensor:
            nonlocal left
            if not torch.compiler.is_compiling():
                _require_samples(part, x, len(left))
            if self.training and has_gradients and not torch.is_grad_enabled():
                words = "runs without gradients, so its gate learns nothing; checkpoint with use_reentrant=False"
                raise UserError(f"{type(part.block).__name__}: {words}")
            y, routing = part(x, left)
            stays = None if after_block is None else after_block(Step(part.index, part, x, y, routing))
            if stays is None:
                return y
            left = left[stays]
            if not torch.compiler.is_compiling() and len(left) == 0:
                raise _AllExited
            return y[stays]

        with _running(self.current, run_part):
            try:
                scores = self.model(images)
            except _AllExited:
                return None
        if not isinstance(scores, Tensor):
            raise UserError(f"{type(self.model).__name__}: must return class scores alone, in training too")
        return scores

    def state_dict(self, *args, **kwargs) -> dict[str, Any]:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True, assign: bool = False) -> Any:
        return self.model.load_state_dict(state_dict, strict, assign)


def _require_samples(part: GatedPart, x: Tensor, number: int) -> None:
    if len(x) != number:
        words = f"its input has {len(x)} samples of {number} images, so no gate decides for each image"
        raise UserError(f"{type(part.block).__name__}: {words}")


@contextmanager
def _running(current: SimpleNamespace, run_part: Callable[[GatedPart, Tensor], Tensor]) -> Iterator[None]:
    current.run = run_part
    try:
        yield
    finally:
        current.run = None


def _add_prefix(state_dict: dict[str, Any], prefix: str, *args) -> None:
    """Gives the weights in a larger module's state_dict the names that they have inside."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}model.{key.removeprefix(prefix)}"] = state_dict.pop(key)


def add_gates(
    model: nn.Module,
    gate: str = "cosine",
    *,
    example: Tensor,
    consistency: bool = True,
    detach_target: bool = False,
    **options: Any,
) -> AdaptedNetwork:
    """Returns a copy of the model with a gate in every residual block that an adapter knows.

    `example` are two images or more as the model takes them, (B, C, H, W). `options` are keys of the gate's config, as
    in `gamma=-2.5, polarity="novelty"`; `consistency=False` saves the consistency term's work where λ_cons is 0. A
    model that would not give the same scores with all gates open is refused.
    """
    network = adapted(model, example, consistency=consistency, detach_target=detach_target)
    fill_slots(network, GateMaker(gate_config(gate, **options), [True] * len(network.blocks)))
    return network


def fill_slots(network: AdaptedNetwork, make_gate: Callable[[int], Gate | None]) -> None:
    """Gives every part the gate that is made for the channels of its input."""
    like = next(parameter for parameter in network.parameters() if parameter.is_floating_point())
    for part in network.blocks:
        part.gate = make_gate(part.channels) if part.has_residual else None
        if part.gate is not None:
            part.gate.to(like).train(network.training)


def adapted(
    model: nn.Module, example: Tensor, *, consistency: bool = True, detach_target: bool = False
) -> AdaptedNetwork:
    """Returns a copy of the model as a network whose blocks have no gates yet, if that gives the model's scores."""
    if not isinstance(model, nn.Module):
        raise UserError(f"{type(model).__name__}: must be a torch.nn.Module")
    if not isinstance(example, Tensor) or example.dim() != 4 or len(example) < 2:
        raise UserError("example: must be two images or more as the model takes them, a tensor (B, C, H, W)")
    if any(isinstance(module, Gate | GatedNetwork) for module in model.modules()):
        raise UserError(f"{type(model).__name__}: its blocks have been adapted already; give the model itself")
    model = copy.deepcopy(model)
    _blocks_of(model)
    if turned_off := _turn_off_stochastic_depth(model):
        warnings.warn(f"stochastic depth is set to 0 in {turned_off} layers: gates skip instead", stacklevel=3)
    if example.device.type != "meta":  # there are no scores to compare
        probe = copy.deepcopy(model)
        _randomise_zeros(probe)  # or a block that starts as the identity would look right whatever its parts are
        _require_equal(_scores(probe, example), *_traced(probe, example)[:2])
    network, _, tracer = _traced(model, example, detach_target)
    tracer.warn()
    for part in network.blocks:
        part.consistency = consistency
    return network


def _scores(model: nn.Module, example: Tensor) -> Tensor:
    was_training = [module for module in model.modules() if module.training]
    try:
        with torch.no_grad():
            scores = model.eval()(example)
    except (RuntimeError, ValueError, AssertionError, TypeError, IndexError) as error:
        words = f"takes no images of shape {tuple(example.shape[1:])}"
        if any(isinstance(module, GatedPart) for module in model.modules()):
            words = "does not run with its blocks as their adapters have them"
        raise UserError(f"{type(model).__name__}: {words}: {' '.join(str(error).split())[:200]}") from error
    for module in was_training:  # each for itself: a frozen BatchNorm stays in evaluation mode
        module.training = True
    if not isinstance(scores, Tensor) or scores.dim() != 2 or len(scores) != len(example):
        raise UserError(f"{type(model).__name__}: must return class scores, a tensor (B, K)")
    return scores


def _traced(model: nn.Module, example: Tensor, detach_target: bool = False) -> tuple[AdaptedNetwork, Tensor, "_Tracer"]:
    """Puts the model's blocks into parts, in place, and runs it once to see in which order they come."""
    current = SimpleNamespace(run=None)
    for block in _blocks_of(model):
        before = list(getattr(block, GATED, ()))  # of a compiled model, some without F
        block.add_module(GATED, nn.ModuleList())
        block.forward = RunParts(block)
        for place in range(len(adapter_of(block)(block))):
            part = GatedPart(block, place, current)
            part.has_residual = not before or before[place].has_residual
            getattr(block, GATED).append(part.train(block.training))
    tracer = _Tracer(len(example))
    with _running(current, tracer):
        scores = _scores(model, example)
    for block in {id(part.block): part.block for part in tracer.order}.values():
        tracer.mark_own_modules(block)
    network = AdaptedNetwork(model, current, num_classes=scores.shape[1], detach_target=detach_target)
    network.training = model.training
    return network, scores, tracer


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    """The model's blocks that have parts, if there are any."""
    known = [(module, adapter) for module in model.modules() if (adapter := adapter_of(module)) is not None]
    blocks = [block for block, adapter in known if adapter(block)]
    if not blocks:
        unknown = sorted({type(module).__name__ for module in model.modules() if any(module.children())})
        words = f"{type(model).__name__}: has no residual block that an adapter knows"
        raise UserError(f"{words}; register yours with @cosinegate.parts(...); it is made of {', '.join(unknown[:12])}")
    return blocks


class _Tracer:
    """Runs the parts of one pass: notes their order and shapes, and which of a block's modules run where."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.running: str | None = None  # the class of the block whose part runs
        self.order: list[GatedPart] = []
        self.in_f: dict[GatedPart, set[str]] = {}
        self.elsewhere: dict[int, set[str]] = {}  # by the block's id
        self.zero: set[str] = set()  # classes of blocks whose F is zero, or lost beside s
        self.lost: set[str] = set()

    def __call__(self, part: GatedPart, x: Tensor) -> Tensor:
        name = type(part.block).__name__
        if part.index >= 0:
            raise UserError(f"{name}: runs twice in one pass, so it cannot have a gate")
        if self.running is not None:
            raise UserError(f"{name}: runs inside the F of a {self.running}, so it cannot have a gate")
        _require_samples(part, x, self.batch)
        part.index = len(self.order)
        self.order.append(part)
        self.running = name
        y = self._open(part, x) if part.has_residual else part.plain(x)
        self.running = None
        part.input_shape, part.output_shape = x.shape[1:], y.shape[1:]
        return y

    def _open(self, part: GatedPart, x: Tensor) -> Tensor:
        name, layers, before = type(part.block).__name__, part.part, _version(x)
        with _called(part.block) as in_f:
            r = _run(layers.residual, x)
        if _version(x) != before:
            raise UserError(f"{name}: F writes over its input (an in-place layer first?), so it cannot be skipped")
        with _called(part.block) as elsewhere:
            s = _run(layers.shortcut, x)
            if s.shape != r.shape:
                raise UserError(f"{name}: s has the shape {tuple(s.shape)} and F {tuple(r.shape)}: must be the same")
            self._measure(name, s, r)
            y = _run(layers.activation, s + r)
        self.in_f[part] = in_f
        self.elsewhere.setdefault(id(part.block), set()).update(elsewhere)
        return y

    def _measure(self, name: str, s: Tensor, r: Tensor) -> None:
        if s.device.type == "meta":
            return
        square_s, square_r = (x.float().flatten(1).square().sum(1) for x in (s, r))
        if (square_r <= geometry.TINY).all():
            self.zero.add(name)
        elif (square_r < LOST * square_s).all():
            self.lost.add(name)

    def warn(self) -> None:
        """Says where CIR or the consistency term has nothing to go by at first."""
        if self.zero:
            words = "F(x) starts at zero, so CIR is 1 for every image until F has learned"
            warnings.warn(f"{', '.join(sorted(self.zero))}: {words}", stacklevel=5)
        if self.lost:
            words = "F(x) is so small beside s (LayerScale?) that the consistency term teaches nothing in float32"
            warnings.warn(f"{', '.join(sorted(self.lost))}: {words}", stacklevel=5)

    def mark_own_modules(self, block: nn.Module) -> None:
        """Notes which modules may go with which part's F."""
        siblings = [part for part in self.order if part.block is block]
        for part in self.in_f.keys() & set(siblings):
            others = (self.in_f[other] for other in self.in_f.keys() & set(siblings) - {part})
            part.only_in_f = self.in_f[part].difference(self.elsewhere[id(block)], *others)


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version  # counts what was written in place


@contextmanager
def _called(block: nn.Module) -> Iterator[set[str]]:
    """The names of the block's children of which a module runs meanwhile."""
    names: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: names.add(name))
        for name, child in block.named_children()
        if name != GATED
        for module in child.modules()
    ]
    try:
        yield names
    finally:
        for hook in hooks:
            hook.remove()


def _require_equal(expected: Tensor, network: AdaptedNetwork, scores: Tensor) -> None:
    if not torch.equal(expected, scores):
        apart = (expected - scores).abs().max().item()
        blocks = ", ".join(sorted({type(part.block).__name__ for part in network.blocks}))
        words = f"with all gates open the scores differ by up to {apart:.2g}: an adapter does not fit its block"
        raise UserError(f"{type(network.model).__name__}: {words} ({blocks})")


@torch.no_grad()
def _randomise_zeros(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.abs().max() < 1e-3:
            drawn = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(drawn.to(parameter))


def _turn_off_stochastic_depth(model: nn.Module) -> int:
    """Returns how many layers were on."""
    for module in model.modules():
        adapter_of(module)  # imports what its library turns off
    number = 0
    for module in model.modules():
        turn_off = TURN_OFF.get(type(module))
        if turn_off is not None and (vars(module).get("drop_prob") or vars(module).get("p")):
            turn_off(module)
            number += 1
    return number


def prune(network: AdaptedNetwork) -> None:
    """Takes out the modules that ran in the F of removed parts alone, in place."""
    for part in network.blocks:
        if not part.has_residual:
            removed = {name: getattr(part.block, name) for name in part.only_in_f}
            for name in removed:
                setattr(part.block, name, None)
            if not part.is_made():
                for name, module in removed.items():
                    setattr(part.block, name, module)
            if not any(sibling.has_residual for sibling in getattr(part.block, GATED)):
                for name, _ in list(part.block.named_parameters(recurse=False)):  # such as a LayerScale
                    setattr(part.block, name, None)


def plain(network: AdaptedNetwork) -> nn.Module:
    """Returns a copy of the model alone, for a network without gates: its own blocks, less what was removed."""
    model = copy.deepcopy(network.model)
    for name, block in list(model.named_modules()):
        if GATED not in block._modules:
            continue
        closed = [not part.has_residual for part in getattr(block, GATED)]
        if not any(closed):
            del block.forward, block._modules[GATED]
        elif all(closed) and not any(True for _ in block.parameters()) and _is_identity(block):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, nn.Identity())
    return model


def _is_identity(block: nn.Module) -> bool:
    """Whether a block without F returns its input."""
    found = [layer for part in getattr(block, GATED) for layer in (*part.part.shortcut, *part.part.activation)]
    return all(layer is None or isinstance(layer, nn.Identity) for layer in found)
