"""Quickstart, export, benchmark and evaluate through their real command lines."""

import copy
import hashlib
import json
import shutil
import statistics
from pathlib import Path

import pytest
import torch
from conftest import assert_one_line, config, process

from cosinegate.deploy.benchmark import benchmark
from cosinegate.deploy.card import read_network
from cosinegate.deploy.export import export, show
from cosinegate.deploy.source import is_the_records, load_source
from cosinegate.evaluate import evaluate
from cosinegate.networks.flops import dense_flops, forward_flops
from cosinegate.runs.record import read_record, write_record
from cosinegate.terminal.errors import UserError
from cosinegate.train import train
from cosinegate.training.load import load_checkpoint

FORMS = ["trained", "deployed", "torch", "network.onnx", "int8.onnx"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of the paper's gate, through quickstart's own command."""
    folder = tmp_path_factory.mktemp("runs")
    short = ["threads=1", "callbacks.curves=null", "trainer.max_epochs=3", f"runs_dir={folder}"]
    done = process("src/quickstart.py", "+experiment=digits", *short)
    assert done.returncode == 0, done.stderr
    assert "profiler_start" not in done.stdout + done.stderr
    (made,) = (folder / "digits").glob("*-s*")
    (made / "words").write_text(done.stdout)
    return made


@pytest.fixture(scope="module")
def routing(run, tmp_path_factory) -> Path:
    """The run's last checkpoint with another threshold, so that the last block is open for half of the images."""
    path = run / "checkpoints" / "last.ckpt"
    network, source = load_checkpoint(path)[0].network.eval(), load_source(str(run))
    with torch.no_grad():
        logits = network(source.held_out()).routing.logits[:, 2].sort().values
    apart = (logits[1:] - logits[:-1])[100:200].argmax() + 100
    stored = torch.load(path, weights_only=True)
    between = (logits[apart] + logits[apart + 1]) / 2
    stored["hyper_parameters"]["gate"]["threshold"] = between.double().sigmoid().item()
    torch.save(stored, made := tmp_path_factory.mktemp("routing") / "routing.ckpt")
    return made


def ask(command: str, *overrides: str) -> dict:
    """What the command would do, in this process: a process of its own takes seconds to start."""
    options = config("threads=1", *overrides, config_name=command)
    commands = {"export": export, "benchmark": benchmark, "evaluate": lambda options: evaluate(options)[0]}
    return commands[command](options)


def test_quickstart_trains_compiles_exports_and_times(run):
    words, record = (run / "words").read_text(), read_record(run).as_dict()
    compiled = record["compiled"]
    assert record["flops"]["compiled"] == compiled["executed"]
    assert compiled["images"] == 359
    assert f"blocks {compiled['blocks']} of 3, same answers on {compiled['same_class']} of 359" in words
    timed = json.loads((run / "benchmark" / "benchmark.json").read_text())
    routes = compiled["dynamic_blocks"] > 0
    assert timed["model"] == ("routed" if routes else "compiled")
    allowed = {(64, "torch"): 0.1, (64, "onnxruntime"): 0.1, (1, "onnxruntime"): 0.15}  # for what routing takes
    if not routes:
        allowed = dict.fromkeys([*allowed, (1, "torch")], 0.05)
    bars = {(row["batch"], row["engine"]): row["bar"] for row in timed["rows"] if row["bar"] is not None}
    assert bars == pytest.approx({key: timed["executed"] + more for key, more in allowed.items()})
    at_one = [row for row in timed["rows"] if (row["model"], row["batch"]) == (timed["model"], 1)]
    assert record["latency_ms"] == min(row["ms_per_image"] for row in at_one if "int8" not in row["engine"])
    assert record["latency"]["threads"] == 1
    last = words.strip().splitlines()[-1]
    assert last.startswith("compiled: ")
    assert f"the same class on {compiled['same_class']} of 359 images" in last
    assert last.endswith(f"{run}/export/network.onnx")


def test_export_writes_every_form_and_compares_it_on_the_whole_test_set(run):
    folder, record, words = run / "export", read_record(run).as_dict(), (run / "words").read_text()
    card = json.loads((folder / "card.json").read_text())
    assert sorted(path.name for path in folder.iterdir()) == ["card.json", *sorted(card["files"])]
    assert sorted(card["files"]) == ["int8.onnx", "network.onnx", "weights.safetensors"]
    for name, digest in card["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    forms = card["forms"]
    assert list(forms) == FORMS
    assert card["test_images"] == 359
    assert forms["trained"]["accuracy"] == pytest.approx(record["accuracy"]["test"])
    assert (forms["trained"]["blocks"], forms["trained"]["parameters"]) == (3, record["parameters"])
    assert forms["trained"]["executed"] == pytest.approx(record["flops"]["executed"])
    assert forms["deployed"]["largest_difference"] == 0  # nothing is folded yet
    assert card["executed"] == pytest.approx(record["compiled"]["executed"], rel=1e-6)
    assert card["compiled"]["computed"] == record["compiled"]["blocks"] == forms["deployed"]["blocks"]
    for name in ("torch", "network.onnx"):
        assert forms[name]["equal"]
        assert forms[name]["rerouted"] <= 2
        assert forms[name]["accuracy"] == pytest.approx(forms["deployed"]["accuracy"], abs=1.01 / 359)
    assert forms["int8.onnx"]["accuracy"] == pytest.approx(record["accuracy"]["test"], abs=0.05)
    for fragment in ("network.onnx", "other class", "other route", "mean gate", "FLOPs", "parameters", str(folder)):
        assert fragment in words
    assert "300 training images, for the run kept none aside" in words
    trained = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    for name, tensor in read_network(folder)[1].state_dict().items():
        assert torch.equal(tensor, trained[f"network.{name}"])


def test_the_benchmark_says_what_it_measured(run):
    found = json.loads((run / "benchmark" / "benchmark.json").read_text())
    assert found["dense"] == "resnet8-w8"
    for row in found["rows"]:
        key = row["batch"], row["engine"], "dense"
        dense = next(other for other in found["rows"] if (other["batch"], other["engine"], other["model"]) == key)
        ratios = [own / other for own, other in zip(row["rounds"], dense["rounds"], strict=True)]
        assert row["time_ratio"] == pytest.approx(statistics.median(ratios))
        assert row["ms_per_image"] == pytest.approx(statistics.median(row["rounds"]))
        assert row["ms_per_image"] == min(row["ways"].values()) == row["ways"][row["way"]]
        if row["bar"] is not None:
            assert row["met"] == (row["time_ratio"] <= row["bar"])
    source = load_source(str(run / "export"))
    images, _ = source.data.whole_images("test")
    flops = forward_flops(source.network, images) / len(images)
    assert found["executed"] == pytest.approx(flops / source.reference_flops)
    table = (run / "benchmark" / "benchmark.md").read_text()
    for words in ("FLOPs counted", "FLOPs executed", "time ratio", "onnxruntime int8", "convolutions"):
        assert words in table
    assert ("take another route" in table) == (found["model"] == "routed")
    assert (run / "benchmark" / "benchmark.png").read_bytes()[:4] == b"\x89PNG"
    for engine in ("onnxruntime", "torch"):
        for batch in ("1", "64"):
            dense, own = (found["kernels"][batch][engine][name] for name in ("dense", found["model"]))
            assert dense["convolutions"] > 0
            assert all(value >= 0 for value in (*dense.values(), *own.values()))
    missed = {str(row["batch"]) for row in found["rows"] if row["met"] is False}
    assert missed <= set(found["kernels"])


def test_an_export_is_evaluated_as_its_run_is(run):
    own, theirs = (ask("evaluate", f"run={folder}") for folder in (run, run / "export"))
    assert theirs["accuracy"] == pytest.approx(own["accuracy"])
    assert theirs["loss"] == pytest.approx(own["loss"], abs=1e-4)
    assert theirs["mean_gate"] == own["mean_gate"]
    assert theirs["flops"]["executed"] == pytest.approx(read_record(run).flops.compiled, rel=1e-6)
    assert own["flops"]["executed"] > 1
    assert (theirs["flops"]["executed"] < 1) == (read_record(run).compiled.blocks < 3)  # which ones close may differ


def test_blocks_that_route_are_kept_and_save_nothing(routing, tmp_path, capsys):
    card = ask("export", f"run={routing}", f"output={tmp_path / 'export'}")
    show(card)
    words = capsys.readouterr().out
    assert card["compiled"]["blocks"][2]["action"] == "kept"
    assert "so nothing is saved there" in words
    trained, deployed = card["forms"]["trained"], card["forms"]["deployed"]
    assert deployed["same_class"] == deployed["same_route"] == 1
    for name in ("torch", "network.onnx"):
        assert card["forms"][name]["equal"]
        assert card["forms"][name]["rerouted"] <= 2
    has_settled = any(block["action"] != "kept" for block in card["compiled"]["blocks"])
    assert (deployed["executed"] < trained["executed"]) == has_settled
    assert not (routing.parent / "record.json").exists()
    evaluated = ask("evaluate", f"run={tmp_path / 'export'}")
    assert evaluated["accuracy"] == pytest.approx(deployed["accuracy"])
    assert evaluated["flops"]["executed"] == pytest.approx(deployed["executed"])


def test_predicted_gates_are_printed_with_their_agreement(routing, tmp_path):
    done = process("src/export.py", f"run={routing}", "dynamic=predict", f"output={tmp_path / 'export'}", "threads=1")
    assert done.returncode == 0, done.stderr
    assert "a random gate as often open" in done.stdout
    card = json.loads((tmp_path / "export" / "card.json").read_text())
    block, deployed = card["compiled"]["blocks"][2], card["forms"]["deployed"]
    assert block["action"] == "predicted"
    assert block["random_agreement"] < block["agreement"] <= 1
    assert deployed["executed"] < 1 < card["forms"]["trained"]["executed"]
    assert f"{round((1 - deployed['same_class']) * 359)}" in done.stdout
    evaluated = ask("evaluate", f"run={tmp_path / 'export'}")
    assert evaluated["accuracy"] == pytest.approx(card["forms"]["deployed"]["accuracy"])
    assert evaluated["dynamic_blocks"] == 1


def test_a_form_that_is_not_the_deployed_network_is_told(run, capsys):
    card = json.loads((run / "export" / "card.json").read_text()) | {"folder": "there"}
    show(card)
    assert "is not the deployed network" not in capsys.readouterr().out
    wrong = copy.deepcopy(card)
    wrong["forms"]["network.onnx"] |= {"equal": False, "rerouted": 3}
    show(wrong)
    words = capsys.readouterr().out
    assert "network.onnx is not the deployed network" in words
    assert "network.onnx: 3 images lie within rounding of a threshold" in words


def test_a_run_without_the_figure_gets_it_from_its_export_and_the_frontier_shows_it(run, tmp_path):
    older = shutil.copytree(run, tmp_path / "runs" / "older")
    record = json.loads((older / "record.json").read_text())
    del record["compiled"], record["flops"]["compiled"]
    (older / "record.json").write_text(json.dumps(record))
    (older / "export" / "labels.txt").write_text("keep me")
    (older / "export" / "network.onnx").write_bytes(b"an older one")
    ask("export", f"run={older}")
    assert read_record(older).compiled == read_record(run).compiled
    assert (older / "export" / "labels.txt").read_text() == "keep me"  # and nothing but the export is replaced
    assert (older / "export" / "network.onnx").stat().st_size > 1000
    assert not list(older.glob(".export*"))
    drawn = process("src/pareto.py", f"runs={older.parent}", "x=executed", f"output={tmp_path / 'pareto'}")
    assert drawn.returncode == 0, drawn.stderr
    (table,) = (tmp_path / "pareto").glob("*.csv")
    header, row = (line.split(",") for line in table.read_text().splitlines())
    figures = dict(zip(header, row, strict=True))
    assert float(figures["executed"]) > 1
    assert float(figures["compiled"]) == pytest.approx(read_record(run).compiled.executed, abs=1e-6)


def test_an_export_replaces_nothing_but_an_export(run, tmp_path):
    def refused(folder: Path, words: str) -> None:
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} if folder.is_dir() else {}
        with pytest.raises(UserError, match=words):
            ask("export", f"run={run}", f"output={folder}")
        assert all(path.read_bytes() == content for path, content in before.items())

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "card.json").write_text('{"title": "of another program"}')
    refused(foreign, "already exists and is not an export")
    (tmp_path / "file").write_text("mine")
    refused(tmp_path / "file", "already exists and is not an export")
    exits = shutil.copytree(run / "export", tmp_path / "exits")
    card = json.loads((exits / "card.json").read_text())
    (exits / "card.json").write_text(json.dumps({key: card[key] for key in ("name", "network", "files")}))
    refused(exits, "already exists and is not an export")  # a card of exits
    for name, make in {
        "one.onnx": lambda path: path.write_text("mine"),  # no file of this export
        "network.onnx": lambda path: (path.unlink(), path.symlink_to("/etc/hostname")),
        "int8.onnx": lambda path: (path.unlink(), path.mkdir()),
    }.items():
        copied = shutil.copytree(run / "export", tmp_path / name)
        make(copied / name)
        refused(copied, f"{name}: already exists and is not a file of an export")


