"""Ends a worker of a parallel sweep, after saving, when the sweep itself is killed."""

import functools
import os
import signal
import threading
import time

PATIENCE = 60  # seconds for a step and its checkpoint


@functools.cache
def end_with(parent: int) -> None:
    """Asks this process to stop when `parent` is no longer its parent, and ends it if it does not."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
