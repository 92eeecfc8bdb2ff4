"""A worker of a parallel sweep ends when the sweep is killed, instead of training on with nobody to tell."""

import functools
import os
import threading
import time


@functools.cache
def end_with(parent: int) -> None:
    """Ends this process once `parent` is no longer its parent. What it has written is whole at any moment."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
