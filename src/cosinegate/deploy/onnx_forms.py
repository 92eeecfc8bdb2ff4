"""The deployed network as ONNX, with its routes left open: nothing of a route is fixed by tracing.

`network.onnx` takes any number of images: NonZero and Gather select those that a gate opens or that pass an exit. With
exits there is `one.onnx` too, for one image: an If at every exit, of which only the taken branch runs.
"""

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from cosinegate.deploy.card import Network
from cosinegate.deploy.exits import EarlyExitNetwork
from cosinegate.gates.controls.random import RandomGate
from cosinegate.networks import GatedNetwork, ResidualBlock
from cosinegate.networks.adapt import AdaptedNetwork
from cosinegate.networks.block import PadShortcut
from cosinegate.networks.network import Step
from cosinegate.runs.files import replacing
from cosinegate.terminal.errors import UserError

LARGEST_BATCH = 2**63 - 2  # that exits allow: of one more the network would be traced a second time


class BatchForm(nn.Module):
    """Class scores (B, K) of any number of images and, where there are gates or exits, the route (B, N)."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = prepared(network)

    @property
    def routes(self) -> bool:
        return isinstance(self.network, EarlyExitNetwork) or self.network.has_gates

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        if isinstance(self.network, EarlyExitNetwork):
            return self._with_exits(images)
        output = self.network(images)
        return (output.logits, output.routing.gates > 0.5) if self.routes else (output.logits,)

    def _with_exits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The batch shrinks at every exit: nothing of an image that has exited is computed or moved again."""
        none = torch.zeros_like(images[:, 0, 0, 0], dtype=torch.bool)  # (B,)
        here = torch.ones_like(none).nonzero()[:, 0]  # which images are left
        scores, gates = images.new_zeros(images.shape[0], self.network.num_classes), []

        def exit_after(step: Step) -> Tensor | None:
            nonlocal here, scores
            if step.routing is None:
                gates.append(none if step.block.residual is None else none.index_fill(0, here, True))
            else:
                gates.append(none.index_copy(0, here, step.routing.decision.gate > 0.5))
            if (at := self.network.exit_after(step.index)) is None:
                return None
            answer, logit = at(step.block.as_map(step.y))
            scores = scores.index_copy(0, here, answer)
            stays = (logit > self.network.threshold).nonzero().squeeze(1)
            here = here[stays]
            return stays

        last = self.network.network.run(images, exit_after)
        return scores.index_copy(0, here, last), torch.stack(gates, dim=1)


class OneImageForm(nn.Module):
    """The same of one image, for a network with exits and without gates: an If at every exit."""

    def __init__(self, network: EarlyExitNetwork) -> None:
        super().__init__()
        self.network = prepared(network)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        network, blocks = self.network, self.network.blocks

        def route(computed: int, like: Tensor) -> Tensor:
            """(1, N): the first blocks computed the image, but for those that were removed."""
            columns = [index < computed and block.residual is not None for index, block in enumerate(blocks)]
            yes, no = like.new_ones(1, 1, dtype=torch.bool), like.new_zeros(1, 1, dtype=torch.bool)
            return torch.cat([yes if column else no for column in columns], dim=1)

        def onward(x: Tensor, start: int) -> tuple[Tensor, Tensor]:
            """From the input of block `start` on."""
            for index in range(start, len(blocks)):
                x = blocks[index].plain(_outside_layout(x) if index == start > 0 else x)
                if (at := network.exit_after(index)) is not None:
                    scores, logit = at(x)
                    is_sure = logit.reshape([]) <= network.threshold

                    def exits(x: Tensor, scores: Tensor, index: int = index) -> tuple[Tensor, Tensor]:
                        return scores.clone(), route(index + 1, scores)

                    def stays(x: Tensor, scores: Tensor, index: int = index) -> tuple[Tensor, Tensor]:
                        return onward(x, index + 1)

                    return torch.cond(is_sure, exits, stays, (x, scores))
            scores = network.network.classify(x)
            return scores, route(len(blocks), scores)

        return onward(network.network.stem(images), 0)


def has_one_image_form(network: Network) -> bool:
    """Whether a branch can be taken at its exits: in our own networks without gates."""
    return (
        isinstance(network, EarlyExitNetwork)
        and not network.has_gates
        and not isinstance(network.network, AdaptedNetwork)
    )


