import csv
import json
import signal
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from conftest import ROOT, assert_one_line, config, process

from cosinegate.build import build_module
from cosinegate.callbacks.checkpoints import AtomicCheckpoints
from cosinegate.config import run_folder
from cosinegate.data.loader import EpochOrder
from cosinegate.data.module import ImageData
from cosinegate.errors import UserError
from cosinegate.lit import LitCosineGate
from cosinegate.record import accuracies, read_metrics, read_record
from cosinegate.run import train

EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
SHORT = ["data=digits", "trainer.max_epochs=2", "trainer.limit_train_batches=3", "trainer.limit_val_batches=1"]
SHORT += ["trainer.limit_test_batches=1", "threads=1"]

# train/loss after two epochs of three batches on the digits; a change that should not move it must not
GOLDEN = {
    "aggressive": 2.347211,
    "balanced": 2.333557,
    "conservative": 2.509214,
    "digits": 2.323620,
    "digits_predictive": 1.965179,
    "mnist": 2.333557,
    "mnist_predictive": 2.247514,
    "predictive_aggressive": 1.624463,
    "predictive_balanced": 1.501330,
    "predictive_conservative": 1.540614,
    "quickstart": 2.342105,
    "resnet20": 1.432338,
    "static": 1.387148,
}


GOLDEN_PENALTY = 0.274582
GOLDEN_CALIBRATED = 1.817756


def short(tmp_path: Path, *overrides: str):
    chosen = config(*overrides, f"runs_dir={tmp_path}")
    return train(chosen), Path(chosen.run_dir)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_trains_on_digits_to_its_golden_loss(experiment, tmp_path):
    record, folder = short(tmp_path, f"+experiment={experiment}", *SHORT)
    assert record["status"] == "finished"
    assert record["experiment"] == experiment
    rows = read_metrics(folder)
    assert sorted(rows) == [1, 2]
    assert rows[2]["train/loss"] == pytest.approx(GOLDEN[experiment], rel=2e-3)


def test_the_penalty_has_its_golden_loss_too(tmp_path):
    pressed = ["gate.polarity=novelty", "objective.warmup_epochs=0", "objective.tau_target=0.3"]
    _, folder = short(tmp_path, "+experiment=balanced", *SHORT, *pressed)
    row = read_metrics(folder)[2]
    assert row["train/loss_flops"] == pytest.approx(GOLDEN_PENALTY, rel=2e-3)
    total = row["train/loss_ce"] + 0.01 * row["train/loss_cons"] + 3.0 * row["train/loss_flops"]
    assert row["train/loss"] == pytest.approx(total, rel=1e-5)


