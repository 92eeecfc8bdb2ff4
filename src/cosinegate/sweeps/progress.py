"""The progress of a sweep, read from its jobs' records, so that it is the same for every launcher."""

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from cosinegate.runs.lock import is_locked
from cosinegate.runs.record import Record, ended_early
from cosinegate.terminal.console import clock, percent, say

if TYPE_CHECKING:
    from cosinegate.sweeps.jobs import Job

POLL_SECONDS = 0.5
QUIET_SECONDS = 60  # the longest time without a line while epochs go by


class Progress:
    """A thread that prints which job starts and ends, how many are done and the time left."""

    def __init__(self, jobs: "list[Job]", left: "list[Job]") -> None:
        self.total = len(jobs)
        self.left = left
        self.done_before = sum(job.error is None for job in jobs) - len(left)
        self.seen = {job.number: _stamp(job.folder) for job in left}  # what an earlier attempt left is no news
        self.status: dict[int, str] = {}
        self.epochs_before = {job.number: job.epochs_done() for job in left}
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self.begin = self.last_line = time.monotonic()
        self.thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop.set()
        self.thread.join()
        self._look()

    def _watch(self) -> None:
        while not self.stop.wait(POLL_SECONDS):
            self._look()

    def _look(self) -> None:
        changed = False
        for job in self.left:
            stamp = _stamp(job.folder)
            if stamp == self.seen[job.number]:
                continue
            self.seen[job.number] = stamp
            changed = True
            record = job.record()
            if record and record.status != self.status.get(job.number):
                self.status[job.number] = record.status
                self._line(
                    f"job {job.number} of {self.total} {_news(record, self.epochs_before[job.number])}: {job.label}"
                )
        if changed and time.monotonic() - self.last_line > QUIET_SECONDS:
            self._line("sweep")

    def _line(self, words: str) -> None:
        ended = self.done_before + sum(status == "finished" for status in self.status.values())
        say(f"{words}  [{ended} of {self.total} finished, {self._time_left()}]")
        self.last_line = time.monotonic()

    def _time_left(self) -> str:
        """Returns the time left, from the epochs that this sweep has trained and those that are left."""
        done = sum(job.epochs_done() for job in self.left)
        trained = done - sum(self.epochs_before.values())
        lost = sum(job.epochs_left() for job in self.left if self.status.get(job.number) == "failed")
        if trained <= 0:
            return "time left not known yet"
        left = sum(job.epochs_left() for job in self.left) - lost
        return f"{clock((time.monotonic() - self.begin) / trained * left)} left"


def wait_until_nobody_trains(folders: list[Path]) -> None:
    """Waits until no job is training: a launcher may give up on one while others go on elsewhere."""
    while any(is_locked(folder) for folder in folders):
        time.sleep(POLL_SECONDS)


def _stamp(folder: Path) -> int | None:
    try:
        return (folder / "record.json").stat().st_mtime_ns
    except OSError:
        return None


def _news(record: Record, epochs_before: int) -> str:
    if record.status == "finished":
        accuracy, gate, executed = record.accuracy.test, record.mean_gate, record.flops.executed
        early = ended_early(record)
        return f"finished with {percent(accuracy)}, gate {gate:.3f}, executed {executed:.3f}" + (
            f" ({early})" if early else ""
        )
    if record.status == "stopped":
        return "stopped"
    if record.status == "failed":
        return f"failed ({record.error})"
    return f"resumes after epoch {epochs_before}" if epochs_before else "starts"