def prepared(network: Network) -> Network:
    """A copy whose padded shortcuts are convolutions, as onnxruntime likes them."""
    copied = copy.deepcopy(network)
    if isinstance(copied.network if isinstance(copied, EarlyExitNetwork) else copied, AdaptedNetwork):
        return copied
    channels = _stem_channels(copied.network if isinstance(copied, EarlyExitNetwork) else copied)
    for block in copied.blocks:
        inputs, channels = channels, _outputs(block, channels)
        if isinstance(block.shortcut, PadShortcut):
            block.shortcut = as_convolution(block.shortcut, inputs)
    return copied


def _stem_channels(network: GatedNetwork) -> int:
    return next(layer for layer in network.stem.modules() if isinstance(layer, nn.Conv2d)).out_channels


def _outputs(block: ResidualBlock, inputs: int) -> int:
    """The channels of a block's output."""
    if isinstance(block.shortcut, PadShortcut):
        return inputs + block.shortcut.new_channels
    layers = [layer for layer in block.shortcut.modules() if isinstance(layer, nn.Conv2d)]
    return layers[-1].out_channels if layers else inputs


def as_convolution(pad: PadShortcut, channels: int) -> nn.Conv2d:
    """The same copy of pixels as a 1x1 convolution, which onnxruntime fuses with the addition; slicing takes longer."""
    conv = nn.Conv2d(channels, channels + pad.new_channels, 1, pad.stride, bias=False).requires_grad_(False)
    conv.weight.zero_()[:channels, :, 0, 0] = torch.eye(channels)
    return conv


def _outside_layout(x: Tensor) -> Tensor:
    """x behind a pool of one pixel, which changes nothing: onnxruntime keeps its result in the convolutions' layout,
    and so fuses the addition and the ReLU with the second one inside a branch too.
    """
    return nn.functional.max_pool2d(x, 1)


def require_exportable(network: Network, path: Path) -> None:
    """Ends with one line where a gate decides by something that ONNX has no operators for."""
    if any(isinstance(block.gate, RandomGate) for block in network.blocks):
        words = "its gates hash an image's bits, for which ONNX has no operators: it cannot be exported"
        raise UserError(f"{path}: {words}; dynamic=round settles them")


def write_onnx(form: BatchForm | OneImageForm, path: Path, shape: tuple[int, int, int]) -> None:
    """Exports for images (C, H, W), one or any number of them as the form takes, and checks the file."""
    form, one_image = form.eval().to(memory_format=torch.contiguous_format), isinstance(form, OneImageForm)
    images = torch.zeros(1 if one_image else 3, *shape)
    dynamic = None if one_image else ({0: torch.export.Dim("batch", min=1, max=LARGEST_BATCH)},)
    names = ["scores", "route"] if one_image or form.routes else ["scores"]
    with quietly():
        program = torch.onnx.export(
            form, (images,), dynamo=True, input_names=["images"], output_names=names, dynamic_shapes=dynamic
        )
    model = keep_weights_in_branches(program.model_proto)
    onnx.checker.check_model(model)
    with replacing(path) as file:
        file.write(model.SerializeToString())


def keep_weights_in_branches(model: onnx.ModelProto) -> onnx.ModelProto:
    """Moves what only a branch uses into it. onnxruntime lays out a convolution for speed only where its weights are
    constants of the same graph. With every gate open it took 1.16 of the dense network's time so, and 1.46 before.
    """
    weights = {weight.name: weight for weight in model.graph.initializer}
    del model.graph.initializer[:]
    _settle(model.graph, weights)
    return model


def _settle(graph: onnx.GraphProto, weights: dict[str, onnx.TensorProto]) -> None:
    """Gives each graph, and the branches in it, those of the weights that its own nodes use."""
    used = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    graph.initializer.extend(weight for name, weight in weights.items() if name in used)
    others = {name: weight for name, weight in weights.items() if name not in used}
    for node in graph.node:
        for branch in (attribute.g for attribute in node.attribute if attribute.HasField("g")):
            _settle(branch, others)


def session(path: Path, threads: int, profile: Path | None = None) -> onnxruntime.InferenceSession:
    """`profile`: how the name of the profiler's file begins."""
    options = onnxruntime.SessionOptions()
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_onnx(
    model: onnxruntime.InferenceSession, images: np.ndarray, batch: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Scores and, where there are any, routes, `batch` images at a time."""
    parts = [model.run(None, {"images": images[i : i + batch]}) for i in range(0, len(images), batch)]
    scores, *routes = (np.concatenate(fields) for fields in zip(*parts, strict=True))
    return scores, routes[0] if routes else None


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silences the exporter and the quantiser, which print their steps, log them, and warn of deprecations inside."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled)
