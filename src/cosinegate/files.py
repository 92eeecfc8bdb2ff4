"""Writing a file so that a reader finds the old one or the new one, never a part."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from cosinegate.secret import masked


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A binary file beside `path` that takes its place when the block ends well, and is gone when it does not."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            os.unlink(file.name)
            raise
    os.chmod(file.name, 0o644)
    try:
        os.replace(file.name, path)
    except OSError:
        os.unlink(file.name)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Whatever it is, a record, a table or a traceback: without the secrets of the environment."""
    with replacing(path) as file:
        file.write(masked(text).encode())
