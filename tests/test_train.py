import csv
import json
import signal
from pathlib import Path

import pytest
import torch
from conftest import assert_one_line, config, process, started
from test_experiments import SHORT, short

from cosinegate.callbacks.checkpoints import AtomicCheckpoints
from cosinegate.config.identity import run_folder
from cosinegate.data.module import ImageData
from cosinegate.lit import LitCosineGate
from cosinegate.plots.curves import draw_curves
from cosinegate.runs.record import accuracies, read_metrics, read_record
from cosinegate.terminal.errors import UserError
from cosinegate.train import train

NAMES = ["train/loss", "train/loss_ce", "train/loss_cons", "train/loss_flops", "train/acc", "val/acc", "val/loss"]
NAMES += ["gates/mean", "gates/skip_percent", "gates/relaxed_mean", "gates/block_00", "gates/block_02"]
NAMES += ["gates/dynamic_blocks", "gates/paths", "cir/block_00", "cir/block_02", "flops/counted", "flops/executed"]
NAMES += ["schedule/prog", "schedule/lr", "schedule/temperature", "speed/images_per_second"]

FIELDS = ["format", "status", "experiment", "identity", "data", "seed", "gate", "epochs", "accuracy", "mean_gate"]
FIELDS += ["skip_percent", "flops", "dynamic_blocks", "paths", "selected_on", "seconds", "images_per_second"]
FIELDS += ["parameters", "gate_parameters", "versions", "git_commit", "command", "started", "updated"]
FIELDS += ["peak_memory_mib", "blocks_open"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """One whole run of the digits experiment through its real command line."""
    root = tmp_path_factory.mktemp("digits")
    done = process("src/train.py", "+experiment=digits", "threads=1", f"runs_dir={root}", afresh=True)
    (folder,) = (root / "digits").glob("*-s*")
    return done, folder


def test_the_command_trains_and_ends_with_a_table(digits):
    done, folder = digits
    assert done.returncode == 0, done.stderr
    for words in (
        "test accuracy",
        "mean gate",
        "skip",
        "FLOPs counted",
        "FLOPs executed",
        "dynamic blocks",
        "peak accuracy",
    ):
        assert words in done.stdout
    assert "chosen on the test set" in done.stdout
    assert done.stdout.count("epoch ") >= 4
    said = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith(("figure", "record")))
    assert Path(said["figure"]).read_bytes().startswith(b"\x89PNG")
    assert Path(said["record"]) == folder / "record.json"
    assert done.stderr == ""


def test_the_record_and_the_metrics_are_complete(digits):
    _, folder = digits
    record = read_record(folder)
    assert [field for field in FIELDS if field not in record.as_dict()] == []
    rows = read_metrics(folder)
    assert sorted(rows) == [1, 2, 3, 4]
    for row in rows.values():
        assert [name for name in NAMES if name not in row] == []
        assert not any(name.startswith("test/") for name in row)
    best = max(rows, key=lambda epoch: rows[epoch]["val/acc"])
    assert record.accuracy.best == rows[best]["val/acc"]
    assert record.accuracy.best_epoch == best
    assert record.accuracy.last == record.accuracy.test == rows[4]["val/acc"]
    assert record.accuracy.best > 0.6  # it learns
    assert record.selected_on == "test"
    assert (record.epochs.done, record.epochs.planned) == (4, 4)
    assert record.flops.counted == record.mean_gate == pytest.approx(sum(record.blocks_open) / 3)
    assert record.flops.executed >= 1.0
    assert record.skip_percent == pytest.approx(100 * (1 - record.mean_gate))
    assert record.command.endswith(f"src/train.py +experiment=digits threads=1 runs_dir={folder.parents[1]}")
    assert record.versions["torch"] == torch.__version__
    for name in ("config.yaml", "checkpoints/last.ckpt", "checkpoints/best.ckpt"):
        assert (folder / name).exists()


def test_the_schedule_is_the_papers(digits):
    _, folder = digits
    rows = read_metrics(folder)
    assert [rows[epoch]["schedule/prog"] for epoch in (1, 2, 3, 4)] == [0.0, 1.0, 1.0, 1.0]
    cosine = [0.05 * (1 + torch.cos(torch.tensor(torch.pi * t / 4)).item()) for t in range(4)]
    assert [rows[epoch]["schedule/lr"] for epoch in (1, 2, 3, 4)] == pytest.approx(cosine, rel=1e-5)


def test_a_checkpoint_is_plain_data(digits):
    _, folder = digits
    stored = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert stored["hyper_parameters"]["gate"]["polarity"] == "paper"


