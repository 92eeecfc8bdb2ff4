"""The batch form with int8 convolutions, for edge devices, by onnxruntime's own tools."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor

from cosinegate.deploy.onnx_forms import quietly
from cosinegate.runs.files import replacing

CALIBRATION_IMAGES = 512  # whose activations give the convolutions their scales


class _Images(CalibrationDataReader):
    def __init__(self, images: Tensor) -> None:
        self.batches = iter(images.contiguous().split(64))

    def get_next(self) -> dict[str, np.ndarray] | None:
        batch = next(self.batches, None)
        return None if batch is None else {"images": batch.numpy()}


def write_int8(source: Path, path: Path, images: Tensor) -> None:
    """Convolutions in int8, one scale a channel; gates stay in float32, for a route is a comparison.

    Weights have seven bits: where a processor has no VNNI, sums of eight-bit products saturate, and a CIFAR-10 run had
    80.1% of the held-out images right instead of 87.8%.
    """
    with quietly(), tempfile.TemporaryDirectory() as scratch, _reading_back(Path(scratch), source.stat().st_size):
        prepared, quantised = Path(scratch) / "prepared.onnx", Path(scratch) / "quantised.onnx"
        quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
        convolutions = [node for node in onnx.load(prepared).graph.node if node.op_type == "Conv"]
        quantize_static(
            str(prepared),
            str(quantised),
            _Images(images),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["Conv"],
            nodes_to_exclude=[node.name for node in convolutions if is_of_gate(node)],
            per_channel=True,
            reduce_range=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            extra_options={"ActivationSymmetric": False, "WeightSymmetric": True},
        )
        content = quantised.read_bytes()
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def _reading_back(scratch: Path, size: int) -> Iterator[None]:
    """onnxruntime's tools do not notice a full disk before they read what they wrote."""
    try:
        yield
    except Exception as error:
        if shutil.disk_usage(scratch).free < 4 * size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(scratch)) from error
        raise


def is_of_gate(convolution: onnx.NodeProto) -> bool:
    """By the name of its weights, which is that of their module."""
    return ".gate." in convolution.input[1]
