"""A run that is stopped anywhere and started again ends with the bits of one that was never stopped."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import THREADS, config, process, started

from cosinegate.config.identity import run_folder
from cosinegate.lit import LitCosineGate
from cosinegate.runs.record import read_metrics, read_record
from cosinegate.terminal.errors import UserError
from cosinegate.terminal.signals import Stopped
from cosinegate.train import train

TINY = ["data=digits", "trainer.max_epochs=3", "trainer.limit_train_batches=4", "trainer.limit_val_batches=2"]
TINY += ["trainer.limit_test_batches=1", "data.batch_size=32", "data.eval_batch_size=64", f"threads={THREADS}"]
TINY += ["callbacks.curves=null"]
KINDS = {
    "soft": ["+experiment=digits"],
    "hard": ["+experiment=digits", "gate.relaxation.hard=true", "objective.per_step=true", "objective.warmup_epochs=2"],
    "dense": ["+experiment=digits", "gate=none"],
}
POINTS = {"inside the first epoch": (0, 1), "at its last step": (0, 3), "inside a later epoch": (1, 2)}
POINTS |= {"during validation": (1, "val")}
WALL_CLOCK = ("started", "updated", "seconds", "images_per_second", "first_step_at", "peak_memory_mib")


def assert_same(one, other, where="checkpoint"):
    """Bit for bit, whatever it holds."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        assert torch.equal(*(part.contiguous().view(-1).view(torch.uint8) for part in (one, other))), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for place, parts in enumerate(zip(one, other, strict=True)):
            assert_same(*parts, f"{where}[{place}]")
    else:
        assert one == other, where


def assert_same_run(one: Path, other: Path) -> None:
    for name in ("last.ckpt", "best.ckpt"):
        assert_same(*(torch.load(folder / "checkpoints" / name, weights_only=True) for folder in (one, other)), name)
    first, second = (
        {e: {k: v for k, v in row.items() if "speed/" not in k} for e, row in read_metrics(folder).items()}
        for folder in (one, other)
    )
    assert first == second
    lines = (other / "metrics.csv").read_text().splitlines()[1:]
    assert [line.split(",")[0] for line in lines] == [str(epoch) for epoch in sorted(first)]  # every epoch once
    records = [{k: v for k, v in read_record(folder) if k not in WALL_CLOCK} for folder in (one, other)]
    assert records[0] == records[1]


def stop_at(monkeypatch, epoch, step, signum=signal.SIGTERM):
    """Sends this process a signal in the middle of a step."""
    name = "validation_step" if step == "val" else "training_step"
    original = getattr(LitCosineGate, name)

    def stopping(self, batch, batch_idx):
        if self.current_epoch == epoch and batch_idx == (1 if step == "val" else step):
            os.kill(os.getpid(), signum)
        return original(self, batch, batch_idx)

    monkeypatch.setattr(LitCosineGate, name, stopping)


def start(root: Path, kind: str, *overrides: str) -> Path:
    chosen = config(*KINDS[kind], *TINY, *overrides, f"runs_dir={root}")
    folder = run_folder(chosen)
    torch.seed()  # a new process has another generator: nothing may come from it
    train(chosen)
    return folder


SLOW = ("hard", "dense")  # what they keep, soft gates keep too


@pytest.fixture(scope="module", params=[pytest.param(k, marks=pytest.mark.slow) if k in SLOW else k for k in KINDS])
def never_stopped(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    folder = start(root, request.param)
    return request.param, root, folder.rename(root / "whole")  # so that the paths of a stopped run can be the same


@pytest.mark.parametrize("point", POINTS)
def test_a_stopped_run_ends_as_one_that_was_never_stopped(never_stopped, point, monkeypatch):
    kind, root, whole = never_stopped
    with monkeypatch.context() as patched:
        stop_at(patched, *POINTS[point])
        with pytest.raises(Stopped):
            start(root, kind)
    (folder,) = (path.parent for path in root.glob("digits*/*-s*/record.json"))
    record = read_record(folder)
    assert (record.status, record.error) == ("stopped", "SIGTERM")
    seen = []
    with monkeypatch.context() as patched:
        step = LitCosineGate.training_step
        patched.setattr(
            LitCosineGate, "training_step", lambda self, *b: seen.append((self.current_epoch, b[1])) or step(self, *b)
        )
        start(root, kind)
    first = {"inside the first epoch": (0, 2), "at its last step": (1, 0), "inside a later epoch": (1, 3)}
    assert seen[0] == first.get(point, (2, 0))  # no step is trained twice
    assert_same_run(whole, folder)
    folder.rename(root / point)


def test_a_checkpoint_of_another_network_is_answered_with_a_line(tmp_path):
    short = "trainer.max_epochs=1"
    folder, dense = start(tmp_path / "one", "soft", short), start(tmp_path / "other", "dense", short)
    written = (folder / "record.json").read_text()
    (folder / "record.json").write_text(written.replace('"status": "finished"', '"status": "stopped"'))
    shutil.copy(dense / "checkpoints" / "last.ckpt", folder / "checkpoints" / "last.ckpt")
    with pytest.raises(UserError, match=r"last.ckpt is of another run: .*, and this one has "):
        start(tmp_path / "one", "soft", short)
    assert read_metrics(folder)[1]


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_same_seed_gives_the_same_bits_twice(threads, tmp_path):
    words = [*KINDS["soft"], *TINY, f"threads={threads}", f"runs_dir={tmp_path}"]
    folders = []
    for time in ("first", "second"):
        done = process("src/train.py", *words, OMP_NUM_THREADS=f"{threads}")
        assert done.returncode == 0, done.stderr
        (folder,) = (tmp_path / "digits").glob("*-s*")
        folders.append(folder.rename(tmp_path / time))
    assert_same_run(*folders)


@pytest.mark.slow  # six new Pythons; what two processes compute and how they fail is tested in every run
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_stop_together_and_end_as_if_they_never_had(kind, tmp_path):
    words = [*KINDS[kind], "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "threads=1"]
    words += ["trainer.max_epochs=3", "trainer.limit_train_batches=12", "trainer.limit_val_batches=1"]
    words += ["data.batch_size=30", f"runs_dir={tmp_path}"]
    whole = process("src/train.py", *words)
    assert whole.returncode == 0, whole.stderr
    (folder,) = tmp_path.glob("digits*/*-s*")
    finished = folder.rename(tmp_path / "whole")
    running = started("src/train.py", *words)
    for line in running.stdout:
        if line.startswith("epoch 1/"):
            break
    running.send_signal(signal.SIGTERM)  # the first process alone
    _, errors = running.communicate()
    assert running.returncode == 143, errors
    assert read_record(folder).status == "stopped"
    stored = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert len(stored["callbacks"]["EpochSums"]["processes"]) == 2
    assert stored["global_step"] > 12
    resumed = process("src/train.py", *words)
    assert resumed.returncode == 0, resumed.stderr
    assert "epoch 1/" not in resumed.stdout
    assert_same_run(finished, folder)