def test_starting_a_finished_run_again_says_so_and_changes_nothing(digits):
    _, folder = digits
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    again = process("src/train.py", "+experiment=digits", "threads=1", f"runs_dir={folder.parents[1]}")
    assert again.returncode == 0
    assert "this run is finished" in again.stdout
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_another_config_in_a_named_folder_is_refused(digits):
    _, folder = digits
    before = (folder / "record.json").read_bytes()
    done = process("src/train.py", "+experiment=digits", "optimizer.lr=0.01", f"run_dir={folder}")
    assert_one_line(done, "run_dir", "another config")
    assert (folder / "record.json").read_bytes() == before


def test_a_folder_of_somebody_elses_files_is_refused(tmp_path):
    (tmp_path / "metrics.csv").write_text("mine")
    with pytest.raises(UserError, match="no record"):
        train(config("+experiment=digits", f"run_dir={tmp_path}"))
    assert (tmp_path / "metrics.csv").read_text() == "mine"


def test_a_killed_run_goes_on_and_ends_as_if_it_never_stopped(digits, tmp_path):
    _, whole = digits
    command = ["src/train.py", "+experiment=digits", "threads=1", f"runs_dir={tmp_path}"]
    running = started(*command)
    for line in running.stdout:
        if line.startswith("epoch 3/4"):  # so the checkpoint of epoch 2 is there
            break
    running.send_signal(signal.SIGKILL)
    running.wait()
    (folder,) = (tmp_path / "digits").glob("*-s*")
    record, rows = read_record(folder), read_metrics(folder)
    assert record.status == "running"
    assert record.epochs.done == len(rows)
    assert record.accuracy.last == rows[max(rows)]["val/acc"]
    assert record.mean_gate == rows[max(rows)]["gates/mean"]
    resumed = process(*command)
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming digits in {folder}" in resumed.stdout
    assert "epoch 1/4" not in resumed.stdout
    for name in ("last.ckpt", "best.ckpt"):
        a, b = (torch.load(f / "checkpoints" / name, weights_only=True)["state_dict"] for f in (whole, folder))
        assert all(torch.equal(a[key], b[key]) for key in a)
    rows = [list(csv.DictReader((f / "metrics.csv").open())) for f in (whole, folder)]
    for one, other in zip(*rows, strict=True):
        assert {k: v for k, v in one.items() if "speed/" not in k} == {
            k: v for k, v in other.items() if "speed/" not in k
        }


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    command = ["src/train.py", "+experiment=digits", "trainer.max_epochs=500", f"runs_dir={tmp_path}"]
    first = started(*command, "threads=1")
    for line in first.stdout:
        if line.startswith("epoch 1/"):
            break
    second = process(*command, "threads=1")
    first.kill()
    first.wait()
    assert_one_line(second, str(tmp_path), "another process")


def test_an_interrupted_run_says_so_and_its_record_too(tmp_path):
    command = ["src/train.py", "+experiment=digits", "trainer.max_epochs=500", f"runs_dir={tmp_path}", "threads=1"]
    running = started(*command)
    for line in running.stdout:
        if line.startswith("epoch 1/"):
            break
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate()
    assert running.returncode == 130
    assert errors.splitlines() == ["stopped (interrupted): start the same command again to resume"]
    (folder,) = (tmp_path / "digits").glob("*-s*")
    record = read_record(folder)
    assert (record.status, record.error) == ("stopped", "interrupted")


def test_a_failing_run_is_recorded_as_failed(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("no file \udcff")  # a name that is not UTF-8

    monkeypatch.setattr("cosinegate.objective.CosineGateLoss.mean_gate", fails)
    with pytest.raises(RuntimeError, match="no file"):
        short(tmp_path, "+experiment=digits", *SHORT)
    (folder,) = (tmp_path / "digits").glob("*-s*")
    record = read_record(folder)
    assert record.status == "failed"
    assert record.error == "RuntimeError: no file \\udcff"


def test_a_run_without_any_callback_that_may_be_switched_off_has_a_whole_record(tmp_path):
    off = [f"callbacks.{name}=null" for name in config().callbacks]
    record, folder = short(tmp_path, "+experiment=digits", *SHORT, "objective.tau_target=0.1", *off)
    written = json.loads((folder / "record.json").read_text())
    assert record.status == "finished"
    assert [field for field in FIELDS if written.get(field) is None] == []
    assert record.flops.counted == record.mean_gate == pytest.approx(sum(record.blocks_open) / 3)
    assert (folder / "checkpoints" / "best.ckpt").exists()
    assert not (folder / "figures").exists()
    rows = read_metrics(folder)
    assert not {name for row in rows.values() for name in row if name.startswith(("gates/block_", "cir/"))}
    assert "schedule/prog" not in rows[1]
    assert rows[1]["schedule/lr"] == pytest.approx(0.1)
    assert rows[1]["train/loss_flops"] > 0  # no warmup: the penalty is whole from the first step on


def test_curves_are_drawn_without_the_gate_statistics(tmp_path):
    record, folder = short(tmp_path, "+experiment=digits", *SHORT, "callbacks.gate_statistics=null")
    rows = read_metrics(folder)
    assert rows[2]["schedule/prog"] == 1.0
    assert "gates/mean" not in rows[2]
    assert 0 <= record.mean_gate <= 1  # of the test
    draw_curves(rows, tmp_path / "curves.png", "digits", 0.7, 1.0)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_held_out_images_are_apart_and_do_not_depend_on_the_seed():
    def splits(seed):
        data = ImageData(config("+experiment=digits", "data.validation=holdout").data, seed)
        data.setup()
        return {name: {image.numpy().tobytes() for image in images} for name, (images, _) in data.splits.items()}, data

    (first, data), (second, _) = splits(0), splits(1)
    assert first == second
    assert {name: len(labels) for name, (_, labels) in data.splits.items()} == {"train": 1138, "val": 300, "test": 359}
    assert not first["train"] & first["val"]
    assert not first["val"] & first["test"]


def test_holdout_chooses_on_held_out_images_and_tests_the_best_once(tmp_path, monkeypatch):
    tested = []
    step = LitCosineGate.test_step
    monkeypatch.setattr(LitCosineGate, "test_step", lambda self, *b: tested.append(len(b[0][1])) or step(self, *b))
    record, folder = short(tmp_path, "+experiment=digits", "data.validation=holdout", "threads=1")
    assert sum(tested) == 359  # every test image once
    assert record.selected_on == "holdout"
    assert record.accuracy.test_of == "best"
    assert record.accuracy.test != record.accuracy.best
    best = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)
    assert best["epoch"] + 1 == record.accuracy.best_epoch


