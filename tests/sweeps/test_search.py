import json
import signal
import time
from pathlib import Path

import optuna
import pytest
from conftest import ROOT, assert_one_line, process, started
from omegaconf import DictConfig

from cosinegate import cli
from cosinegate.config.checks import validate
from cosinegate.sweeps.search import search
from cosinegate.sweeps.space import Space, search_space
from cosinegate.terminal.errors import UserError

SHORT = ["+experiment=digits", "trainer.max_epochs=2", "trainer.limit_train_batches=4", "threads=1"]
SHORT += ["trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "callbacks.curves=null"]


def study_in(runs: Path) -> optuna.Study:
    (path,) = (runs / ".sweeps").glob("*/study.db")
    return optuna.load_study(study_name=path.parent.name, storage=f"sqlite:///{path}")


def found(runs: Path) -> list[tuple]:
    trials = study_in(runs).trials
    return [(trial.state.name, trial.params, trial.values) for trial in trials]


def space_of(*overrides: str) -> tuple[DictConfig, Space]:
    """The options that a command line with these overrides gives, and their space, checked as src/search.py does."""
    options = cli.compose(*overrides, config_name="search")
    validate(options)
    return options, search_space(options)


def test_a_search_killed_on_the_way_ends_with_the_same_trials(tmp_path):
    options = [*SHORT, "trainer.max_epochs=3", "search.trials=3", "search.population=2"]
    whole = process("src/search.py", *options, f"runs_dir={tmp_path}/whole")
    assert whole.returncode == 0, whole.stderr
    command = ["src/search.py", *options, f"runs_dir={tmp_path}/killed"]
    running = started(*command)

    def epochs() -> int:
        paths = (tmp_path / "killed").glob("digits/*-s*/record.json")
        return sum(json.loads(path.read_text())["epochs"]["done"] for path in paths)

    while epochs() < 4:  # in the second trial
        assert running.poll() is None
        time.sleep(0.02)
    running.send_signal(signal.SIGKILL)
    running.wait()
    done = process(*command)
    assert done.returncode == 0, done.stderr
    assert "1 of 3 trials finished before" in done.stdout
    assert found(tmp_path / "killed") == found(tmp_path / "whole")
    assert [state for state, *_ in found(tmp_path / "whole")] == ["COMPLETE"] * 3
    records = [json.loads(path.read_text()) for path in (tmp_path / "killed").glob("digits/*-s*/record.json")]
    values = sorted((r["accuracy"]["best"], 1 - r["accuracy"]["best_skip_percent"] / 100) for r in records)
    assert values == sorted(tuple(trial.values) for trial in study_in(tmp_path / "killed").trials)
    assert {record["selected_on"] for record in records} == {"holdout"}
    assert {record["sweep"] for record in records} == {study_in(tmp_path / "killed").study_name}
    best = {str(trial.number + 1) for trial in study_in(tmp_path / "killed").best_trials}
    rows = [line.split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    assert {row[2].strip() for row in rows if "★" in row[1]} == best
    manifest = json.loads((tmp_path / "killed" / ".sweeps" / f"{records[0]['sweep']}.json").read_text())
    assert len(manifest["runs"]) == 3


def test_a_search_with_tpe_goes_on_to_more_trials(tmp_path):
    words = [*SHORT, "trainer.max_epochs=1", "search.sampler=tpe", f"runs_dir={tmp_path}"]
    for trials in (1, 2):
        search(*space_of(*words, f"search.trials={trials}"))
    assert [state for state, *_ in found(tmp_path)] == ["COMPLETE", "COMPLETE"]


def test_a_failed_trial_stops_nothing_and_is_tried_again(tmp_path):
    fault = ["+callbacks.fault._target_=faults.Fault", "+callbacks.fault.seed=0"]
    command = ["src/search.py", *SHORT, *fault, "search.trials=1", "search.study=mine", f"runs_dir={tmp_path}"]
    path = str(ROOT / "tests")
    done = process(*command, PYTHONPATH=path, FAULT="1")
    assert_one_line(done, "trial 1", "RuntimeError: a fault")
    again = process(*command, PYTHONPATH=path)
    assert again.returncode == 0, again.stderr
    (failed, retried) = study_in(tmp_path).trials
    assert (failed.state.name, retried.state.name) == ("FAIL", "COMPLETE")
    assert retried.params == failed.params
    other = process(*command, "search.cost=executed", PYTHONPATH=path)
    assert_one_line(other, "search.study = mine", "another search")


def test_a_trial_stopped_while_its_values_were_chosen_is_not_taken_up(tmp_path):
    command = ["src/search.py", *SHORT, "trainer.max_epochs=1", "search.study=mine", f"runs_dir={tmp_path}"]
    assert process(*command, "search.trials=1").returncode == 0
    half = study_in(tmp_path).ask()
    half.suggest_float("lambda_flops", 0.5, 10, log=True)
    done = process(*command, "search.trials=2")
    assert done.returncode == 0, done.stderr
    trials = study_in(tmp_path).trials
    assert [(trial.state.name, len(trial.params)) for trial in trials] == [
        ("COMPLETE", 5),
        ("FAIL", 1),
        ("COMPLETE", 5),
    ]
    (tmp_path / ".sweeps" / "mine" / "study.db").write_bytes(b"not a database, whatever it says" * 100)
    assert_one_line(process(*command, "search.trials=2"), "study.db cannot be used")


def test_a_studys_name_is_no_address(tmp_path):
    """?, %, # and braces have a meaning in the address of a database, and none in a path."""
    name = "a?mode=memory%20#{x}"
    words = [*SHORT, "trainer.max_epochs=1", "search.trials=1", f"search.study='{name}'", "runs_dir='r?u#ns'"]
    done = process(str(ROOT / "src" / "search.py"), *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["r?u#ns"]
    assert (tmp_path / "r?u#ns" / ".sweeps" / name / "study.db").stat().st_size > 1000
    again = process(str(ROOT / "src" / "search.py"), *words, cwd=tmp_path)
    assert "1 of 1 trials finished before" in again.stdout


BAD = [
    (["search.space.tau_target.high=2"], ["search.space", "objective.tau_target = 2.0"]),
    (["search.space.tau_target.low=0.95"], ["search.space.tau_target", "0.95"]),
    (["search.space.lambda_flops.low=0"], ["search.space.lambda_flops"]),
    (["search.space.gamma_0.key=gate.gama.init"], ["search.space.gamma_0.key", "gate.gama.init"]),
    (["search.space.gamma_0.key=gate.polarity"], ["search.space.gamma_0.key", "gate.polarity"]),
    (["search.trials=0"], ["search.trials", "at least 1"]),
    (["search.population=1"], ["search.population", "at least 2"]),
    (["search.cost=latency"], ["search.cost", "counted or executed"]),
    (["run_dir=here"], ["run_dir = here", "runs_dir"]),
    (["gate=none"], ["gate.kind = none"]),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[0][0])
def test_a_bad_search_is_refused_and_nothing_written(case, tmp_path):
    overrides, fragments = case
    with pytest.raises(UserError) as caught:
        space_of("+experiment=digits", *overrides, f"runs_dir={tmp_path}/runs")
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["search.sampler=grid"], ["search.sampler", "grid"]),
        (["objective.tau_target=7"], ["objective.tau_target"]),
        (["-m", "search.trials=1"], ["leave -m out"]),
        (["+sweeps=quick"], ["src/train.py"]),
    ],
)
def test_a_bad_command_line_ends_with_one_line(words, fragments, tmp_path):
    assert_one_line(process("src/search.py", *words, "+experiment=digits", f"runs_dir={tmp_path}/runs"), *fragments)