def test_only_the_checkpoint_that_was_tested_is_the_records(run, tmp_path):
    copied = shutil.copytree(run, tmp_path / "run")
    last, best = (copied / "checkpoints" / f"{name}.ckpt" for name in ("last", "best"))
    assert (is_the_records(last), is_the_records(best)) == (True, False)
    record = read_record(copied)
    write_record(copied, record.replace(accuracy=record.accuracy.replace(test_of="best").as_dict()))
    assert (is_the_records(last), is_the_records(best)) == (False, True)
    (copied / "record.json").unlink()
    assert not is_the_records(last)


def test_a_dense_run_or_several_runs_are_one_line(tmp_path):
    short = ["threads=1", "callbacks.curves=null", "trainer.max_epochs=1", "trainer.limit_train_batches=1"]
    done = process("src/quickstart.py", "+experiment=digits", "gate=none", *short, f"run_dir={tmp_path}/run")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().endswith("a dense network has no gates, so there is nothing to compile")
    for command in ("export", "benchmark"):
        with pytest.raises(UserError, match="a dense network has no gates, so there is nothing to compile"):
            ask(command, f"run={tmp_path}/run")
        assert not (tmp_path / "run" / command).exists()
    assert_one_line(process("src/quickstart.py", "-m", "+experiment=digits", "seed=0,1"), "multirun", "src/train.py")
    assert_one_line(process("src/quickstart.py", "+experiment=digits", "objective.tau_target=2"), "tau_target")