def test_last_is_the_last_epoch_even_when_it_is_not_the_best(tmp_path, monkeypatch):
    step = LitCosineGate.validation_step

    def right_in_the_second_epoch_alone(self, batch, batch_idx):
        images, target = batch
        return step(self, (images, self(images).logits.argmax(1) if self.current_epoch == 1 else target), batch_idx)

    monkeypatch.setattr(LitCosineGate, "validation_step", right_in_the_second_epoch_alone)
    record, folder = short(tmp_path, "+experiment=digits", *SHORT, "trainer.max_epochs=4")
    assert (record.accuracy.best, record.accuracy.best_epoch) == (1.0, 2)
    last, best = (torch.load(folder / "checkpoints" / f"{n}.ckpt", weights_only=True) for n in ("last", "best"))
    assert (last["epoch"] + 1, best["epoch"] + 1) == (4, 2)


def test_a_run_that_lacks_only_its_test_trains_no_more(tmp_path, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(LitCosineGate, "test_step", lambda self, *batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            short(tmp_path, "+experiment=digits", *SHORT)
    monkeypatch.setattr(LitCosineGate, "training_step", lambda self, *batch: 1 / 0)
    record, _ = short(tmp_path, "+experiment=digits", *SHORT)
    assert (record.status, record.epochs.done) == ("finished", 2)


def test_a_failed_checkpoint_write_keeps_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    AtomicCheckpoints().save_checkpoint({"epoch": 1}, path)
    AtomicCheckpoints().save_checkpoint({"epoch": 1}, path)
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        AtomicCheckpoints().save_checkpoint({"epoch": 2}, path)
    assert torch.load(path, weights_only=True) == {"epoch": 1}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["last.ckpt", "previous.ckpt"]


def test_a_multirun_trains_every_job_in_a_wandb_run_of_its_own(tmp_path):
    jobs = ["+experiment=digits", "seed=0,1", "logger=[wandb,tensorboard]", f"runs_dir={tmp_path}", *SHORT]
    done = process("src/train.py", "-m", *jobs)
    assert done.returncode == 0, done.stderr
    seeds = [json.loads(path.read_text())["seed"] for path in tmp_path.glob("digits/*-s*/record.json")]
    assert sorted(seeds) == [0, 1]
    for folder in (tmp_path / "digits").glob("*-s*"):  # offline, as there is no account
        (run,) = (folder / "wandb").glob("offline-run-*/*.wandb")
        assert run.stem == f"run-digits-{folder.name}"
        assert list((folder / "tensorboard").glob("events*"))


def test_the_folder_follows_from_the_config_and_the_seed():
    a, b = (run_folder(config("+experiment=digits", f"seed={seed}")) for seed in (1, 2))
    assert a.parent == b.parent == Path("runs/digits")
    assert (a.name[:10], a.name[10:], b.name[10:]) == (b.name[:10], "-s1", "-s2")


def test_best_is_the_first_of_equals_and_epoch_100_is_kept():
    rows = {e: {"val/acc": 0.9 if e in (7, 100) else 0.5, "gates/skip_percent": float(e)} for e in range(1, 121)}
    found = accuracies(rows)
    assert (found["best"], found["best_epoch"], found["best_skip_percent"]) == (0.9, 7, 7.0)
    assert (found["epoch_100"], found["last"]) == (0.9, 0.5)
