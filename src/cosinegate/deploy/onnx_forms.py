"""The deployed network as ONNX, with its routes left open: nothing of a route is fixed by tracing.

`branch` takes one image: an If for every gate, of which only the taken branch runs. `batch` takes any number of images:
NonZero, Gather and Scatter select the open ones. `dense` is the same network without its gates. Where images leave the
last stage, the Ifs lie in one another, and a batch gets smaller from block to block: of an image that has left nothing
is looked at or moved again.
"""

import contextlib
import copy
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from cosinegate.deploy.eyes import ExitEye, Eye, Mean, Statistics
from cosinegate.deploy.folded import FoldedBlock, FoldedNetwork
from cosinegate.errors import UserError
from cosinegate.files import replacing
from cosinegate.gates import Seen
from cosinegate.gates.exit import ExitClassifier
from cosinegate.networks.block import PadShortcut


class OnnxForm(nn.Module):
    """Gives class scores and, where there are gates, what they decided (B, G)."""

    def __init__(self, network: FoldedNetwork) -> None:
        super().__init__()
        self.network = copy.deepcopy(network)
        for block in self.network.blocks:
            if isinstance(block.shortcut, PadShortcut):
                block.shortcut = as_convolution(block.shortcut, block.inputs)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        x, seen = self.network.enter(images), self.network.begin(images)
        blocks, gates = self.network.blocks, []
        exits = next((place for place, block in enumerate(blocks) if isinstance(block.eye, ExitEye)), len(blocks))
        for block in blocks[:exits]:
            if block.eye is not None:
                seen = look(block.eye, x, seen)
            if block.removed:
                x = block.identity(x)
            elif block.head is None:
                x = block.full(x)
            elif block.head.compares:
                x, is_open = block.compared(x)
                gates.append(is_open)
            else:
                is_open = block.head(seen)
                gates.append(is_open)
                x = self.route(block, is_open, x)
        scores, stayed = self.leave(list(blocks[exits:]), x)
        gates += [stayed] if any(block.head is not None for block in blocks[exits:]) else []
        return (scores, torch.cat(gates, dim=1)) if gates else (scores,)

    def route(self, block: FoldedBlock, is_open: Tensor, x: Tensor) -> Tensor:
        raise NotImplementedError

    def leave(self, blocks: list[FoldedBlock], x: Tensor) -> tuple[Tensor, Tensor]:
        """The class scores (B, K) with which each image leaves, and which of the gates of these blocks, of which each
        has its exit before it, were open to it (B, G)."""
        raise NotImplementedError

    def classify(self, x: Tensor) -> Tensor:
        """As the network does, by those reductions."""
        head = self.network.head
        return head(torch.cat(_statistics(x), dim=1) if isinstance(head, ExitClassifier) else x.mean((2, 3)))


