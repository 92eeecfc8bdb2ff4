"""The engines of a benchmark, torch and onnxruntime, each with several ways to run a network."""

import shutil
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cosinegate.deploy.card import Network
from cosinegate.deploy.exits import EarlyExitNetwork
from cosinegate.deploy.fold import folded
from cosinegate.deploy.int8 import CALIBRATION_IMAGES, write_int8
from cosinegate.deploy.kernels import kernel_times, operator_times
from cosinegate.deploy.onnx_forms import BatchForm, OneImageForm, has_one_image_form, session, write_onnx
from cosinegate.deploy.runtime import Runtime
from cosinegate.terminal import console

PARTS = (32, 64, 128)  # images of a part of a batch, whose maps stay in cache
IMAGES_A_ROUND = 256  # with fewer, the routes of a round's images move its time
DENSE = "dense"
TORCH_COMPILE = "torch.compile"  # "compiled" is what is left when settled gates are removed
FEW = 64  # images; below, a call takes longer than what it computes

Run = Callable[[Tensor], Any]


@dataclass
class Model:
    """A network to time, with its FLOPs over the dense network's."""

    network: Network
    counted: float
    executed: float
    folder: Path | None  # of the run that its latency belongs to
    is_own: bool = False  # whether it is the run's that is timed, and not one beside it

    @property
    def routes(self) -> bool:
        """Returns whether images take different routes through it."""
        return isinstance(self.network, EarlyExitNetwork) or self.network.has_gates


class Engines:
    """Every model on both engines, in every way that fits the batch size."""

    def __init__(
        self,
        models: dict[str, Model],
        *,
        images: Tensor,
        held_out: Tensor,
        scratch: Path,
        threads: int,
        torch_compile: bool,
    ) -> None:
        self.threads, self.images, self.torch_compile, self.scratch = threads, images, torch_compile, scratch
        self.own = [name for name, model in models.items() if model.is_own or name == DENSE]
        self.models = models
        self.folded = {name: folded(model.network) for name, model in models.items()}
        shape = tuple(images.shape[1:])
        console.say("exporting to ONNX")
        for name, network in self.folded.items():
            write_onnx(BatchForm(network), scratch / f"{name}.onnx", shape)
            if has_one_image_form(network):
                write_onnx(OneImageForm(network), scratch / f"{name}-one.onnx", shape)
            if name in self.own:
                write_int8(scratch / f"{name}.onnx", scratch / f"{name}-int8.onnx", held_out[:CALIBRATION_IMAGES])
        self.sessions = {
            (path.stem, number): session(path, number) for path in scratch.glob("*.onnx") for number in {1, threads}
        }
        self.pool = ThreadPoolExecutor(threads)

    def at(self, batch: int) -> dict[tuple[str, str], dict[str, Run]]:
        """Returns the ways to run each (model, engine) at a batch size. Earlier torch.compile results are dropped."""
        torch._dynamo.reset()
        ways: dict[tuple[str, str], dict[str, Run]] = {}
        for name, network in self.folded.items():
            ways[name, "torch"] = self._torch(network, batch) | self._torch_compiled(network, batch)
            ways[name, "onnxruntime"] = self._onnx(name, batch)
            if (f"{name}-one", 1) in self.sessions:
                ways[name, "onnxruntime"] |= self._one_by_one(f"{name}-one", batch)
            if (f"{name}-int8", 1) in self.sessions:
                ways[name, "onnxruntime int8"] = self._onnx(f"{name}-int8", batch)
        return ways

    def kernels(self, batch: int, images: Tensor) -> dict[str, dict[str, dict[str, float]]]:
        """Returns ms an image by kind of operator, of the dense network and the run's, on both engines."""
        some = images[: max(batch, IMAGES_A_ROUND)].contiguous()
        files = {name: f"{name}.onnx" for name in self.own}
        if batch == 1:
            files |= {name: f"{name}-one.onnx" for name in self.own if (f"{name}-one", 1) in self.sessions}
        on_onnx = {n: kernel_times(self.scratch / file, some.numpy(), batch, self.scratch) for n, file in files.items()}
        some = some.contiguous(memory_format=torch.channels_last)
        on_torch = {name: operator_times(Runtime(self.folded[name]), some, batch) for name in self.own}
        return {"onnxruntime": on_onnx, "torch": on_torch}

    def _torch(self, network: Network, batch: int) -> dict[str, Run]:
        runtime = Runtime(network)
        runtime.prepare(self.images[:1])
        ways: dict[str, Run] = {"whole": runtime}
        for size in PARTS:
            if size < batch:
                ways[f"by {size}"] = lambda images, size=size: [runtime(part) for part in images.split(size)]
        return ways

    def _torch_compiled(self, network: Network, batch: int) -> dict[str, Run]:
        """Returns the network through torch.compile, if all images take one route."""
        if not self.torch_compile or isinstance(network, EarlyExitNetwork) or network.has_gates:
            return {}
        images = self.images[:batch].contiguous(memory_format=torch.channels_last)
        scores = BatchForm(network).eval()
        forms = {TORCH_COMPILE: torch_compiled(scores, images)}
        if forms[TORCH_COMPILE] is not None and batch < FEW:
            forms[f"{TORCH_COMPILE}, not frozen"] = torch_compiled(scores, images, freezing=False)
        return {way: form for way, form in forms.items() if form is not None}

    def _onnx(self, name: str, batch: int) -> dict[str, Run]:
        whole = self.sessions[name, self.threads]
        ways: dict[str, Run] = {"whole": lambda images: whole.run(None, {"images": images.numpy()})}
        for size in PARTS:
            if size * self.threads <= batch and size < batch:
                ways[f"by {size}" if self.threads == 1 else f"{size} a thread"] = self._in_parts(name, size)
        return ways

    def _one_by_one(self, name: str, batch: int) -> dict[str, Run]:
        """Returns the ways to run the ONNX file that takes one image."""
        together = self.sessions[name, self.threads]
        if batch == 1:
            return {"one image": lambda images: together.run(None, {"images": images.numpy()})}
        return {"image by image": self._in_parts(name, 1)}

    def _in_parts(self, name: str, size: int) -> Run:
        """Returns a function that runs a batch in parts, each on one thread."""
        alone, pool = self.sessions[name, 1], self.pool.map if self.threads > 1 else map

        def run(images: Tensor) -> list[Any]:
            return list(pool(lambda part: alone.run(None, {"images": part.numpy()}), images.split(size)))

        return run


def torch_compiled(network: nn.Module, images: Tensor, freezing: bool = True) -> Run | None:
    """Returns the network through torch.compile for one batch size, or None if there is no compiler or it fails.

    `freezing` makes the weights constants of the compiled code.
    """
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        console.say("there is no C++ compiler: torch.compile is left out")
        return None
    import torch._inductor.config as inductor

    forward = type(network).forward  # torch.compile keeps forms by code: that of another network would be tried first
    own = types.FunctionType(forward.__code__.replace(), forward.__globals__)
    compiled = torch.compile(types.MethodType(own, network), dynamic=False)

    @torch.inference_mode()
    def run(part: Tensor) -> Tensor:
        return compiled(part)

    try:
        with inductor.patch(freezing=freezing):  # while it compiles, which is at the first call
            run(images)
    except Exception as error:
        console.say(f"torch.compile failed and is left out: {' '.join(str(error).split())[:120]}")
        return None
    return run
