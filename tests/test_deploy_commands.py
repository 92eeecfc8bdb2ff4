"""Export, calibrate and benchmark through their real command lines."""

import hashlib
import json
import shutil
import statistics
from pathlib import Path

import pytest
import torch
from conftest import config, process
from cosinegate.deploy.frontier import forced, frontier
from cosinegate.deploy.skipping import SkippingNetwork
from cosinegate.deploy.trained import is_the_records, load_trained
from cosinegate.deploy.weights import read_exported
from deployed import assert_same
from same_routes import near_threshold

from cosinegate.build import build_network
from cosinegate.deploy.benchmark import benchmark
from cosinegate.deploy.export import export, show
from cosinegate.errors import UserError
from cosinegate.networks.flops import dense_flops, forward_flops
from cosinegate.record import read_record, write_record
from cosinegate.train import train


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    chosen = config("+experiment=digits_predictive", "threads=1", f"runs_dir={tmp_path_factory.mktemp('runs')}")
    train(chosen)
    return Path(chosen.run_dir)


def test_the_trained_run_routes_by_input_and_executes_less(run):
    record = read_record(run)
    assert record.dynamic_blocks == 3
    assert record.paths > 2
    assert record.mean_gate == pytest.approx(0.75, abs=0.05)
    assert record.flops.executed < 0.8
    skipped = [1 - share for share in record.blocks_open if 0.05 <= share <= 0.95]
    assert record.routed_percent == pytest.approx(100 * sum(skipped) / len(record.blocks_open))
    assert record.accuracy.test > 0.9


