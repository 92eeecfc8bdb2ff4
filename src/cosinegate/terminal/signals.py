"""SIGTERM and Ctrl-C end a run where its state is whole and saved."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(SystemExit):
    """Ends the process with the exit code that shells give a signal: 143 for SIGTERM, 130 for Ctrl-C."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)

    @property
    def reason(self) -> str:
        return "interrupted" if self.code == 128 + signal.SIGINT else signal.Signals(self.code - 128).name


class StopRequest:
    """Remembers a signal while the run is `patient`: in training, which checks for it after every step.

    At any other time, and at the second Ctrl-C, a signal ends the run at once. A second SIGTERM changes nothing.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.patient = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        first, again = self.signum is None, signum == self.signum == signal.SIGINT
        self.signum = self.signum or signum
        if again or (first and not self.patient):
            raise Stopped(signum)

    def listen(self) -> None:
        """Handles the signals, also if another handler was installed since."""
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                signal.signal(signum, self)


@contextmanager
def taking_signals(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Handles SIGTERM and Ctrl-C in the block, and restores the earlier handlers after it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.signal(signum, handler) for signum in SIGNALS}
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier if earlier is not None else signal.SIG_DFL)
