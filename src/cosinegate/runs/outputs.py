"""The files that commands write: over their own alone, whole or not at all, and an error names the path."""

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
    """Ends with one line where a command would write over anything but a file of its own.

    A text is the command's own when its head matches the pattern; a figure when it has the command's mark. One of an
    earlier version has none: it counts where a text beside it is the command's own.
    """
    heads = {path: _head(path) for path in (*texts, *(figures or {}))}
    own = {path for path, pattern in texts.items() if re.match(pattern.encode(), heads[path] or b"", re.DOTALL)}
    for path, mark in (figures or {}).items():
        head = heads[path] or b""
        if mark.encode() in head or (own and BY_MATPLOTLIB in head):
            own.add(path)
    for path, head in heads.items():
        if head is not None and path not in own:
            words = "is there, and is no file that this command wrote; choose another path, or move it away"
            raise UserError(f"{path}: {words}")


def _head(path: Path) -> bytes | None:
    """How the file begins; None where there is none."""
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
    """Writes the file and, where there is none, its folder."""
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)


def save_figure(figure: "Figure", path: Path, mark: str, dpi: int) -> None:
    """Writes a PNG or SVG that has the command's mark; without a date, so that the same runs give the same file."""
    kind = path.suffix[1:]
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            metadata = {"Creator": mark, "Date": None} if kind == "svg" else {"Software": mark}
            figure.savefig(file, format=kind, dpi=dpi, metadata=metadata)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Makes one line of what the disk refuses: a full one gives an error without the path, or with that of a part."""
    try:
        yield
    except OSError as error:
        beside = error.filename is None or Path(error.filename).absolute().is_relative_to(path.parent.absolute())
        where = path if beside else error.filename
        raise UserError(f"{where}: cannot be written: {error.strerror or error}") from error