def test_calibrated_gates_have_their_golden_loss_too(tmp_path):
    at_once = ["objective.start_epoch=0", "objective.warmup_epochs=0"]
    _, folder = short(tmp_path, "+experiment=predictive_balanced", *SHORT, *at_once)
    row = read_metrics(folder)[2]
    assert row["train/loss"] == pytest.approx(GOLDEN_CALIBRATED, rel=1e-2)
    assert row["gates/relaxed_mean"] == pytest.approx(0.755, abs=0.01)


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
    done = process("src/train.py", "+experiment=digits", "threads=1", f"runs_dir={root}")
    (folder,) = (root / "digits").iterdir()
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
    assert [field for field in FIELDS if field not in record] == []
    rows = read_metrics(folder)
    assert sorted(rows) == [1, 2, 3, 4]
    for row in rows.values():
        assert [name for name in NAMES if name not in row] == []
        assert not any(name.startswith("test/") for name in row)
    best = max(rows, key=lambda epoch: rows[epoch]["val/acc"])
    assert record["accuracy"]["best"] == rows[best]["val/acc"]
    assert record["accuracy"]["best_epoch"] == best
    assert record["accuracy"]["last"] == record["accuracy"]["test"] == rows[4]["val/acc"]
    assert record["accuracy"]["best"] > 0.6  # it learns
    assert record["selected_on"] == "test"
    assert record["epochs"] == {"planned": 4, "done": 4}
    assert record["flops"]["counted"] == record["mean_gate"] == pytest.approx(sum(record["blocks_open"]) / 3)
    assert record["flops"]["executed"] >= 1.0
    assert record["skip_percent"] == pytest.approx(100 * (1 - record["mean_gate"]))
    assert record["command"].endswith(f"src/train.py +experiment=digits threads=1 runs_dir={folder.parents[1]}")
    assert record["versions"]["torch"] == torch.__version__
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
    command = [sys.executable, "src/train.py", "+experiment=digits", "threads=1", f"runs_dir={tmp_path}"]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in running.stdout:
        if line.startswith("epoch 3/4"):  # so the checkpoint of epoch 2 is there
            break
    running.send_signal(signal.SIGKILL)
    running.wait()
    (folder,) = (tmp_path / "digits").iterdir()
    record, rows = read_record(folder), read_metrics(folder)
    assert record["status"] == "running"
    assert record["epochs"]["done"] == len(rows)
    assert record["accuracy"]["last"] == rows[max(rows)]["val/acc"]
    assert record["mean_gate"] == rows[max(rows)]["gates/mean"]
    resumed = process(*command[1:])
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
    command = [sys.executable, "src/train.py", "+experiment=digits", "trainer.max_epochs=500", f"runs_dir={tmp_path}"]
    first = subprocess.Popen([*command, "threads=1"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in first.stdout:
        if line.startswith("epoch 1/"):
            break
    second = process(*command[1:], "threads=1")
    first.kill()
    first.wait()
    assert_one_line(second, str(tmp_path), "another process")


def test_an_interrupted_run_says_so_and_its_record_too(tmp_path):
    command = ["src/train.py", "+experiment=digits", "trainer.max_epochs=500", f"runs_dir={tmp_path}", "threads=1"]
    running = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in running.stdout:
        if line.startswith("epoch 1/"):
            break
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate()
    assert running.returncode != 0
    assert "Traceback" not in errors
    assert "again" in errors.splitlines()[-1]
    (folder,) = (tmp_path / "digits").iterdir()
    record = read_record(folder)
    assert (record["status"], record["error"]) == ("failed", "interrupted")


def test_a_failing_run_is_recorded_as_failed(tmp_path, monkeypatch):
    monkeypatch.setattr("cosinegate.objective.Objective.mean_gate", lambda self, gates: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        short(tmp_path, "+experiment=digits", *SHORT)
    (folder,) = (tmp_path / "digits").iterdir()
    record = read_record(folder)
    assert record["status"] == "failed"
    assert "ZeroDivisionError" in record["error"]


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
    assert record["selected_on"] == "holdout"
    assert record["accuracy"]["test_of"] == "best"
    assert record["accuracy"]["test"] != record["accuracy"]["best"]
    best = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)
    assert best["epoch"] + 1 == record["accuracy"]["best_epoch"]


def test_every_epoch_draws_its_own_order(tmp_path, monkeypatch):
    drawn = []
    draw = EpochOrder.draw
    monkeypatch.setattr(EpochOrder, "draw", lambda self: drawn.append((self.seed, self.epoch)) or draw(self))
    short(tmp_path, "+experiment=digits", "seed=3", *SHORT)
    assert drawn == [(3, 0), (3, 1)]


def test_the_dense_baseline_counts_and_executes_everything(tmp_path):
    record, folder = short(tmp_path, "+experiment=resnet20", *SHORT)
    assert record["gate"] == "none"
    assert record["gate_parameters"] == 0
    assert (record["mean_gate"], record["flops"]["executed"]) == (1.0, 1.0)
    assert (record["dynamic_blocks"], record["paths"]) == (0, 1)
    assert not any(name.startswith("cir/") for name in read_metrics(folder)[1])


def test_annealing_noise_and_per_step_warmup_reach_the_network(tmp_path, monkeypatch):
    seen = []
    step = LitCosineGate.training_step

    def watched(self, batch, batch_idx):
        relaxation = self.network.blocks[0].gate.opening
        seen.append((relaxation.temperature, relaxation.noisy, self.objective.prog))
        return step(self, batch, batch_idx)

    monkeypatch.setattr(LitCosineGate, "training_step", watched)
    overrides = ["gate.relaxation.annealing=linear", "gate.relaxation.noise_until=0.5", "trainer.max_epochs=3"]
    overrides += ["objective.per_step=true", "objective.warmup_epochs=2"]
    _, folder = short(tmp_path, "+experiment=digits", *SHORT, *overrides)
    temperatures, noisy, progs = zip(*seen, strict=True)
    assert temperatures == pytest.approx([1.0] * 3 + [0.55] * 3 + [0.1] * 3)
    assert noisy == (True,) * 6 + (False,) * 3
    assert progs == pytest.approx([0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 1, 1])
    assert [rows["schedule/temperature"] for rows in read_metrics(folder).values()] == pytest.approx([1.0, 0.55, 0.1])


def test_last_is_the_last_epoch_even_when_it_is_not_the_best(tmp_path, monkeypatch):
    step = LitCosineGate.validation_step

    def right_in_the_second_epoch_alone(self, batch, batch_idx):
        images, target = batch
        return step(self, (images, self(images).logits.argmax(1) if self.current_epoch == 1 else target), batch_idx)

    monkeypatch.setattr(LitCosineGate, "validation_step", right_in_the_second_epoch_alone)
    record, folder = short(tmp_path, "+experiment=digits", *SHORT, "trainer.max_epochs=4")
    assert (record["accuracy"]["best"], record["accuracy"]["best_epoch"]) == (1.0, 2)
    last, best = (torch.load(folder / "checkpoints" / f"{n}.ckpt", weights_only=True) for n in ("last", "best"))
    assert (last["epoch"] + 1, best["epoch"] + 1) == (4, 2)


def test_an_epoch_without_validation_has_no_validation_figures(tmp_path):
    overrides = ["trainer.max_epochs=3", "trainer.check_val_every_n_epoch=2"]
    record, folder = short(tmp_path, "+experiment=digits", *SHORT, *overrides)
    rows = read_metrics(folder)
    assert ["val/acc" in rows[e] for e in (1, 2, 3)] == [False, True, False]
    assert ["gates/mean" in rows[e] for e in (1, 2, 3)] == [False, True, False]
    assert all("train/acc" in row and "gates/relaxed_mean" in row for row in rows.values())
    assert record["accuracy"]["last_epoch"] == 2


def test_a_damaged_checkpoint_ends_with_one_line_and_is_left_as_it_is(tmp_path, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(LitCosineGate, "test_step", lambda self, *batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            short(tmp_path, "+experiment=digits", *SHORT)
    (folder,) = (tmp_path / "digits").iterdir()
    last = folder / "checkpoints" / "last.ckpt"
    whole = last.read_bytes()
    last.write_bytes(whole[:1000])
    with pytest.raises(UserError, match=r"last\.ckpt is not a checkpoint"):
        short(tmp_path, "+experiment=digits", *SHORT)
    assert last.read_bytes() == whole[:1000]
    last.write_bytes(whole)  # stopped after the last epoch and before the test: only the test is left to do
    record, _ = short(tmp_path, "+experiment=digits", *SHORT)
    assert (record["status"], record["epochs"]["done"]) == ("finished", 2)


def test_a_failed_checkpoint_write_keeps_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    AtomicCheckpoints().save_checkpoint({"epoch": 1}, path)
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        AtomicCheckpoints().save_checkpoint({"epoch": 2}, path)
    assert torch.load(path, weights_only=True) == {"epoch": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_the_debug_trainer_and_a_disabled_wandb_run(tmp_path):
    record, folder = short(
        tmp_path, "+experiment=digits", "trainer=debug", "logger=wandb", "logger.wandb.mode=disabled"
    )
    assert record["status"] == "finished"
    assert not (folder / "wandb").exists()


def test_a_callback_can_be_left_out_and_another_added(tmp_path):
    extra = ["callbacks.curves=null", "+callbacks.timer._target_=lightning.pytorch.callbacks.Timer"]
    _, folder = short(tmp_path, "+experiment=digits", *SHORT, *extra)
    assert not (folder / "figures").exists()
    stored = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert "Timer" in stored["callbacks"]


def test_gates_without_weight_decay_keep_their_own_group():
    for decay_gates, decays in ((True, [5e-4, 5e-4]), (False, [5e-4, 0.0])):
        module = build_module(
            config("+experiment=digits", f"optimizer.decay_gates={decay_gates}", "optimizer.gate_lr=3")
        )
        module.trainer = L.Trainer(max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False)
        optimizer = module.configure_optimizers()["optimizer"]
        assert [group["weight_decay"] for group in optimizer.param_groups] == decays
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.3])
        assert sum(p.numel() for group in optimizer.param_groups for p in group["params"]) == 19_147


def test_a_multirun_trains_every_job_in_a_wandb_run_of_its_own(tmp_path):
    jobs = ["+experiment=digits", "seed=0,1", "logger=[wandb,tensorboard]", f"runs_dir={tmp_path}", *SHORT]
    done = process("src/train.py", "-m", *jobs)
    assert done.returncode == 0, done.stderr
    seeds = [json.loads(path.read_text())["seed"] for path in tmp_path.glob("digits/*/record.json")]
    assert sorted(seeds) == [0, 1]
    for folder in (tmp_path / "digits").iterdir():  # offline, as there is no account
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