@pytest.fixture(scope="module")
def exported(run):
    done = process("src/export.py", f"run={run}", "threads=1", afresh=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, run / "export"


def assert_the_same_but_for_rounding(form: dict, trained, number: int = 359) -> None:
    """Only images with a logit on its threshold may take another route, or have another class."""
    images, _ = trained.data.whole_images("test", number)
    with torch.no_grad():
        near = near_threshold(trained.eager, trained.eager(images).routing).any(1).sum().item()
    assert near <= 0.01 * number
    assert form["same_route"] >= 1 - (near + 0.01) / number
    assert form["same_class"] >= 1 - (near + 1.01) / number  # and one whose two best classes score alike


def test_export_writes_every_form_and_compares_it_on_the_whole_test_set(run, exported):
    words, folder = exported
    card = json.loads((folder / "card.json").read_text())
    assert sorted(path.name for path in folder.iterdir()) == [
        "batch.onnx",
        "branch.onnx",
        "card.json",
        "int8.onnx",
        "weights.safetensors",
    ]
    for name, digest in card["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    accuracy = read_record(run).accuracy.test
    assert card["test_images"] == 359
    assert card["forms"]["trained"]["accuracy"] == pytest.approx(accuracy, abs=1e-6)
    for name in ("runtime", "branch.onnx", "batch.onnx"):
        form = card["forms"][name]
        assert_the_same_but_for_rounding(form, load_trained(str(run)))
        assert form["largest_difference"] < 1e-4
        assert form["accuracy"] == pytest.approx(accuracy, abs=1.01 / 359)
    assert card["forms"]["int8.onnx"]["accuracy"] == pytest.approx(accuracy, abs=0.05)
    assert card["executed"] == pytest.approx(read_record(run).flops.executed, abs=1e-4)
    int8 = card["forms"]["int8.onnx"]
    assert (int8["executed"] - card["executed"]) * (int8["mean_gate"] - card["mean_gate"]) >= 0
    for fragment in ("branch.onnx", "int8.onnx", "other route", str(folder)):
        assert fragment in words


def test_a_form_that_is_not_the_compiled_network_is_told(exported, capsys):
    card = json.loads((exported[1] / "card.json").read_text()) | {"folder": "there"}
    show(card)
    assert "is not the compiled network" not in capsys.readouterr().out
    card["forms"]["batch.onnx"]["equal"] = False
    show(card)
    assert "batch.onnx is not the compiled network" in capsys.readouterr().out


def test_the_exported_weights_are_the_network(run, exported):
    trained = load_trained(str(run))
    images, _ = trained.data.whole_images("test", 50)
    runtime = SkippingNetwork(read_exported(exported[1]))
    with torch.no_grad():
        output = trained.eager(images)
    assert_same(runtime(images), runtime.gates, trained.eager, output)


def test_one_checkpoint_gives_a_frontier(run):
    done = process("src/calibrate.py", f"run={run}", "budgets=[0.6,0.8,1.0]", "threads=1")
    assert done.returncode == 0, done.stderr
    points = json.loads((run / "frontier.json").read_text())["points"]
    assert [point["budget"] for point in points] == [0.6, 0.8, 1.0]
    for point in points:
        assert point["counted"] == pytest.approx(point["budget"], abs=0.06)  # other images than it was calibrated on
    executed = [point["executed"] for point in points]
    assert executed[0] < executed[1] < executed[2] == pytest.approx(1.0, abs=0.02)
    assert points[1]["dynamic_blocks"] == 3
    assert points[2]["shuffled"] == points[2]["rounded"] == points[2]["accuracy"]  # all open, whatever the image
    trained = load_trained(str(run))
    trained.calibrate(0.6, trained.held_out())
    images, labels = trained.data.whole_images("test")
    runtime = SkippingNetwork(trained.folded)
    assert points[0]["accuracy"] == (runtime(images).argmax(1) == labels).float().mean().item()
    another = runtime.gates[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    scores = forced(trained.folded, images, another)
    assert points[0]["shuffled"] == (scores.argmax(1) == labels).float().mean().item() != points[0]["accuracy"]
    assert points[0]["counted_rounded"] * 6 == pytest.approx(round(points[0]["counted_rounded"] * 6), abs=1e-6)
    assert (run / "figures" / "frontier.png").read_bytes()[:4] == b"\x89PNG"
    assert "training images, for the run kept none aside" in done.stdout


def test_forced_gates_are_the_route(run):
    trained = load_trained(str(run))
    trained.calibrate(0.7, trained.held_out())
    images, _ = trained.data.whole_images("test", 60)
    runtime = SkippingNetwork(trained.folded)
    scores = runtime(images)
    torch.testing.assert_close(forced(trained.folded, images, runtime.gates), scores, rtol=1e-4, atol=1e-4)
    another = runtime.gates[torch.arange(59, -1, -1)]
    changed = (another != runtime.gates).any(1)
    different = (forced(trained.folded, images, another) - scores).abs().amax(1) > 1e-3
    assert changed.any()
    assert torch.equal(changed, different)


def test_benchmark_times_every_form_and_the_record_has_the_latency(run):
    few = ("batches=[1,64]", "rounds=2", "threads=1", "compile=false", "images=64")
    done = process("src/benchmark.py", f"run={run}", *few)
    assert done.returncode == 0, done.stderr
    assert "profiler_start" not in done.stdout + done.stderr
    found = json.loads((run / "benchmark" / "benchmark.json").read_text())
    assert found["dense"] == "resnet14-w8"
    models = {(row["batch"], row["engine"], row["model"]) for row in found["rows"]}
    for batch in (1, 64):
        for engine in ("torch", "onnxruntime"):
            assert {(batch, engine, "dense"), (batch, engine, "skipping")} <= models
    for row in found["rows"]:
        assert row["ms_per_image"] > 0
        dense = next(
            one
            for one in found["rows"]
            if (one["batch"], one["engine"], one["model"]) == (row["batch"], row["engine"], "dense")
        )
        ratios = [own / other for own, other in zip(row["rounds"], dense["rounds"], strict=True)]
        assert row["time_ratio"] == pytest.approx(statistics.median(ratios))
        assert row["ms_per_image"] == pytest.approx(statistics.median(row["rounds"]))
        if row["bar"] is not None:
            assert row["met"] == (row["time_ratio"] <= row["bar"])
    trained = load_trained(str(run))
    some, of_dense = trained.data.whole_images("test", 64)[0], dense_flops(trained.eager, trained.data.image_set.shape)
    assert found["executed"] == pytest.approx(forward_flops(trained.eager, some) / (64 * of_dense))
    at_one = [
        row["ms_per_image"]
        for row in found["rows"]
        if row["batch"] == 1 and row["model"] == "skipping" and "int8" not in row["engine"]
    ]
    assert read_record(run).latency_ms == min(at_one)
    assert read_record(run).latency.threads == 1
    in_int8 = {
        (row["counted"], row["executed"])
        for row in found["rows"]
        if row["model"] == "skipping" and "int8" in row["engine"]
    }
    assert in_int8 == {(found["int8"]["counted"], found["int8"]["executed"])}
    assert (run / "benchmark" / "benchmark.png").read_bytes()[:4] == b"\x89PNG"
    table = (run / "benchmark" / "benchmark.md").read_text()
    for words in ("FLOPs counted", "FLOPs executed", "time ratio", "onnxruntime int8", "one image", "convolutions"):
        assert words in table
    for row in found["rows"]:
        assert row["ms_per_image"] == min(row["ways"].values()) == row["ways"][row["way"]]
    for batch in ("1", "64"):  # what skipping pays for
        dense, skipping = (found["kernels"][batch]["onnxruntime"][name] for name in ("dense", "skipping"))
        assert dense["branches"] == dense["selecting"] == 0 < dense["convolutions"]
        assert skipping["branches" if batch == "1" else "selecting"] > 0
        assert all(value >= 0 for value in (*dense.values(), *skipping.values()))
        dense, skipping = (found["kernels"][batch]["torch"][name] for name in ("dense", "skipping"))
        assert dense["convolutions"] > 0  # which take the longer is noise on a busy machine
        assert skipping["convolutions"] > 0
        assert skipping["statistics"] > dense["statistics"]
        assert all(value >= 0 for value in (*dense.values(), *skipping.values()))
    missed = {str(row["batch"]) for row in found["rows"] if row["met"] is False}
    assert missed <= set(found["kernels"])
    drawn = process("src/pareto.py", f"runs={run.parent}", "x=latency", f"folder={run.parent / 'pareto'}")
    assert drawn.returncode == 0, drawn.stderr
    assert "latency" in drawn.stdout


def test_only_the_checkpoint_that_was_tested_is_the_records(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    last, best = (copy / "checkpoints" / f"{name}.ckpt" for name in ("last", "best"))
    assert (is_the_records(last), is_the_records(best)) == (True, False)
    record = read_record(copy)
    write_record(copy, record.replace(accuracy=record.accuracy.replace(test_of="best")))
    assert (is_the_records(last), is_the_records(best)) == (False, True)
    (copy / "record.json").unlink()
    assert not is_the_records(last)


def ask(command: str, *overrides: str):
    """What the command would do, in this process: a process of its own takes seconds to start."""
    functions = {"export": export, "calibrate": frontier, "benchmark": benchmark}
    return functions[command](config(*overrides, config_name=command))


def test_exporting_again_replaces_the_export_and_nothing_else(exits, exported, tmp_path):
    """With a run of exits, which have classifiers of their own: the same class and route in every form."""
    folder = tmp_path / "again"
    shutil.copytree(exported[1], folder)
    (folder / "labels.txt").write_text("keep me")
    card = ask("export", f"run={exits}", f"folder={folder}", "budget=0.75", "images=100", "threads=1")
    assert (folder / "labels.txt").read_text() == "keep me"
    assert json.loads((folder / "card.json").read_text())["budget"] == 0.75
    assert card["mean_gate"] == pytest.approx(0.75, abs=0.08)
    assert not list(tmp_path.glob(".again*"))
    trained = load_trained(exits)
    trained.calibrate(0.75, trained.held_out())
    for name in ("runtime", "branch.onnx", "batch.onnx"):
        assert_the_same_but_for_rounding(card["forms"][name], trained, 100)
    images, _ = trained.data.whole_images("test", 20)
    with torch.no_grad():
        runtime = SkippingNetwork(read_exported(folder))
        assert_same(runtime(images), runtime.gates, trained.eager, trained.eager(images))


def other(folder: Path, gate: str, objective: str) -> Path:
    """A short run of another paper's gate."""
    short = ["threads=1", "trainer.max_epochs=1", "trainer.limit_train_batches=4", "callbacks.curves=null"]
    train(config("+experiment=digits", f"gate={gate}", f"objective={objective}", *short, f"run_dir={folder}"))
    return folder


@pytest.mark.slow
def test_another_papers_gate_is_exported_and_calibrated_by_the_same_commands(tmp_path):
    run = other(tmp_path, "aig", "per_block")
    card = ask("export", f"run={run}", "budget=0.7", "images=64", "threads=1")
    assert set(card["forms"]) == {"trained", "runtime", "branch.onnx", "batch.onnx", "int8.onnx"}
    for name in ("runtime", "branch.onnx", "batch.onnx"):
        form = card["forms"][name]
        assert form["same_class"] >= form["same_route"] >= 62 / 64  # a logit may lie on its threshold
        assert form["largest_difference"] < 1e-4
    assert 0 < card["mean_gate"] < 1
    ask("calibrate", f"run={run}", "budgets=[0.7,1.0]", "threads=1")
    cheaper, whole = json.loads((run / "frontier.json").read_text())["points"]
    assert cheaper["counted"] == pytest.approx(0.7, abs=0.08)
    assert cheaper["executed"] < whole["executed"] == pytest.approx(1.0, abs=0.03)


@pytest.mark.slow
def test_a_gate_with_memory_is_timed_by_the_same_command(tmp_path):
    run = other(tmp_path, "skipnet_recurrent", "two_sided")
    few = ("batches=[1]", "images=4", "rounds=1", "threads=1", "compile=false")
    ask("benchmark", f"run={run}", "budget=0.7", f"folder={run}/time", *few)
    rows = json.loads((run / "time" / "benchmark.json").read_text())["rows"]
    assert {row["model"] for row in rows} == {"dense", "skipping"}
    assert all(row["ms_per_image"] > 0 for row in rows)


def trained_exits(folder: Path) -> str:
    short = ["threads=1", "trainer.max_epochs=2", "trainer.limit_train_batches=6", "callbacks.curves=null"]
    short += [
        "network.width=4",
        "network.blocks=[1,1,3]",
        "objective.start_epoch=1",
        "data.validation=holdout",
        "data.holdout=200",
    ]
    chosen = config("+experiment=predictive_balanced", "data=digits", *short, f"run_dir={folder}")
    train(chosen)
    return chosen.run_dir


@pytest.fixture(scope="module")
def exits(tmp_path_factory) -> str:
    return trained_exits(tmp_path_factory.mktemp("exits") / "run")


def test_a_run_with_exits_is_searched_on_held_out_images(exits, tmp_path):
    run, untouched = exits, "measured_on=held_out"
    ask("calibrate", f"run={run}", "budgets=[0.7,0.8]", untouched, "threads=1")
    assert not (Path(run) / "frontier.json").exists()  # which is of the test set
    found = json.loads((Path(run) / "frontier_held_out.json").read_text())
    assert (found["measured_on"], found["images"]) == ("held_out", 200)
    for point in found["points"]:
        assert point["counted"] == pytest.approx(point["budget"], abs=0.01)  # the images that it was calibrated on
        assert point["paths"] <= 3  # from block to block images leave, and none comes back
        assert point["open"] == sorted(point["open"], reverse=True)
    early = load_trained(run)
    early.eager.blocks[-1].gate.opening.budget.seen.zero_()
    with pytest.raises(UserError, match=r"budget = 0\.7: its exits were not fitted yet.*start_epoch = 1"):
        early.check_budget(0.7)
    aig = other(tmp_path / "aig", "aig", "per_block")
    with pytest.raises(UserError, match="kept no images aside"):
        ask("calibrate", f"run={aig}", "budgets=[0.7]", untouched)


@pytest.mark.slow
def test_a_run_is_timed_and_counted_against_the_network_of_its_depth_however_its_blocks_are_shared_out(tmp_path):
    run, beside = trained_exits(tmp_path / "run"), other(tmp_path / "dense", "none", "plain")
    few = ("batches=[1]", "images=16", "rounds=1", "threads=1", "compile=false")
    timed = ask("benchmark", f"run={run}", f"against=[{beside}]", *few)
    assert read_record(beside).latency_ms > 0
    assert read_record(beside).latency.time_ratio > 0
    trained = load_trained(run)
    assert [block.conv1.out_channels for block in trained.dense().blocks] == [4] * 3 + [8] * 3 + [16] * 3
    images, dense = trained.data.whole_images("test", 16)[0], build_network(config("data=digits", "network.width=4"))
    of_dense = dense_flops(dense, trained.data.image_set.shape)
    assert timed["executed"] == pytest.approx(forward_flops(trained.eager, images) / (16 * of_dense))
