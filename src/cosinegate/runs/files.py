"""Writes files so that a reader finds the old one or the new one, never a part."""

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from cosinegate.terminal.errors import UserError
from cosinegate.terminal.secrets import masked

PART = ".part"


@contextlib.contextmanager
def replacing(path: Path, kept_as: Path | None = None) -> Iterator[IO[bytes]]:
    """Yields a temporary binary file that replaces `path` if the block succeeds, and is removed if not.

    With `kept_as` the replaced file is kept under that name.
    """
    part = path.with_name(f".{path.name}-{secrets.token_hex(4)}{PART}")
    with part.open("xb") as file:  # with the rights that the umask leaves
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if kept_as is not None and path.exists():
                _keep(path, kept_as)
            os.replace(part, path)
        except BaseException:
            os.unlink(part)
            raise
    _settle(path.parent)


def _keep(path: Path, kept_as: Path) -> None:
    kept_as.unlink(missing_ok=True)
    try:
        os.link(path, kept_as)  # so that there is no moment without `path`
    except OSError:  # a file system without hard links
        os.replace(path, kept_as)


def _settle(folder: Path) -> None:
    """Flushes a folder to disk: a rename lasts once its folder does."""
    with contextlib.suppress(OSError):  # not every file system can
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Writes text without the secrets of the environment: a record, a table, a traceback."""
    with replacing(path) as file:
        file.write(masked(text).encode())


def make_folder(folder: Path) -> None:
    """Makes a folder and its missing parents, flushed to disk."""
    refuse_dangling_links(folder)
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for new in reversed(missing):
        _settle(new.parent)


def refuse_dangling_links(folder: Path) -> None:
    """Raises UserError if a part of the path is a link to nothing."""
    for place in (folder, *folder.parents):
        if place.is_symlink() and not place.exists():
            raise UserError(f"{folder}: cannot be made: {place} is a link to {os.readlink(place)}, which is not there")


def require_writable(folder: Path) -> None:
    """Makes the folder if it is missing. Raises UserError, before the work, if it cannot be written to."""
    try:
        make_folder(folder)
        probe = folder / f".{secrets.token_hex(4)}{PART}"
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from error


def is_part(name: str, of: Iterable[str]) -> bool:
    """Returns whether a file name is that of a temporary file which a killed write of one of the files `of` left."""
    return re.fullmatch(rf"\.({'|'.join(map(re.escape, of))})-[0-9a-z_]{{8}}{re.escape(PART)}", name) is not None


def remove_parts(folder: Path, of: Iterable[str]) -> None:
    """Removes temporary files that killed writes of the files `of` left in the folder."""
    with contextlib.suppress(FileNotFoundError):
        for path in list(folder.iterdir()):
            if is_part(path.name, of) and stat.S_ISREG(path.lstat().st_mode):
                path.unlink(missing_ok=True)


def open_regular(path: Path, flags: int) -> int:
    """Opens a regular file only: a link is not followed, a pipe not waited for."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor
