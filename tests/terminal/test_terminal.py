"""Streams that are closed, full or read by nobody, and terminals that do not know their width."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import process, started
from lightning.pytorch.callbacks import RichProgressBar

from cosinegate import cli
from cosinegate.callbacks.console import count_from_one
from cosinegate.runs.record import read_record

TINY = ["src/train.py", "+experiment=digits", "trainer.max_epochs=2", "trainer.limit_train_batches=2", "threads=1"]
TINY += ["trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "callbacks.curves=null"]


def status(runs: Path) -> str:
    (folder,) = (runs / "digits").glob("*-s*")
    return read_record(folder).status


def test_a_run_goes_on_when_nobody_reads_what_it_prints(tmp_path):
    running = started(*TINY, f"runs_dir={tmp_path}", merged=True)
    assert running.stdout.readline().startswith("training digits")
    running.stdout.close()
    assert running.wait() == 0
    assert status(tmp_path) == "finished"


@pytest.mark.parametrize("closed", [(1,), (2,), (1, 2)])
def test_a_run_needs_no_streams(tmp_path, closed):
    running = started(*TINY, f"runs_dir={tmp_path}", closed=closed)
    assert running.communicate()[1] == ""
    assert running.returncode == 0
    assert status(tmp_path) == "finished"


def test_output_without_room_ends_no_run_and_hides_no_answer(tmp_path):
    running = started(*TINY, f"runs_dir={tmp_path}", output="/dev/full")
    words = running.communicate()[1]
    assert running.returncode == 0
    assert "No space left on device" in words
    assert len(words.splitlines()) == 1
    assert status(tmp_path) == "finished"
    for script in ("src/evaluate.py", "src/train.py"):
        asked = started(script, "--help", output="/dev/full")
        assert asked.communicate()[1].startswith("error: what was printed could not be written: No space left")
        assert asked.returncode == 2


def test_help_into_a_reader_that_has_seen_enough():
    for script in ("src/train.py", "src/evaluate.py"):
        running = started(script, "--help")
        running.stdout.close()
        assert running.wait() == 0
        assert running.errors() == ""


@pytest.mark.parametrize("columns", ["0", "-1", "wide"])
def test_a_terminal_that_does_not_know_its_width(tmp_path, columns):
    done = process(*TINY, "trainer.max_epochs=1", f"runs_dir={tmp_path}", COLUMNS=columns)
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout


def test_the_home_is_where_a_shell_would_have_it(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    words = {"runs_dir=~/x": "runs_dir=/home/me/x", "runs=[~/a,~/b]": "runs=[/home/me/a,/home/me/b]"}
    words |= {"run_dir='~/x'": "run_dir='/home/me/x'", "~seed": "~seed", "name=a~b": "name=a~b"}
    assert {word: cli._with_home(word) for word in words} == words


def test_the_bar_counts_epochs_as_the_lines_do():
    bar = RichProgressBar()
    bar._trainer = SimpleNamespace(max_epochs=4)
    count_from_one(bar)
    assert bar._get_train_description(0).split() == ["Epoch", "1/4"]
