"""Output that cannot be written, or that nobody reads, is dropped and ends no run."""

import contextlib
import errno
import io
import os
import sys


class Lossy(io.FileIO):
    """A stream that discards everything from the first error on, and keeps that error."""

    error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except OSError as error:
            self.error = error
            _lead_nowhere(self.fileno())
            return memoryview(data).nbytes


def make_lossy() -> None:
    """Makes stdout and stderr lossy. One that was closed before the start, as by `>&-`, discards everything."""
    for fd in (0, 1, 2):  # else the next file that is opened would have its number, and what is printed
        try:
            os.fstat(fd)
        except OSError:
            _lead_nowhere(fd)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            place = os.open(os.devnull, os.O_WRONLY)
        elif _number(stream) == fd and not isinstance(_raw(stream), Lossy):
            place = fd
        else:
            continue
        encoding = getattr(stream, "encoding", "utf-8")
        by_line = getattr(stream, "line_buffering", True) or stream.write_through
        lossy = io.BufferedWriter(Lossy(place, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(lossy, encoding, "replace", line_buffering=by_line))


def lost_output() -> str | None:
    """Returns why stdout could not be written, or None. A reader that stopped reading, as `head`, is no reason."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    error = getattr(_raw(sys.stdout), "error", None)
    return None if error is None or error.errno == errno.EPIPE else os.strerror(error.errno)


def _raw(stream: object) -> object:
    return getattr(getattr(stream, "buffer", None), "raw", None)


def _number(stream: object) -> int | None:
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):  # one that a notebook or a test put there
        return None


def _lead_nowhere(fd: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != fd:
        os.dup2(nowhere, fd)
        os.close(nowhere)
