"""A lock on a run's folder. It goes with the process, however that ends."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from cosinegate.runs.files import make_folder, open_regular
from cosinegate.terminal.errors import UserError

LOCK = ".lock"


@contextlib.contextmanager
def locked(folder: Path, wait: bool, quiet: bool = False) -> Iterator[None]:
    """Holds the folder. Waits for another process that has it, or raises UserError; `quiet` prints nothing."""
    path = folder / LOCK
    try:
        make_folder(folder)
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO) and os.path.lexists(path):
            raise UserError(f"{path}: must be a plain file; move it away") from error
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if not wait:
                raise UserError(f"{folder}: another process is at work here") from error
            if not quiet:
                print(f"another process is training in {folder}: waiting for it", flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Returns whether a process holds the folder now."""
    try:
        descriptor = open_regular(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False  # no lock that a process of ours could hold
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