def test_what_a_command_cannot_do_is_one_line(run, tmp_path):
    assert_one_line(process("src/export.py", f"run={run}", "budget=0.7"), "has no exits", "src/exits.py")
    with pytest.raises(UserError, match="has no exits"):
        ask("benchmark", f"run={run}", f"output={tmp_path / 'new'}", "budget=0.7")
    with pytest.raises(UserError, match="there are 359"):
        ask("benchmark", f"run={run}", f"output={tmp_path / 'new'}", "batches=[360]")
    assert not (tmp_path / "new").exists()


def test_a_hostile_or_foreign_folder_is_one_line(run, tmp_path):
    """What `read_network` refuses is tested beside it; here, that commands ask it."""
    good = run / "export"
    card = json.loads((good / "card.json").read_text())
    network = card["network"]
    std = network["config"] | {"data": network["config"]["data"] | {"std": [0.0]}}
    for words, changes in {
        "not the weights": {"network": network | {"actions": ["removed"] * 3}},
        "data.std": {"network": network | {"config": std}},
        "must be a plain name": {"name": "a\nb"},
    }.items():
        folder = shutil.copytree(good, tmp_path / words)
        (folder / "card.json").write_text(json.dumps(card | changes))
        with pytest.raises(UserError, match=words):
            ask("evaluate", f"run={folder}")
    bare = shutil.copytree(good, tmp_path / "bare")
    without = {key: value for key, value in network.items() if key != "actions"}
    (bare / "card.json").write_text(json.dumps(card | {"network": without}))
    for command in ("export", "benchmark", "evaluate"):
        with pytest.raises(UserError, match=r"does not hold the network|not the weights of its card"):
            ask(command, f"run={bare}")
    (bare / "card.json").write_text('{"title": "of another program"}')
    assert_one_line(process("src/evaluate.py", f"run={bare}"), "has no checkpoints/last.ckpt")


