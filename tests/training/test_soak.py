"""Kills a run many times, anywhere, and compares what it ends with (make soak). It prints its numbers at the end."""

import contextlib
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import config
from test_resume import KINDS, TINY, assert_same_run

from cosinegate.callbacks import checkpoints
from cosinegate.config.identity import run_folder
from cosinegate.lit import LitCosineGate
from cosinegate.runs.checksum import is_intact
from cosinegate.runs.files import replacing
from cosinegate.runs.record import read_metrics, read_record
from cosinegate.train import train

KILLS = int(os.environ.get("KILLS", 50))
CALLS = ("fsync", "link", "replace", "unlink")  # of which a checkpoint, a record or metrics.csv is written


def train_quietly(chosen, epoch: int, dies_at: int | None, dies_after: float | None) -> None:
    """In this process. From the first step of `epoch` on (from 0; of the first, from its start) it kills itself at
    call `dies_at` of those that write files, of a checkpoint's write in the middle, or after so many seconds.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    calls = iter(range(1, 10**9))
    begun = False

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    def begin():
        nonlocal begun
        if not begun and dies_after is not None:
            threading.Thread(target=lambda: (time.sleep(dies_after), kill()), daemon=True).start()
        begun = True

    def dying(call):
        def counted(*args, **kwargs):
            if begun and next(calls) == dies_at:
                kill()
            return call(*args, **kwargs)

        return counted

    @contextlib.contextmanager
    def half_written(path, kept_as=None):
        with replacing(path, kept_as) as file:
            write = file.write
            if begun and next(calls) == dies_at:
                file.write = lambda content: (write(content[: len(content) // 2]), file.flush(), kill())
            yield file

    def watched(self, *batch):
        if self.current_epoch >= epoch:
            begin()
        return step(self, *batch)

    step = LitCosineGate.training_step
    LitCosineGate.training_step = watched
    for name in CALLS:
        setattr(os, name, dying(getattr(os, name)))
    checkpoints.replacing = half_written
    if epoch == 0:
        begin()
    train(chosen)


def forked(chosen, epoch: int = 0, dies_at: int | None = None, dies_after: float | None = None) -> int:
    """Trains in a process that starts at once, as everything is loaded in this one."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            train_quietly(chosen, epoch, dies_at, dies_after)
            os._exit(0)
        os._exit(1)
    return pid


def epoch_of(folder: Path) -> int:
    """The epoch that a killed run was in, from 1, by its last checkpoint."""
    path = folder / "checkpoints" / "last.ckpt"
    loop = torch.load(path, weights_only=True)["loops"]["fit_loop"] if path.exists() else None
    return loop["epoch_progress"]["current"]["processed"] + 1 if loop else 1


def assert_whole(folder: Path) -> None:
    """What a reader finds after a kill is never a part."""
    if folder.exists():
        read_record(folder)
        read_metrics(folder)
        for path in folder.glob("checkpoints/*.ckpt"):
            assert is_intact(path), path


@pytest.mark.soak
def test_a_run_killed_anywhere_ends_as_one_that_was_never_killed(tmp_path):
    draw = random.Random(int(os.environ.get("SEED", 0)))
    # a checkpoint after every step: more writes to die in
    chosen = {kind: config(*KINDS[kind], *TINY, "save_minutes=0", f"runs_dir={tmp_path / kind}") for kind in KINDS}
    begin = time.monotonic()
    whole, took = {}, {}
    for kind in KINDS:
        since = time.monotonic()
        assert os.waitpid(forked(chosen[kind]), 0)[1] == 0
        took[kind] = time.monotonic() - since
        whole[kind] = run_folder(chosen[kind]).rename(tmp_path / f"{kind}-whole")
    kills, epochs = dict.fromkeys(("at any moment", "while writing"), 0), Counter()
    finished, attempts, scraps, halves = 0, 0, 0, 0
    while sum(kills.values()) < KILLS or attempts:
        kind = list(KINDS)[finished % len(KINDS)]
        folder = run_folder(chosen[kind])
        how = "while writing" if draw.random() < 0.5 else "at any moment"
        last = chosen[kind].trainer.max_epochs
        first = epoch_of(folder) if attempts else 1
        epoch = draw.randrange(first - 1, last) if first <= last else 0  # where this start is to die
        if sum(kills.values()) >= KILLS:  # the last run may end
            pid = forked(chosen[kind])
        elif how == "while writing":
            pid = forked(chosen[kind], epoch, dies_at=draw.randrange(1, 60))
        else:
            pid = forked(chosen[kind], epoch, dies_after=draw.uniform(0.0, 2.0) * took[kind] / last)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        attempts += 1
        if code == -signal.SIGKILL:
            kills[how] += 1
            epochs[min(epoch_of(folder), last)] += 1
            parts = list(folder.rglob("*.part"))
            scraps += len(parts)
            halves += sum(".ckpt-" in part.name and not is_intact(part) for part in parts)
            assert_whole(folder)
            if sum(kills.values()) % 25 == 0:
                print(f"\nsoak: {sum(kills.values())} kills, {finished} runs finished", file=sys.stderr)
            continue
        assert code == 0
        assert_same_run(whole[kind], folder)
        assert not list(folder.rglob("*.part"))
        shutil.rmtree(folder)
        finished, attempts = finished + 1, 0
    assert len(epochs) > 1 or KILLS < 10
    assert halves > 0 or KILLS < 50
    lines = [f"{sum(kills.values())} kills ({', '.join(f'{n} {how}' for how, n in kills.items())})"]
    lines += [f"in epoch {epoch}: {number}" for epoch, number in sorted(epochs.items())]
    lines += [f"{scraps} files left by them, all beside their place and removed by the next start"]
    lines += [f"{halves} of these half a checkpoint"]
    lines += [f"{finished} runs finished, each with the bits of a run that was never killed; 0 checkpoints damaged"]
    lines += [f"{time.monotonic() - begin:.0f} seconds"]
    print("\nsoak: " + "\nsoak: ".join(lines), file=sys.stderr)
