import json

import pytest
from conftest import assert_one_line, process
from hydra.utils import get_class

from cosinegate.analysis import training_speed


@pytest.mark.slow
def test_the_benchmark_measures_every_bar_and_says_which_are_missed(tmp_path):
    small = ["name=digits", "steps=2", "batches=3", "val_batches=1", "rounds=1", "threads=1"]
    done = process("src/training_speed.py", *small, f"output={tmp_path}")
    figures = json.loads((tmp_path / "training.json").read_text())["figures"]
    assert [figure["bar"] for figure in figures] == [
        "<= 1.20",
        "<= 0.03",
        ">= 20",
        "<= 1.05",
        "< 3",
        "<= 15",
        "<= 1.00",
    ]
    assert all(figure["value"] > 0 for figure in figures)
    assert done.returncode == (0 if all(figure["met"] for figure in figures) else 1)
    table = (tmp_path / "training.md").read_text()
    for figure in figures:
        assert f"| {figure['what']} | {figure['value']:.3f} | {figure['bar']} |" in table


def test_the_callback_that_a_run_is_given_is_there():
    assert get_class(training_speed.RIVAL) is training_speed.Rival


def test_a_benchmark_of_nothing_is_refused():
    assert_one_line(process("src/training_speed.py", "rounds=0", afresh=True), "rounds = 0", "at least 1")
