"""Faults that end a run, made for real: it says why in one line, loses nothing that was saved, and goes on."""

import os
import random
import resource
import shutil
import signal
import subprocess
import time

import pytest
import torch
from conftest import config, started
from test_resume import KINDS, TINY, assert_same_run, start, stop_at

from cosinegate.callbacks import run_record
from cosinegate.config.identity import run_folder
from cosinegate.data.module import ImageData
from cosinegate.lit import LitCosineGate
from cosinegate.runs.checksum import is_intact, sealed
from cosinegate.runs.record import read_record
from cosinegate.terminal.errors import NotFinite, UserError
from cosinegate.terminal.signals import Stopped


def folder_in(root):
    return run_folder(config(*KINDS["soft"], *TINY, f"runs_dir={root}"))


def at_epoch(monkeypatch, epoch, do):
    """Does it at the first step of an epoch."""
    step = LitCosineGate.training_step

    def doing(self, batch, batch_idx):
        if (self.current_epoch, batch_idx) == (epoch, 0):
            do()
        return step(self, batch, batch_idx)

    monkeypatch.setattr(LitCosineGate, "training_step", doing)


def files_in(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing befell."""
    root = tmp_path_factory.mktemp("whole")
    folder = start(root, "soft")
    return root, folder.rename(root / "whole")


@pytest.fixture
def again(whole):
    """Trains in the folder that the whole run had, so that even paths must be the same."""
    root, finished = whole
    shutil.rmtree(root / "digits")
    (root / "digits").mkdir()

    def ends_as_if_nothing_had_happened():
        assert_same_run(finished, start(root, "soft"))

    return root, ends_as_if_nothing_had_happened


def test_sigterm_saves_inside_the_epoch_and_exits_with_143(tmp_path):
    # epochs of many small steps: one cannot end between the signal and the save
    command = ["src/train.py", "+experiment=digits", "data.batch_size=8", f"runs_dir={tmp_path}", "threads=1"]
    running = started(*command, "trainer.limit_val_batches=1")
    for line in running.stdout:
        if line.startswith("epoch 1/"):
            break
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate()
    assert running.returncode == 143
    assert errors.splitlines() == ["stopped (SIGTERM): start the same command again to resume"]
    (folder,) = (tmp_path / "digits").glob("*-s*")
    record = read_record(folder)
    assert (record.status, record.error, record.epochs.done) == ("stopped", "SIGTERM", 1)
    stored = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    steps = stored["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["processed"]
    assert stored["epoch"] == 1
    assert 0 < steps < 180
    assert stored["global_step"] == 180 + steps


def test_a_second_ctrl_c_does_not_wait(tmp_path, monkeypatch):
    def impatient(*args):
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the signal was waited with")

    monkeypatch.setattr("cosinegate.objective.CosineGateLoss.forward", impatient)
    stop_at(monkeypatch, 0, 0, signal.SIGINT)
    with pytest.raises(Stopped) as stopped:
        start(tmp_path, "soft")
    assert stopped.value.code == 130


def test_a_long_epoch_is_saved_on_the_way(again, monkeypatch):
    root, ends_as_if_nothing_had_happened = again
    with monkeypatch.context() as patched:
        step = LitCosineGate.training_step
        patched.setattr(
            LitCosineGate, "training_step", lambda self, b, i: 1 / 0 if self.global_step == 6 else step(self, b, i)
        )
        with pytest.raises(ZeroDivisionError):  # nothing is saved on the way down, as with a SIGKILL
            start(root, "soft", "save_minutes=0")
    stored = torch.load(folder_in(root) / "checkpoints" / "last.ckpt", weights_only=True)
    assert stored["global_step"] == 6
    ends_as_if_nothing_had_happened()


def test_a_damaged_best_checkpoint_is_never_tested(tmp_path, monkeypatch):
    held = ["data.validation=holdout", "data.holdout=300"]
    with monkeypatch.context() as broken:
        broken.setattr(LitCosineGate, "test_step", lambda self, *batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            start(tmp_path, "soft", *held)
    folder = run_folder(config(*KINDS["soft"], *TINY, *held, f"runs_dir={tmp_path}"))
    best = folder / "checkpoints" / "best.ckpt"
    content = best.read_bytes()
    torch.save({"state_dict": {}}, tmp_path / "another.ckpt")
    another = sealed((tmp_path / "another.ckpt").read_bytes())
    for damaged in (content[:-1000], content[:5000] + b"?" + content[5001:], another):
        best.write_bytes(damaged)
        with pytest.raises(UserError, match=r"best\.ckpt is damaged"):
            start(tmp_path, "soft", *held)
    best.unlink()
    with pytest.raises(UserError, match=r"best\.ckpt is gone"):
        start(tmp_path, "soft", *held)
    best.write_bytes(content)
    start(tmp_path, "soft", *held)
    assert read_record(folder).accuracy.test_of == "best"


def test_weights_that_are_not_finite_are_not_kept(tmp_path, monkeypatch):
    def spoilt(self, *outputs):
        if self.current_epoch == 1 and self.trainer.is_last_batch:
            torch.nn.init.constant_(self.network.head.weight, torch.nan)

    with monkeypatch.context() as broken:
        broken.setattr(LitCosineGate, "on_train_batch_end", spoilt)
        with pytest.raises(UserError, match=r"weights are not finite in epoch 2: \w+\.ckpt was not written"):
            start(tmp_path, "soft")
    kept = torch.load(folder_in(tmp_path) / "checkpoints" / "last.ckpt", weights_only=True)
    assert kept["epoch"] == 0
    assert all(part.isfinite().all() for part in kept["state_dict"].values())
    start(tmp_path, "soft")
    assert read_record(folder_in(tmp_path)).status == "finished"


def test_a_damaged_last_checkpoint_falls_back_to_the_one_before(again, tmp_path, monkeypatch, capsys):
    root, ends_as_if_nothing_had_happened = again
    with monkeypatch.context() as patched:
        stop_at(patched, 2, 1)
        with pytest.raises(Stopped):
            start(root, "soft")
    stopped = shutil.copytree(folder_in(root), tmp_path / "stopped")
    last = folder_in(root) / "checkpoints" / "last.ckpt"
    content = last.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 4
    for damaged in (content[:-1000], flipped, None):  # None: lost between two renames
        shutil.rmtree(folder_in(root))
        shutil.copytree(stopped, folder_in(root))
        last.unlink() if damaged is None else last.write_bytes(damaged)
        capsys.readouterr()
        ends_as_if_nothing_had_happened()
        said = [line for line in capsys.readouterr().out.splitlines() if "damaged" in line]
        assert len(said) == (damaged is not None)
        assert all("resuming from previous.ckpt" in line for line in said)


def test_with_no_intact_checkpoint_left_one_line_says_so(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        stop_at(patched, 2, 1)
        with pytest.raises(Stopped):
            start(tmp_path, "soft")
    kept = folder_in(tmp_path) / "checkpoints"
    for name in ("last.ckpt", "previous.ckpt"):
        (kept / name).write_bytes((kept / name).read_bytes()[:-1])
    before = files_in(kept)
    with pytest.raises(UserError, match=r"last\.ckpt is damaged and there is no earlier one"):
        start(tmp_path, "soft")
    assert files_in(kept) == before


def test_any_bit_that_changes_in_a_checkpoint_is_noticed(whole, tmp_path):
    content = (whole[1] / "checkpoints" / "last.ckpt").read_bytes()
    path, draw = tmp_path / "flipped.ckpt", random.Random(0)
    path.write_bytes(content)
    assert is_intact(path)
    ends = [*range(1024), *range(len(content) - 1024, len(content))]  # where a zip file has what it says of itself
    for place in [*draw.sample(ends, 60), *draw.sample(range(len(content)), 60)]:
        flipped = bytearray(content)
        flipped[place] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        assert not is_intact(path), place
    for size in (0, 1, 21, 22, 64, 1000, len(content) - 1):
        path.write_bytes(content[:size])
        assert not is_intact(path), size


def test_a_checkpoint_without_a_digest_has_its_checksums(tmp_path):
    path = tmp_path / "old.ckpt"
    torch.save({"a": torch.arange(1000)}, path)
    assert is_intact(path)
    content = bytearray(path.read_bytes())
    content[content.index(torch.arange(990, 993).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    assert not is_intact(path)


def test_a_file_that_may_not_grow_leaves_the_earlier_checkpoint_and_one_line(again, monkeypatch):
    root, ends_as_if_nothing_had_happened = again
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with monkeypatch.context() as patched:
            at_epoch(patched, 1, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limit[1])))
            with pytest.raises(UserError, match=r"cannot be written: File too large; .* start the same command again"):
                start(root, "soft")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    folder = folder_in(root)
    assert is_intact(folder / "checkpoints" / "last.ckpt")
    assert torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["epoch"] == 0
    assert read_record(folder).status == "failed"
    assert not list(folder.rglob("*.part"))
    ends_as_if_nothing_had_happened()


def test_a_read_only_folder_is_answered_with_one_line_and_nothing_is_lost(disk, monkeypatch):
    def remount(mode):
        subprocess.run(["mount", "-o", f"remount,{mode}", disk], check=True)

    with monkeypatch.context() as patched:
        stop_at(patched, 1, 1)
        with pytest.raises(Stopped):
            start(disk, "soft")
    before = files_in(disk)
    remount("ro")
    with pytest.raises(UserError, match="Read-only file system"):
        start(disk, "soft")
    assert files_in(disk) == before
    remount("rw")
    assert read_record(start(disk, "soft")).status == "finished"


def test_a_clock_that_goes_back_changes_nothing(again, monkeypatch):
    root, ends_as_if_nothing_had_happened = again
    hours = iter(range(23, -1, -1))
    monkeypatch.setattr(run_record, "now", lambda: f"2026-01-01T{next(hours):02d}:00:00+00:00")
    now, begin = time.time, time.time()
    monkeypatch.setattr(time, "time", lambda: 2 * begin - now())
    with monkeypatch.context() as patched:
        stop_at(patched, 1, 1)
        with pytest.raises(Stopped):
            start(root, "soft")
    seconds = read_record(folder_in(root)).seconds
    ends_as_if_nothing_had_happened()
    record = read_record(folder_in(root))
    assert record.started > record.updated
    assert record.seconds > seconds > 0


def test_a_loss_that_is_not_finite_stops_at_once_and_keeps_what_led_to_it(tmp_path, capsys):
    held = ["data.validation=holdout", "data.holdout=300", "optimizer.lr=1e25"]
    with pytest.raises(NotFinite, match=r"the loss is nan in epoch 1, step 2"):
        start(tmp_path, "soft", *held)
    chosen = config(*KINDS["soft"], *TINY, *held, f"runs_dir={tmp_path}")
    folder = run_folder(chosen)
    record = read_record(folder)
    assert record.status == "failed"
    assert record.error.startswith("NotFinite: the loss is nan in epoch 1, step 2")
    kept = torch.load(folder / "not_finite.pt", weights_only=True)
    assert (kept["epoch"], kept["step"]) == (0, 1)
    assert kept["losses"]["total"] != kept["losses"]["total"]
    # the state is the one before the step: BatchNorm has seen one batch
    assert kept["state_dict"]["network.stem.1.num_batches_tracked"] == 1
    data = ImageData(chosen.data, chosen.seed)
    data.setup()
    loader = data.train_dataloader()
    assert torch.equal(kept["images"], data.kept[loader.sampler.draw().order[32:64]])
    assert torch.equal(torch.from_numpy(data.arrays[1])[kept["images"]], data.splits["train"][1][loader.images_of(1)])
    with pytest.raises(NotFinite):  # it tries again
        start(tmp_path, "soft", *held)


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_wandb_that_fails_ends_no_run(where, tmp_path, monkeypatch, capsys):
    wandb = pytest.importorskip("wandb")

    def fails(*args, **kwargs):
        raise wandb.errors.CommError("nobody answers")

    owner = wandb.sdk.wandb_run.Run if where == "log" else wandb
    monkeypatch.setattr(owner, where, fails)
    mode = "offline" if where != "finish" else "disabled"
    folder = start(tmp_path, "soft", "logger=wandb", f"logger.wandb.mode={mode}", "trainer.max_epochs=1")
    assert read_record(folder).status == "finished"
    said = [line for line in capsys.readouterr().out.splitlines() if "W&B" in line]
    assert said == ["W&B failed (CommError: nobody answers): the run goes on without it"]


def test_scraps_of_a_killed_write_are_removed(again, monkeypatch):
    root, ends_as_if_nothing_had_happened = again
    with monkeypatch.context() as patched:
        stop_at(patched, 1, 1)
        with pytest.raises(Stopped):
            start(root, "soft")
    scrap = folder_in(root) / "checkpoints" / ".last.ckpt-0a1b2c3d.part"
    scrap.write_bytes(b"half")
    ends_as_if_nothing_had_happened()
    assert not scrap.exists()


def test_a_sweep_that_is_asked_to_stop_lets_its_jobs_save(tmp_path):
    jobs = ["+experiment=digits", "seed=0,1", "trainer.max_epochs=500"]
    jobs += ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "threads=1", f"runs_dir={tmp_path}"]
    running = started("src/train.py", "-m", *jobs)
    begun = set()
    while len(begun) < 2:
        time.sleep(0.05)
        begun = {path for path in tmp_path.glob("digits/*-s*/record.json") if read_record(path.parent).first_step_at}
        assert running.poll() is None
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate()
    assert running.returncode == 143
    assert errors.splitlines()[-1] == "stopped (SIGTERM): start the same command again to resume"
    for path in begun:
        assert read_record(path.parent).status == "stopped"
        assert is_intact(path.parent / "checkpoints" / "last.ckpt")
