"""Ends W&B's run with ours, or the next job of a multirun would go on in it."""

import contextlib
import sys
from collections.abc import Iterator

from cosinegate.callbacks.loggers import failing_quietly
from cosinegate.terminal.signals import Stopped


@contextlib.contextmanager
def ending_wandb() -> Iterator[None]:
    """Finishes W&B's run, where there is one, with the exit code that this one ends with."""
    code = 1
    try:
        yield
        code = 0
    except Stopped as stopped:
        code = stopped.code
        raise
    finally:
        if "wandb" in sys.modules:
            with failing_quietly():
                sys.modules["wandb"].finish(exit_code=code)
