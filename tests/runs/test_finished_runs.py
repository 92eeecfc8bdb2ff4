"""Finished runs: one that ended early, the link to the latest, runs behind links, weights taken from another run."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, assert_one_line, config, process
from test_run_folder import CUT, TRAIN

from cosinegate.analysis.runs import families, find_runs
from cosinegate.config.identity import run_folder
from cosinegate.lit import LitCosineGate
from cosinegate.runs.record import read_metrics, read_record
from cosinegate.terminal.errors import UserError
from cosinegate.train import train

STOPPING = "lightning.pytorch.callbacks.EarlyStopping"
EARLY = f"{{_target_: {STOPPING}, monitor: train/acc, mode: max, patience: 1, min_delta: 1}}"
TIMER = "{_target_: lightning.pytorch.callbacks.Timer, duration: '00:00:00:0%d'}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A run that EarlyStopping ended, one of as many epochs, and what was there before them."""
    root = tmp_path_factory.mktemp("runs")
    for words in (["name=early", f"+callbacks.early={EARLY}"], ["trainer.max_epochs=2"]):
        done = process(TRAIN, *CUT, *words, cwd=root)
        assert done.returncode == 0, done.stderr
        if words[0] == "name=early":
            (root / "early.txt").write_text(done.stdout)
    return root


def test_a_run_that_ended_early_says_so_and_stands_with_runs_of_its_length(runs):
    (early,) = (runs / "runs" / "early").glob("*-s0")
    record = read_record(early)
    assert (record.status, record.epochs.done, record.epochs.planned) == ("finished", 2, 4)
    assert record.ended_early == "EarlyStopping on train/acc"
    assert "2 of 4 epochs" in (runs / "early.txt").read_text()
    assert "ended by EarlyStopping on train/acc" in (runs / "early.txt").read_text()
    for command in ("pareto", "table"):
        done = process(str(ROOT / "src" / f"{command}.py"), "sweep=null", cwd=runs)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""  # no run is met twice
    figures = runs / "runs" / "figures"
    for path in (figures / "digits-resnet8-w8-2epochs-counted.md", figures / "runs.md"):
        assert path.read_text().count("(2 of 4 epochs, ended by EarlyStopping on train/acc)") == 1


@pytest.mark.parametrize("ends", [EARLY, TIMER % 1], ids=["EarlyStopping", "Timer"])
def test_a_run_that_ended_early_and_lacks_its_test_trains_no_more(ends, tmp_path, monkeypatch):
    words = [*CUT, "trainer.max_epochs=10000", f"+callbacks.ends={ends}", f"runs_dir={tmp_path}"]
    with monkeypatch.context() as broken:
        broken.setattr(LitCosineGate, "test_step", lambda self, *batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config(*words))
    monkeypatch.setattr(LitCosineGate, "training_step", lambda self, *batch: 1 / 0)
    record = train(config(*words))
    assert record.status == "finished"
    assert record.ended_early == ("EarlyStopping on train/acc" if ends == EARLY else "Timer")
    assert record.epochs.done == len(read_metrics(run_folder(config(*words)))) < 10000


def test_a_run_that_ends_before_its_first_validation_is_answered_with_a_line(tmp_path):
    done = process(TRAIN, *CUT, f"+callbacks.ends={TIMER % 0}", cwd=tmp_path)
    assert_one_line(done, "Timer ended the run before its first validation")
    (folder,) = (tmp_path / "runs" / "digits").glob("*-s0")
    assert read_record(folder).status == "failed"


def test_the_latest_run_is_a_link_that_replaces_nothing_else(runs, tmp_path):
    link = runs / "runs" / "digits" / "latest"
    (run,) = (runs / "runs" / "digits").glob("*-s0")
    assert os.readlink(link) == run.name
    folder = run_folder(config(*CUT, "trainer.max_epochs=1", f"runs_dir={tmp_path}"))
    folder.parent.mkdir(parents=True)
    (folder.parent / "latest").symlink_to(runs)
    train(config(*CUT, "trainer.max_epochs=1", f"runs_dir={tmp_path}"))
    assert (folder.parent / "latest").resolve() == runs.resolve()
    (folder.parent / "latest").unlink()
    (folder.parent / "latest").symlink_to("0123456789-s7")
    train(config(*CUT, "trainer.max_epochs=1", "seed=1", f"runs_dir={tmp_path}"))
    assert os.readlink(folder.parent / "latest") == folder.name.replace("-s0", "-s1")
    with pytest.raises(UserError, match=r"give the run's own folder, .*-s1"):
        train(config(*CUT, f"weights={folder.parent / 'latest'}", f"runs_dir={tmp_path}"))


def test_runs_behind_links_are_found_once_and_circles_end(runs, tmp_path):
    (tmp_path / "runs").mkdir()
    shutil.copytree(runs / "runs" / "digits", tmp_path / "disk" / "digits", symlinks=True)
    (tmp_path / "runs" / "digits").symlink_to(tmp_path / "disk" / "digits")
    (tmp_path / "runs" / "again").symlink_to(tmp_path / "runs" / "digits" / "latest")
    (tmp_path / "disk" / "digits" / "circle").symlink_to(tmp_path / "runs")
    (tmp_path / "runs" / "up").symlink_to("..")
    (tmp_path / "runs" / "nothing").symlink_to("nowhere")
    said = []
    (run,) = find_runs([tmp_path / "runs"], said.append)
    assert said == []
    assert families([run], "counted")
    done = process(str(ROOT / "src" / "pareto.py"), "sweep=null", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_begins_with_the_weights_of_another(runs, tmp_path, monkeypatch, capsys):
    (source,) = (runs / "runs" / "digits").glob("*-s0")
    first = {}
    step = LitCosineGate.training_step

    def noted(self, batch, batch_idx):
        first.setdefault("weights", {name: value.clone() for name, value in self.network.state_dict().items()})
        return step(self, batch, batch_idx)

    monkeypatch.setattr(LitCosineGate, "training_step", noted)
    monkeypatch.chdir(runs)
    train(config(*CUT, "trainer.max_epochs=3", "name=digits"))
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(f"runs/digits/{source.name} is this run on 2 epochs; 3 are another schedule")
    assert line.endswith(f"weights=runs/digits/{source.name}")
    first.clear()
    record = train(config(*CUT, "trainer.max_epochs=3", f"weights={source}", f"runs_dir={tmp_path}"))
    stored = torch.load(source / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, stored[f"network.{name}"]) for name, value in first["weights"].items())
    assert (record.weights.identity, record.weights.epochs) == (source.name[:10], 2)
    (found,) = find_runs([tmp_path], print)
    assert found.family[2] == 5  # what the network was trained for
    assert sorted(read_metrics(found.folder)) == [1, 2, 3]
