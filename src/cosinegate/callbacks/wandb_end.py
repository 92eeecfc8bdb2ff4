"""Ends W&B's run together with ours: otherwise the next job of a multirun would continue it."""

import contextlib
import sys
from collections.abc import Iterator

from cosinegate.callbacks.loggers import failing_quietly
from cosinegate.terminal.signals import Stopped


@contextlib.contextmanager
def ending_wandb() -> Iterator[None]:
    """Finishes W&B's run, if there is one, with this run's exit code."""
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
