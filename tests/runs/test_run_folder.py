"""A run's folder is its own, and its files belong together: what does not is named before a step is made."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, assert_one_line, process
from test_bad_input import tree

from cosinegate.runs.checksum import sealed
from cosinegate.runs.files import make_folder, write_atomically
from cosinegate.runs.lock import is_locked, locked
from cosinegate.runs.record import read_record
from cosinegate.terminal.errors import UserError

TRAIN = str(ROOT / "src" / "train.py")
CUT = ["+experiment=digits", "trainer.max_epochs=4", "trainer.limit_train_batches=2", "trainer.limit_val_batches=1"]
CUT += ["trainer.limit_test_batches=1", "data.batch_size=32", "data.eval_batch_size=64", "threads=1"]
CUT += ["callbacks.curves=null"]
FAULT = "+callbacks.fault._target_=faults.Befalls"
IN_TESTS = {"PYTHONPATH": str(ROOT / "tests")}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> tuple[Path, Path]:
    """A run that was stopped in its second epoch, and one of another seed."""
    root, folders = tmp_path_factory.mktemp("stopped"), []
    for seed in (0, 1):
        ended = process(TRAIN, *CUT, FAULT, f"seed={seed}", cwd=root, **IN_TESTS, FAULT="SIGTERM")
        assert ended.returncode == 143, ended.stderr
        folders += (root / "runs" / "digits").glob(f"*-s{seed}")
    return tuple(folders)


@pytest.fixture
def folder(stopped, tmp_path) -> Path:
    return shutil.copytree(stopped[0], tmp_path / "run")


def go_on(folder: Path, *words: str) -> subprocess.CompletedProcess:
    return process(TRAIN, *CUT, FAULT, *words, f"run_dir={folder}", cwd=folder.parent, **IN_TESTS)


def change_record(folder: Path, **values) -> None:
    record = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps(record | values))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path, to: Path) -> None:
    path.unlink()
    to.write_text("not ours\n")
    path.symlink_to(to)


def row_99(folder: Path) -> None:
    path = folder / "metrics.csv"
    path.write_text(path.read_text() + "99" + path.read_text().splitlines()[-1].lstrip("1") + "\n")


def rows_of_four_epochs(folder: Path) -> None:
    head, row = (folder / "metrics.csv").read_text().splitlines()
    (folder / "metrics.csv").write_text("\n".join([head, *(f"{epoch}{row[1:]}" for epoch in range(1, 5))]) + "\n")


def copied(name: str):
    return lambda folder, other: shutil.copy(other / name, folder / name)


SPOILT = {
    **{
        f"{name} of another seed": (copied(f"checkpoints/{name}.ckpt"), f"{name}.ckpt is of another run: seed = 1")
        for name in ("last", "previous", "best")
    },
    "best.ckpt as last.ckpt": (
        lambda f, o: (rows_of_four_epochs(f), change_record(f, epochs={"planned": 4, "done": 4})),
        "metrics.csv has a row of epoch 4, but",
    ),
    "config of another seed": (copied("config.yaml"), "config.yaml is of another run: seed = 1, and this one has 0"),
    "record of another seed": (copied("record.json"), "holds a run of another config (seed = 1, not 0)"),
    "metrics gone": (lambda f, o: (f / "metrics.csv").unlink(), "metrics.csv is gone, and"),
    "metrics empty": (lambda f, o: (f / "metrics.csv").write_text(""), "metrics.csv has no row of epoch 1"),
    "metrics with a row 99": (lambda f, o: row_99(f), "metrics.csv has a row of epoch 99, but"),
    "metrics with a cut row": (
        lambda f, o: (f / "metrics.csv").write_text((f / "metrics.csv").read_text()[:-40]),
        "metrics.csv cannot be read: ValueError: line 2 has",
    ),
    "checkpoints and metrics of later": (
        lambda f, o: (rows_of_four_epochs(f), shutil.rmtree(f / "checkpoints")),
        "metrics.csv has a row of epoch 4, but there is no checkpoint",
    ),
    "record of later": (lambda f, o: change_record(f, epochs={"planned": 4, "done": 9}), "record.json has 9 epochs"),
    "seconds inf": (lambda f, o: change_record(f, seconds=float("inf")), "record.json: seconds = inf"),
    "seconds nan": (lambda f, o: change_record(f, seconds=float("nan")), "record.json: seconds = nan"),
    "seconds below 0": (lambda f, o: change_record(f, seconds=-1), "record.json: seconds = -1"),
    "seconds in words": (lambda f, o: change_record(f, seconds="long"), "record.json: seconds = long"),
    "started is a number": (lambda f, o: change_record(f, started=5), "record.json: started = 5"),
    "trained_by is none": (lambda f, o: change_record(f, trained_by=[5]), "record.json: trained_by = [5]"),
    **{
        f"{name} a pipe": (lambda f, o, name=name: pipe(f / name), f"{name}")
        for name in ("record.json", "config.yaml", "metrics.csv", "checkpoints/last.ckpt", "checkpoints/best.ckpt")
    },
    "lock a pipe": (lambda f, o: pipe(f / ".lock"), ".lock: must be a plain file"),
    "lock a link": (lambda f, o: link(f / ".lock", f.parent / "thesis"), ".lock: must be a plain file"),
    "checkpoints a file": (
        lambda f, o: (shutil.rmtree(f / "checkpoints"), (f / "checkpoints").write_text("")),
        "checkpoints: must be a folder",
    ),
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_does_not_belong_is_named_before_a_step_is_made(what, stopped, folder):
    spoil, words = SPOILT[what]
    spoil(folder, stopped[1])
    before = tree(folder.parent)
    done = go_on(folder)
    assert_one_line(done, words)
    assert (done.returncode, done.stdout) == (2, "")
    assert tree(folder.parent) == before


@pytest.mark.parametrize("command", ["evaluate", "export", "benchmark"])
def test_a_checkpoint_of_another_run_is_not_used_as_this_ones(command, stopped, folder):
    SPOILT["last of another seed"][0](folder, stopped[1])
    done = process(str(ROOT / "src" / f"{command}.py"), f"run={folder}")
    assert_one_line(done, "last.ckpt is of another run: its seed is 1")
    assert not (folder / command).exists()


@pytest.mark.parametrize("key", ["run_dir", "runs_dir"])
def test_no_run_begins_in_the_folder_of_another(key, folder):
    before = tree(folder)
    assert_one_line(process(TRAIN, *CUT, f"{key}={folder / 'new'}"), "lies in the folder of another run")
    assert tree(folder) == before


def test_a_longer_schedule_is_another_run_and_the_line_says_how(folder):
    done = go_on(folder, "trainer.max_epochs=8")
    assert_one_line(done, "4 epochs are another schedule than 8, hence another run", f"weights={folder}")


def test_a_run_of_an_earlier_version_goes_on_and_only_scraps_of_ours_are_removed(folder):
    for path in (folder / "checkpoints").iterdir():  # which did not say whose they are
        stored = torch.load(path, weights_only=True)
        del stored["run"]
        torch.save(stored, path)
        path.write_bytes(sealed(path.read_bytes()))
    record = json.loads((folder / "record.json").read_text())
    del record["trained_by"]
    versions = record["versions"] | {"torch": "1.0"}
    (folder / "record.json").write_text(json.dumps(record | {"git_commit": "0" * 40, "versions": versions}))
    (folder / "notes").mkdir()
    theirs = [folder / ".thesis.part", folder / ".record.json.part", folder / "notes" / ".last.ckpt-0a1b2c3d.part"]
    ours = [folder / ".record.json-0a1b2c3d.part", folder / "checkpoints" / ".last.ckpt-a_b1c2d3.part"]
    for path in (*theirs, *ours):
        path.write_text("a part")
    done = go_on(folder)
    assert done.returncode == 0, done.stderr
    assert sorted(folder.rglob("*.part")) == sorted(theirs)
    (line,) = (line for line in done.stdout.splitlines() if "another program" in line)
    assert line.startswith(f"{folder}: from epoch 2 on another program trains it: commit 0000000000")
    assert f"torch 1.0 -> {torch.__version__}" in line
    record = read_record(folder)
    assert [span.epochs for span in record.trained_by] == [[1, 2], [2, 4]]  # it was stopped inside the second
    assert record.trained_by[0].git_commit == "0" * 40
    assert record.trained_by[1].versions == record.versions


@pytest.mark.parametrize(
    ("run_dir", "words"),
    {
        ".": "is the working folder",
        "..": "is the working folder, or holds it",
        "": "is the working folder",
        "/": "is the root of the disk",
        "home": "is your home",
        "runs": "is where all runs lie (runs_dir = runs)",
        "runs/digits": "holds abc-s0, which is not of this run",
        "runs/.sweeps/new": "is for the files of sweeps",
        "theirs": "holds .browser.part, which is not of this run",
        "file": "a part of that path is a file",
        "pipe": "a part of that path is a file",
        "nowhere": "nowhere is a link to nothing, which is not there",
        "nowhere/new": "nowhere is a link to nothing, which is not there",
    }.items(),
)
def test_a_folder_of_other_things_is_refused_and_nothing_in_it_is_touched(run_dir, words, tmp_path):
    root = tmp_path / "work"
    for name in ("home", "theirs", "runs/digits/abc-s0/checkpoints", "runs/.sweeps"):
        (root / name).mkdir(parents=True)
    for name in (".a.part", "theirs/.browser.part", "runs/digits/abc-s0/checkpoints/.last.ckpt-0a1b2c3d.part", "file"):
        (root / name).write_text("not yours\n")
    os.mkfifo(root / "pipe")
    (root / "nowhere").symlink_to("nothing")
    before = tree(tmp_path)
    done = process(TRAIN, *CUT, f"run_dir={run_dir}", cwd=root, HOME=str(root / "home"))
    assert_one_line(done, words)
    assert done.returncode == 2
    assert tree(tmp_path) == before


@pytest.mark.parametrize("several", [[], ["-m", "seed=0,1"]], ids=["a run", "a sweep"])
def test_a_link_to_nothing_is_no_place_for_runs(several, tmp_path):
    (tmp_path / "runs").symlink_to("/nowhere/disk")
    done = process(TRAIN, *several, *CUT, cwd=tmp_path)
    assert_one_line(done, "runs is a link to /nowhere/disk, which is not there")


def test_a_working_folder_that_was_removed_is_said(tmp_path):
    words = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    command = ["sh", "-c", words, "sh", sys.executable, TRAIN, "+experiment=digits"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert_one_line(done, "the working folder was removed")
    assert done.returncode == 2


def test_files_have_the_rights_that_the_umask_leaves(tmp_path):
    before = os.umask(0o077)
    try:
        for umask, rights in ((0o077, 0o600), (0o002, 0o664)):
            os.umask(umask)
            folder = tmp_path / f"{umask}"
            with locked(folder, wait=False):
                write_atomically(folder / "file", "text")
            assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {rights}
    finally:
        os.umask(before)


def test_a_new_folder_is_on_disk_with_those_above_it(tmp_path, monkeypatch):
    settled = []
    monkeypatch.setattr("os.fsync", lambda fd: settled.append(os.readlink(f"/proc/self/fd/{fd}")))
    make_folder(tmp_path / "runs" / "digits" / "run")
    assert settled == [str(tmp_path), str(tmp_path / "runs"), str(tmp_path / "runs" / "digits")]


def test_a_lock_that_is_none_holds_nobody_up(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    assert not is_locked(tmp_path)
    (tmp_path / ".lock").unlink()
    with locked(tmp_path, wait=False):
        assert is_locked(tmp_path)
        with pytest.raises(UserError, match="another process"), locked(tmp_path, wait=False):
            pass
    assert not is_locked(tmp_path)
