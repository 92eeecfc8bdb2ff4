import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, assert_one_line, process

from cosinegate.report.dashboard import build_workspace
from cosinegate.runs.record import read_record


def read_back(folder: Path) -> list[dict]:
    """What an offline run holds, as W&B's own tool reads it."""
    (run,) = folder.glob("wandb/offline-run-*")
    return inspected(run)


def inspected(run: Path) -> list[dict]:
    wandb = Path(sys.executable).with_name("wandb")
    done = subprocess.run([wandb, "leet", "inspect", "--json", run], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def histories(entries: list[dict]) -> list[dict]:
    return [entry["history"]["item"] for entry in entries if entry["type"] == "history"]


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> tuple[Path, list[dict]]:
    root = tmp_path_factory.mktemp("wandb")
    words = ["trainer.max_epochs=2", "threads=1", "logger=wandb", "sweep=mine"]
    done = process("src/train.py", "+experiment=digits", *words, f"runs_dir={root}")
    assert done.returncode == 0, done.stderr
    (folder,) = (root / "digits").glob("*-s*")
    return folder, read_back(folder)


CURVES = {"train/acc", "val/acc", "train/loss", "train/loss_ce", "train/loss_cons", "train/loss_flops"}
CURVES |= {"train/weighted_cons", "train/weighted_flops", "gates/mean", "gates/target", "gates/skip_percent"}
CURVES |= {"gates/relaxed_mean", "schedule/prog", "schedule/temperature", "schedule/lr", "flops/counted"}
CURVES |= {"flops/executed", *(f"gates/block_{b:02d}" for b in range(3)), *(f"cir/block_{b:02d}" for b in range(3))}


def test_a_run_has_every_curve_and_picture(logged):
    folder, entries = logged
    items = histories(entries)
    names = {name for item in items for name in item}
    assert names >= CURVES
    for name in CURVES:
        assert sum(name in item for item in items) == 2, name  # one value an epoch
    (media,) = [item for item in items if "media/block_x_epoch._type" in item]
    assert media["media/class_x_block._type"] == "image-file"
    assert {media[f"media/cir_block_{b:02d}._type"] for b in range(3)} == {"histogram"}
    assert media["routes/examples._type"] == "table-file"
    for name in ("media/block_x_epoch", "media/class_x_block", "routes/examples"):
        (path,) = folder.glob(f"wandb/offline-run-*/files/{media[f'{name}.path']}")
        assert path.stat().st_size > 100
    table = json.loads(path.read_text())
    assert table["columns"] == ["image", "class", "predicted", "blocks", "route"]
    assert len(table["data"]) == 32
    (artifact,) = [entry["artifact"] for entry in entries if entry["type"] == "artifact"]
    images = [file for file in artifact["manifest"]["contents"] if "media/images" in file["path"]]
    assert len(images) > 20
    assert all(Path(file["local_path"]).is_relative_to(folder) for file in images)  # one folder to sync


def test_gate_curves_have_the_epoch_axis_and_the_summary_holds_the_best(logged):
    _, entries = logged
    metrics = [entry["metric"] for entry in entries if entry["type"] == "metric"]
    axis = {metric.get("glob_name") or metric["name"]: metric.get("step_metric") for metric in metrics}
    assert {axis[name] for name in ("gates/*", "cir/*", "flops/*", "train/*", "val/acc")} == {"epoch"}
    (best,) = [metric for metric in metrics if metric.get("name") == "val/acc"]
    assert best["summary"] == {"max": True}
    items = histories(entries)
    lr = {item["epoch"]: item["schedule/lr"] for item in items if "schedule/lr" in item}
    assert lr == pytest.approx({0: 0.1, 1: 0.05})


def test_group_and_tags_are_the_sweeps_and_the_experiments(logged):
    _, entries = logged
    (run,) = [entry["run"] for entry in entries if entry["type"] == "run"]
    assert run["run_group"] == "mine"
    assert run["tags"] == ["digits", "mine"]


def test_the_workspace_has_its_sections_and_only_metrics_that_are_logged():
    workspace = build_workspace("someone", "cosinegate")
    assert [section.name for section in workspace.sections] == ["Accuracy", "Gates", "Geometry", "Compute", "Sweep"]
    named = {getattr(y, "name", y) for section in workspace.sections for panel in section.panels for y in _ys(panel)}
    assert (
        named - {"val/acc.max", "val/loss", "gates/dynamic_blocks", "gates/paths", "speed/images_per_second"} <= CURVES
    )
    kinds = [type(panel).__name__ for panel in workspace.sections[-1].panels]
    assert kinds == ["ScatterPlot", "ScatterPlot", "ParallelCoordinatesPlot"]


def _ys(panel) -> list:
    y = getattr(panel, "y", None)
    return y if isinstance(y, list) else [] if y is None else [y]


def test_a_dashboard_without_an_account_says_what_it_needs():
    assert_one_line(process("src/dashboard.py"), "wandb login")


TINY = ["+experiment=digits", "trainer.limit_train_batches=2", "trainer.limit_val_batches=1", "threads=1"]
TINY += ["data.batch_size=8", "data.eval_batch_size=64", "trainer.limit_test_batches=1", "callbacks.curves=null"]
TINY += ["logger=wandb", "+callbacks.fault._target_=faults.Befalls"]
IN_TESTS = {"PYTHONPATH": str(ROOT / "tests")}


def test_a_resumed_run_goes_on_under_its_id(tmp_path):
    command = ["src/train.py", *TINY, "trainer.max_epochs=2", f"runs_dir={tmp_path}"]
    stopped = process(*command, **IN_TESTS, FAULT="SIGTERM")
    assert stopped.returncode == 143, stopped.stderr
    (folder,) = (tmp_path / "digits").glob("*-s*")
    done = process(*command, **IN_TESTS)
    assert done.returncode == 0, done.stderr
    parts = [inspected(path) for path in sorted(folder.glob("wandb/offline-run-*"))]
    ids = [entry["run"]["run_id"] for part in parts for entry in part if entry["type"] == "run"]
    assert ids == [f"digits-{folder.name}"] * 2
    assert [[item["epoch"] for item in histories(part) if "train/loss" in item] for part in parts] == [[0], [1]]


def test_a_server_that_does_not_answer_leaves_the_run_offline(tmp_path):
    nobody = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
    done = process("src/train.py", *TINY, "trainer.max_epochs=1", f"runs_dir={tmp_path}", **IN_TESTS, **nobody)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("W&B")]
    asking, offline = said
    assert asking == "W&B: asking http://127.0.0.1:9"
    assert offline.startswith("W&B cannot be reached (")
    assert offline.endswith("Connection refused): the run is kept offline")
    (folder,) = (tmp_path / "digits").glob("*-s*")
    assert read_record(folder).status == "finished"
    assert [item["epoch"] for item in histories(read_back(folder)) if "train/loss" in item] == [0]
