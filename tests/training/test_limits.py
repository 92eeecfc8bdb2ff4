"""Lightning's ways to train less: max_steps, max_time, overfit_batches, fast_dev_run. Its profiler."""

import json
from pathlib import Path

import torch
from conftest import ROOT, assert_one_line, config, process

from cosinegate.analysis.runs import read_run
from cosinegate.runs.record import Record, read_metrics, read_record
from cosinegate.train import train

TINY = ["+experiment=digits", "threads=1", "callbacks.curves=null", "data.batch_size=8", "data.eval_batch_size=64"]
TINY += [f"trainer.limit_{stage}_batches=3" for stage in ("train", "val", "test")]
IN_TESTS = {"PYTHONPATH": str(ROOT / "tests")}
TIMES = ("seconds", "images_per_second", "speed", "updated", "started", "first_step_at", "peak_memory_mib", "command")


def trained(folder: Path, *words: str) -> Record:
    return train(config(*TINY, *words, f"run_dir={folder}"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def assert_same_run(one: Path, other: Path) -> None:
    assert all(map(torch.equal, weights(one).values(), weights(other).values()))
    rows = [
        {epoch: {name: v for name, v in row.items() if not name.startswith("speed")} for epoch, row in rows.items()}
        for rows in map(read_metrics, (one, other))
    ]
    assert rows[0] == rows[1]
    records = [{k: v for k, v in read_record(folder) if k not in TIMES} for folder in (one, other)]
    for record in records:
        del record["identity"], record["overrides"]
    assert records[0] == records[1]


def test_max_steps_ends_in_the_middle_of_an_epoch_and_the_record_says_so(tmp_path):
    cut = trained(tmp_path / "cut", "trainer.max_steps=4", "trainer.check_val_every_n_epoch=4")
    assert cut.status == "finished"
    assert cut.cut.as_dict() == {"max_steps": 4}
    assert (cut.epochs.done, cut.epochs.planned) == (2, 4)
    assert cut.accuracy.last_epoch == 2  # validated where it ended, whatever the schedule
    assert torch.load(tmp_path / "cut" / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 4
    for steps in (12, 99):
        whole = trained(tmp_path / str(steps), f"trainer.max_steps={steps}")
        assert whole.cut is None
        assert (whole.epochs.done, whole.epochs.planned) == (4, 4)


def test_max_time_ends_a_run_and_counts_over_its_attempts(tmp_path):
    words = ["trainer.max_epochs=10000", "trainer.max_time=00:00:00:01"]
    record = trained(tmp_path / "a", *words)
    assert record.cut.as_dict() == {"max_time": "00:00:00:01"}
    assert record.status == "finished"
    assert 1 <= record.epochs.done < 10000


def test_a_cut_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path):
    fault = ["+callbacks.fault._target_=faults.Befalls"]
    command = ["src/train.py", *TINY, *fault, "trainer.max_steps=5"]
    assert process(*command, f"run_dir={tmp_path / 'whole'}", **IN_TESTS).returncode == 0
    stopped = process(*command, f"run_dir={tmp_path / 'stopped'}", **IN_TESTS, FAULT="SIGTERM")  # at step 5 itself
    assert stopped.returncode == 143, stopped.stderr
    done = process(*command, f"run_dir={tmp_path / 'stopped'}", **IN_TESTS)
    assert done.returncode == 0, done.stderr
    assert "trainer.max_steps=5" in done.stdout
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_overfit_batches_are_the_same_in_every_epoch(tmp_path):
    words = ["trainer.overfit_batches=1", "data.crop_padding=0", "data.flip=false", "gate=none", "data.batch_size=16"]
    record = trained(tmp_path / "a", *words, "trainer.max_epochs=12", "network.width=8")
    assert record.cut.as_dict() == {"overfit_batches": 1}
    assert read_run(tmp_path / "a").family[3] == f"{record.selected_on}-overfit-1"  # a table keeps it apart
    rows = read_metrics(tmp_path / "a")
    assert rows[12]["train/acc"] > 0.9  # of sixteen images; shuffled, of 192


def test_fast_dev_run_goes_through_everything_and_keeps_nothing(tmp_path):
    done = process(str(ROOT / "src" / "train.py"), *TINY, "trainer.fast_dev_run=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("fast_dev_run: 2 batches of training, validation and test")
    assert not list(tmp_path.iterdir())


def test_a_profile_lies_in_the_runs_folder_and_changes_no_identity(tmp_path):
    command = [str(ROOT / "src" / "train.py"), *TINY, "trainer.max_epochs=1", "trainer.profiler=simple"]
    done = process(*command, cwd=tmp_path)
    (folder,) = (tmp_path / "runs" / "digits").glob("*-s*")
    assert f"profile {folder.relative_to(tmp_path) / 'fit-profile.txt'}" in done.stdout
    assert "run_training_epoch" in (folder / "fit-profile.txt").read_text()
    assert json.loads((folder / "record.json").read_text())["status"] == "finished"
    assert "this run is finished" in process(*command[:-1], cwd=tmp_path).stdout


def test_early_stopping_on_a_metric_that_is_not_there(tmp_path):
    stop = ["+callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping", "+callbacks.stop.monitor=val/ac"]
    done = process("src/train.py", *TINY, *stop, "trainer.max_epochs=2", f"runs_dir={tmp_path}")
    assert_one_line(done, "monitor = val/ac: no such metric, did you mean val/acc?")
    assert done.returncode == 2
