"""One process trains in a folder. The lock goes with the process, however it ends."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from cosinegate.errors import UserError


@contextlib.contextmanager
def locked(folder: Path, wait: bool) -> Iterator[None]:
    """Holds the folder. Where another process has it, waits for its end or says so."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if not wait:
                raise UserError(f"{folder}: another process is at work here") from error
            print(f"another process is training in {folder}: waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_locked(folder: Path) -> bool:
    """Whether a process trains in the folder now."""
    try:
        with (folder / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
