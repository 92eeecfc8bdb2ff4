"""Writes the files of commands, only over files that the same command wrote."""

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cosinegate.runs.files import replacing, write_atomically
from cosinegate.terminal.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAD = 16_384  # bytes in which a file of ours shows what it is
BY_MATPLOTLIB = rb"Matplotlib v"  # how figures of earlier versions are marked


def require_own(texts: dict[Path, str], figures: dict[Path, str] | None = None) -> None:
    """Raises UserError where a command would replace a file that it did not write.

    A text is the command's own if its head matches the pattern; a figure if it has the command's mark. A figure of an
    earlier version has no mark: it counts if a text beside it is the command's own.
    """
    heads = {path: _head(path) for path in (*texts, *(figures or {}))}
    own = {path for path, pattern in texts.items() if re.match(pattern.encode(), heads[path] or b"", re.DOTALL)}
    for path, mark in (figures or {}).items():
        head = heads[path] or b""
        if mark.encode() in head or (own and BY_MATPLOTLIB in head):
            own.add(path)
    for path, head in heads.items():
        if head is not None and path not in own:
            words = "already exists and was not written by this command; choose another path, or move it away"
            raise UserError(f"{path}: {words}")


def _head(path: Path) -> bytes | None:
    """Returns the first bytes of a file, or None if there is none."""
    with naming(path):
        try:
            kind = os.lstat(path).st_mode
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(kind):
            what = "link" if stat.S_ISLNK(kind) else "folder" if stat.S_ISDIR(kind) else "pipe or a device"
            raise UserError(f"{path}: cannot be written: there is a {what} of that name")
        with path.open("rb") as file:
            return file.read(HEAD)


def write_text(path: Path, text: str) -> None:
    """Writes a file, and makes its folder."""
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)


def save_figure(figure: "Figure", path: Path, mark: str, dpi: int) -> None:
    """Writes a PNG or SVG with the command's mark and no date, so that the same runs give the same file."""
    kind = path.suffix[1:]
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            metadata = {"Creator": mark, "Date": None} if kind == "svg" else {"Software": mark}
            figure.savefig(file, format=kind, dpi=dpi, metadata=metadata)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raises UserError with the path for what the disk refuses."""
    try:
        yield
    except OSError as error:
        beside = error.filename is None or Path(error.filename).absolute().is_relative_to(path.parent.absolute())
        where = path if beside else error.filename
        raise UserError(f"{where}: cannot be written: {error.strerror or error}") from error