@pytest.mark.slow
def test_runs_are_timed_against_the_network_of_their_depth_however_their_blocks_are_distributed(tmp_path):
    short = ["threads=1", "trainer.max_epochs=1", "trainer.limit_train_batches=4", "callbacks.curves=null"]
    for name, asked in {"run": ["gate=aig", "objective=per_block"], "dense": ["gate=none", "objective=plain"]}.items():
        blocks = ["network.depth=14", "network.blocks=[1,2,3]"] if name == "run" else []
        train(config("+experiment=digits", *asked, *short, *blocks, f"run_dir={tmp_path / name}"))
    few = ("batches=[1]", "images=16", "rounds=1", "torch_compile=false")
    timed = ask("benchmark", f"run={tmp_path / 'run'}", f"against=[{tmp_path / 'dense'}]", *few)
    assert read_record(tmp_path / "dense").latency_ms > 0
    assert read_record(tmp_path / "dense").latency.time_ratio > 0
    source = load_source(str(tmp_path / "run"))
    assert [block.residual[0].out_channels for block in source.dense().blocks] == [8] * 2 + [16] * 2 + [32] * 2
    images = source.data.whole_images("test", 16)[0]
    dense = dense_flops(source.dense(), source.data.image_set.shape)
    assert timed["executed"] == pytest.approx(forward_flops(source.network, images) / (16 * dense), abs=0.02)