class BranchForm(OnnxForm):
    def route(self, block: FoldedBlock, is_open: Tensor, x: Tensor) -> Tensor:
        return torch.cond(is_open.reshape([]), in_branch(block), lambda x: block.identity(x).clone(), (x,))

    def leave(self, blocks: list[FoldedBlock], x: Tensor) -> tuple[Tensor, Tensor]:
        number = sum(block.head is not None for block in blocks)

        def go(scores: Tensor, passed: int) -> tuple[Tensor, Tensor]:
            ones = scores.new_ones(1, passed, dtype=torch.bool)
            return scores, torch.cat((ones, scores.new_zeros(1, number - passed, dtype=torch.bool)), dim=1)

        def onward(blocks: list[FoldedBlock], x: Tensor, passed: int) -> tuple[Tensor, Tensor]:
            if not blocks:
                return go(self.classify(x), passed)
            block, *later = blocks
            if block.head is None:
                return onward(later, x if block.removed else block.full(x), passed)

            def stay(x: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
                return onward(later, in_branch(block)(x), passed + 1)

            seen = look(block.eye, x, None)
            is_open = block.head(seen)
            return torch.cond(is_open.reshape([]), stay, lambda x, said: go(said.clone(), passed), (x, seen[1]))

        return onward(blocks, x, 0)


class BatchForm(OnnxForm):
    def route(self, block: FoldedBlock, is_open: Tensor, x: Tensor) -> Tensor:
        computed = is_open.squeeze(1).nonzero().squeeze(1)
        return block.identity(x).index_copy(0, computed, block.full(x[computed]))

    def leave(self, blocks: list[FoldedBlock], x: Tensor) -> tuple[Tensor, Tensor]:
        gates = [x.new_zeros(x.shape[0], 0, dtype=torch.bool)]
        if not blocks:
            return self.classify(x), gates[0]
        nobody = torch.zeros_like(x[:, :1, 0, 0], dtype=torch.bool)
        here = torch.ones_like(nobody).nonzero()[:, 0]  # which images the maps in x are of
        scores = x.new_zeros(x.shape[0], self.network.classes)
        for block in blocks:
            if block.head is not None:
                seen = look(block.eye, x, None)
                scores = scores.index_copy(0, here, seen[1])
                stays = block.head(seen).squeeze(1).nonzero().squeeze(1)
                x, here = x[stays], here[stays]
                gates.append(nobody.index_fill(0, here, True))
            if not block.removed:
                x = block.full(x)
        return scores.index_copy(0, here, self.classify(x)), torch.cat(gates, dim=1)


def as_convolution(pad: PadShortcut, channels: int) -> nn.Conv2d:
    """The same copy of pixels as a 1x1 convolution, which onnxruntime fuses with the addition; slicing takes longer."""
    conv = nn.Conv2d(channels, channels + pad.new_channels, 1, pad.stride, bias=False).requires_grad_(False)
    conv.weight.zero_()[:channels, :, 0, 0] = torch.eye(channels)
    return conv


def in_branch(block: FoldedBlock) -> Callable[[Tensor], Tensor]:
    """F and what follows it, behind a pool of one pixel, which changes nothing: onnxruntime keeps its result in the
    convolutions' layout, and so makes the addition and the ReLU a part of the second one, as it does outside branches.
    """
    return lambda x: block.full(nn.functional.max_pool2d(x, 1))


def _statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `geometry.pooled_statistics`, in as few operators as can be: for one image each takes as long as any other."""
    mean = x.mean((2, 3), keepdim=True)
    std = torch.linalg.vector_norm(x - mean, dim=(2, 3)) / math.sqrt(x.shape[2] * x.shape[3])
    return mean.flatten(1), std, x.amax((2, 3))


def look(eye: Eye, x: Tensor, seen: Seen) -> Seen:
    """What the eye sees, by those reductions."""
    if isinstance(eye, Statistics):
        return torch.cat(_statistics(x), dim=1)
    if isinstance(eye, ExitEye):
        return eye.scored(torch.cat(_statistics(x), dim=1), seen)
    return x.mean((2, 3)) if isinstance(eye, Mean) else eye(x, seen)


def require_exportable(network: FoldedNetwork, path: Path) -> None:
    """Ends with one line where a gate decides by something that ONNX has no operators for."""
    if any(block.eye is not None and not block.eye.exports for block in network.blocks):
        words = "its gates hash an image's bits, for which ONNX has no operators: it cannot be exported"
        raise UserError(f"{path}: {words}; dynamic=round settles them, and the skipping runtime runs it as it is")


def write_onnx(form: OnnxForm, path: Path, shape: tuple[int, int, int], one_image: bool) -> None:
    """Exports for images (C, H, W), one or any number of them, and checks the file."""
    form = form.eval().to(memory_format=torch.contiguous_format)
    images = torch.zeros(1 if one_image else 3, *shape)
    dynamic = None if one_image else ({0: torch.export.Dim("batch", min=1)},)
    names = ["scores", "gates"] if any(block.head is not None for block in form.network.blocks) else ["scores"]
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
    """Scores and decisions, `batch` images at a time."""
    parts = [model.run(None, {"images": images[i : i + batch]}) for i in range(0, len(images), batch)]
    scores, *gates = (np.concatenate(fields) for fields in zip(*parts, strict=True))
    return scores, gates[0] if gates else None


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Exporter and quantiser tell their steps on stdout and in the log, and inner deprecations as warnings."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled)
