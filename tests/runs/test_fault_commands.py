"""Faults that befall a command while it runs: its exit code, its one line, what it leaves, and that it goes on."""

import subprocess
from pathlib import Path

import pytest
import torch
from conftest import ROOT, assert_one_line, process

from cosinegate.runs.checksum import is_intact
from cosinegate.runs.record import read_metrics, read_record

CUT = ["+experiment=digits", "trainer.max_epochs=3", "trainer.limit_train_batches=4", "trainer.limit_val_batches=1"]
CUT += ["trainer.limit_test_batches=1", "data.batch_size=32", "data.eval_batch_size=64", "threads=1"]
CUT += ["callbacks.curves=null", "+callbacks.fault._target_=faults.Befalls"]
TWO = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
IN_TESTS = {"PYTHONPATH": str(ROOT / "tests")}


def repair(folder: Path, fault: str) -> None:
    if fault == "read-only":
        subprocess.run(["umount", folder], check=True)
    if fault == "full":
        (folder.parents[1] / "filler").unlink()
    if fault == "forbidden":
        for path in (folder, folder / "checkpoints"):
            path.chmod(0o755)


def assert_ends_with_one_line_and_goes_on(root: Path, fault: str, *words: str) -> None:
    command = ["src/train.py", *CUT, f"runs_dir={root}"]
    ended = process(*command, **IN_TESTS, FAULT=fault)
    (folder,) = (root / "digits").glob("*-s*")
    repair(folder, fault)
    assert_one_line(ended, str(folder), *words, "start the same command again")
    assert ended.returncode == 2
    stored = folder / "checkpoints" / "last.ckpt"
    assert is_intact(stored)
    assert torch.load(stored, weights_only=True)["global_step"] == 4  # of the first epoch, which nothing befell
    assert read_metrics(folder)[1]["val/acc"] > 0
    assert read_record(folder).epochs.done >= 1
    assert not list(folder.rglob("*.part"))
    done = process(*command, **IN_TESTS)
    assert done.returncode == 0, done.stderr
    assert "resuming digits" in done.stdout
    assert "epoch 1/" not in done.stdout
    assert (read_record(folder).status, sorted(read_metrics(folder))) == ("finished", [1, 2, 3])


@pytest.mark.parametrize(
    "fault", ["checkpoints do not fit", pytest.param("records do not fit", marks=pytest.mark.slow)]
)
def test_a_file_that_may_not_grow(fault, tmp_path):
    assert_ends_with_one_line_and_goes_on(tmp_path, fault, "cannot be written: File too large")


def test_a_disk_that_is_full(disk):
    assert_ends_with_one_line_and_goes_on(disk, "full", "cannot be written: No space left on device")


def test_a_folder_that_becomes_read_only(disk):
    assert_ends_with_one_line_and_goes_on(disk, "read-only", "cannot be written: Read-only file system")


def test_a_folder_that_may_no_longer_be_written(tmp_path):
    for path in (tmp_path, *tmp_path.parents[:2]):  # pytest's are its user's alone
        path.chmod(0o755)
    assert_ends_with_one_line_and_goes_on(tmp_path, "forbidden", "cannot be written: Permission denied")


def test_a_folder_that_is_removed_ends_the_run_with_one_line(tmp_path):
    ended = process("src/train.py", *CUT, f"runs_dir={tmp_path}", **IN_TESTS, FAULT="removed")
    assert_one_line(ended, str(tmp_path), "No such file or directory")


def test_a_damaged_checkpoint_is_put_aside_and_said(tmp_path):
    command = ["src/train.py", *CUT, f"runs_dir={tmp_path}"]
    assert process(*command, **IN_TESTS, FAULT="SIGTERM").returncode == 143
    (folder,) = (tmp_path / "digits").glob("*-s*")
    last = folder / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-1000])
    done = process(*command, **IN_TESTS)
    assert done.returncode == 0, done.stderr
    assert f"{last} is damaged: resuming from previous.ckpt, the one before it" in done.stdout
    assert (read_record(folder).status, sorted(read_metrics(folder))) == ("finished", [1, 2, 3])


@pytest.mark.slow
def test_two_processes_end_together_where_one_cannot_write(tmp_path):
    ended = process("src/train.py", *CUT, *TWO, f"runs_dir={tmp_path}", **IN_TESTS, FAULT="checkpoints do not fit")
    assert_one_line(ended, "cannot be written: File too large")
    assert ended.returncode == 2
    (folder,) = (tmp_path / "digits").glob("*-s*")
    assert is_intact(folder / "checkpoints" / "last.ckpt")


@pytest.mark.parametrize(
    "devices", [[], pytest.param(TWO, marks=pytest.mark.slow)], ids=["one process", "two processes"]
)
def test_a_loss_that_is_not_finite(devices, tmp_path):
    ended = process("src/train.py", *CUT, *devices, "optimizer.lr=1e25", f"runs_dir={tmp_path}", **IN_TESTS)
    assert_one_line(ended, "the loss is nan in epoch 1, step 2: not_finite.pt has the state before it")
    assert ended.returncode == 2
    (folder,) = (tmp_path / "digits").glob("*-s*")
    assert read_record(folder).error.startswith("NotFinite: the loss is nan in epoch 1, step 2")
    kept = torch.load(folder / "not_finite.pt", weights_only=True)
    assert (kept["epoch"], kept["step"], len(set(kept["images"].tolist()))) == (0, 1, 32)


def test_a_search_that_is_asked_to_stop_saves_and_goes_on_with_its_trial(tmp_path):
    command = ["src/search.py", *CUT, "trainer.max_epochs=2", "search.trials=2", f"runs_dir={tmp_path}"]
    stopped = process(*command, **IN_TESTS, FAULT="SIGTERM")
    assert stopped.returncode == 143
    assert stopped.stderr.splitlines() == ["stopped (SIGTERM): start the same command again to resume"]
    (folder,) = (tmp_path / "digits").glob("*-s*")
    assert read_record(folder).status == "stopped"
    assert torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 6
    done = process(*command, **IN_TESTS)
    assert done.returncode == 0, done.stderr
    assert "trial 1 resumes" in done.stdout
    assert "trial 2 starts" in done.stdout
    records = [read_record(path) for path in (tmp_path / "digits").glob("*-s*")]
    assert [record.status for record in records] == ["finished"] * 2
