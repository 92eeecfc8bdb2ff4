"""Writing a file so that a reader finds the old one or the new one, never a part."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from cosinegate.errors import UserError
from cosinegate.secret import masked

PART = ".part"


@contextlib.contextmanager
def replacing(path: Path, kept_as: Path | None = None) -> Iterator[IO[bytes]]:
    """A binary file beside `path` that takes its place when the block ends well, and is gone when it does not.

    With `kept_as` the file that it replaces stays under that name.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", suffix=PART, delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
            if kept_as is not None and path.exists():
                _keep(path, kept_as)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    _settle(path.parent)


def _keep(path: Path, kept_as: Path) -> None:
    kept_as.unlink(missing_ok=True)
    try:
        os.link(path, kept_as)  # so that there is no moment without `path`
    except OSError:  # a file system without hard links
        os.replace(path, kept_as)


def _settle(folder: Path) -> None:
    """A rename is on disk when its folder is."""
    with contextlib.suppress(OSError):  # not every file system can
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Whatever it is, a record, a table or a traceback: without the secrets of the environment."""
    with replacing(path) as file:
        file.write(masked(text).encode())


def require_writable(folder: Path) -> None:
    """Ends with one line before the work instead of after it; makes the folder where there is none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".", suffix=PART):
            pass
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from error


def remove_parts(folder: Path) -> None:
    """Of writes that a kill ended."""
    for path in folder.rglob(f".*{PART}"):
        path.unlink(missing_ok=True)
