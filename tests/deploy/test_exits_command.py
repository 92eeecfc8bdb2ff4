"""The command that gives a trained network early exits: its folder, and what the other commands do with it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import assert_one_line, config, process
from deployed import write

from cosinegate import cli
from cosinegate.analysis import peers, tables
from cosinegate.deploy.card import read_network
from cosinegate.deploy.exits.command import exits as exits_command
from cosinegate.evaluate import evaluate
from cosinegate.networks.compile import Action
from cosinegate.report.content import run_content
from cosinegate.runs.record import read_record
from cosinegate.terminal.errors import UserError
from cosinegate.train import train
from cosinegate.training.load import load_checkpoint

BUDGETS = "budgets=[0.9,0.85,1.0]"


def ask(*overrides: str) -> dict:
    """What the command would do, in this process."""
    return exits_command(config("threads=1", *overrides, config_name="exits"))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    short = ["gate=none", "objective=plain", "network.blocks=[1,1,2]", "network.width=4", "trainer.max_epochs=2"]
    of = config("+experiment=digits", *short, "threads=1", f"runs_dir={tmp_path_factory.mktemp('runs')}")
    train(of)
    return Path(of.run_dir)


@pytest.fixture(scope="module")
def made(run) -> Path:
    """The folder that the command writes, through a process of its own."""
    done = process("src/exits.py", f"run={run}", BUDGETS, "threads=1")
    assert done.returncode == 0, done.stderr
    (folder,) = (run.parents[1] / "digits_exits").iterdir()
    for words in ("budget", "other class", "FLOPs of dense", "BranchyNet", f"{folder}/figures/frontier.png"):
        assert words in done.stdout
    return folder


def test_the_folder_has_a_frontier_of_the_budgets(run, made):
    assert {path.name for path in made.iterdir()} - {".lock"} == {
        "card.json",
        "figures",
        "frontier.json",
        "record.json",
        "weights.safetensors",
    }
    found, record = json.loads((made / "frontier.json").read_text()), read_record(made).as_dict()
    assert [point["budget"] for point in found["points"]] == [0.9, 0.85, 1.0]
    for point in found["points"]:
        assert point["executed_of_own"] == pytest.approx(point["budget"], abs=0.05)  # on images of the test set
        assert point["paths"] == 2
    assert found["own"]["accuracy"] == pytest.approx(read_record(run).accuracy.test)
    assert (made / "figures" / "frontier.png").read_bytes()[:4] == b"\x89PNG"
    first = found["points"][0]
    assert record["accuracy"]["test"] == first["accuracy"]
    assert record["blocks_open"] == first["open"]
    assert record["exits"]["after"] == found["after"] == [2]
    assert (record["status"], record["gate"], record["experiment"]) == ("finished", "exits", "digits_exits")
    assert record["epochs"] == read_record(run).epochs.as_dict()
    _, early, _ = read_network(made)
    assert early.threshold.item() == first["threshold"]
    trained = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    for name, tensor in early.network.state_dict().items():  # frozen
        assert torch.equal(tensor, trained[f"network.{name}"])


def test_what_is_written_is_evaluated_and_reported(made):
    result, *_ = evaluate(config(f"run={made}", "threads=1", config_name="evaluate"))
    record = read_record(made).as_dict()
    assert result["experiment"] == "digits_exits"
    assert result["accuracy"] == pytest.approx(record["accuracy"]["test"])
    assert result["mean_gate"] == pytest.approx(record["mean_gate"])
    assert result["flops"]["executed"] == pytest.approx(record["flops"]["executed"])
    assert [block["open"] for block in result["blocks"]] == pytest.approx(record["blocks_open"])
    content = run_content(made, examples=2)
    assert content["routes"]["number_of_paths"] == 2
    assert content["routes"]["cir"] is None
    assert json.dumps(content)


def test_it_is_exported_with_a_form_for_one_image_and_timed(made):
    done = process("src/export.py", f"run={made}", "budget=0.95", "threads=1")
    assert done.returncode == 0, done.stderr
    card = json.loads((made / "export" / "card.json").read_text())
    assert sorted(card["files"]) == ["int8.onnx", "network.onnx", "one.onnx", "weights.safetensors"]
    assert card["budget"] == 0.95
    for name in ("torch", "one.onnx", "network.onnx"):
        assert card["forms"][name]["equal"]
        assert card["forms"][name]["rerouted"] <= 3
    assert card["forms"]["trained"]["executed"] == pytest.approx(0.95, abs=0.05)
    small = ["rounds=1", "batches=[1,8]", "torch_compile=false", "images=64", "threads=1"]
    done = process("src/benchmark.py", f"run={made}", *small)
    assert done.returncode == 0, done.stderr
    timed = json.loads((made / "benchmark" / "benchmark.json").read_text())
    assert timed["model"] == "exits"
    rows = [row for row in timed["rows"] if (row["model"], row["engine"]) == ("exits", "onnxruntime")]
    assert [set(row["ways"]) for row in rows] == [{"whole", "one image"}, {"whole", "image by image"}]
    assert read_record(made).latency_ms > 0


def test_a_second_call_writes_over_its_own_files_alone(run, made):
    (made / "notes.txt").write_text("keep me")
    before = {name: (made / name).read_bytes() for name in ("frontier.json", "weights.safetensors")}
    found = ask(f"run={run}", BUDGETS)
    assert found["folder"] == str(made)
    assert {name: (made / name).read_bytes() for name in before} == before
    assert (made / "notes.txt").read_text() == "keep me"
    for name, words in {"frontier.json": "was not written by this command", "card.json": "holds no exits"}.items():
        other = made.parents[1] / f"other-{name}"
        other.mkdir()
        (other / name).write_text("{}")
        with pytest.raises(UserError, match=words):
            ask(f"run={run}", BUDGETS, f"output={other}")
        assert (other / name).read_text() == "{}"
        shutil.rmtree(other)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["budgets=[0.9,0.1]"], "budget = 0.1: must lie from"),
        (["after=[7]"], "after = [7]: must be blocks that run"),
        (["dynamic=round", "tolerance=0.1", "checkpoint=best", "budgets=[2]"], "budget = 2: must lie from"),
    ],
)
def test_what_cannot_be_is_one_line_before_any_work(overrides, words, run, capsys):
    with pytest.raises(UserError) as caught:
        ask(f"run={run}", *overrides)
    assert words in str(caught.value)
    assert "fitting" not in capsys.readouterr().out


def test_what_has_exits_or_is_not_finished_gets_none(run, made, tmp_path):
    assert_one_line(process("src/exits.py", f"run={made}"), "has exits already", "budget=")
    stopped = shutil.copytree(run, tmp_path / "stopped")
    record = json.loads((stopped / "record.json").read_text())
    (stopped / "record.json").write_text(json.dumps(record | {"status": "running"}))
    with pytest.raises(UserError, match=r"not trained to its end \(running\)"):
        ask(f"run={stopped}")
    short = config(
        "+experiment=digits", "gate=none", "objective=plain", "trainer.max_epochs=1", f"run_dir={tmp_path}/r"
    )
    train(short)
    with pytest.raises(UserError, match="its last stage has one block alone"):
        ask(f"run={tmp_path / 'r'}")


def test_exits_of_two_exports_have_a_folder_each_and_their_runs_epochs(run, tmp_path):
    """An export has no record of its own: it lies in its run's folder."""
    folders = []
    for index in range(2):
        trained = shutil.copytree(run, tmp_path / "runs" / "digits" / f"{index:010x}-s0")
        module, of = load_checkpoint(trained / "checkpoints" / "last.ckpt")
        with torch.no_grad():
            module.network.head.bias += index
        write(module.network, of, [Action.ungated] * 4, trained / "export")
        found = ask(f"run={trained / 'export'}", "images=64")
        folders.append(Path(found["folder"]))
        record = read_record(folders[-1])
        assert record.epochs == read_record(trained).epochs
        assert folders[-1].name == f"{record.identity}-s0"
    assert folders[0] != folders[1]
    assert {folder.parent for folder in folders} == {tmp_path / "runs" / "digits_exits"}


def test_exits_of_a_checkpoint_alone_claim_no_epochs_and_are_compared_all_the_same(run, tmp_path):
    checkpoint, folder = tmp_path / "theirs.ckpt", tmp_path / "runs" / "exits"
    shutil.copy(run / "checkpoints" / "last.ckpt", checkpoint)
    ask(f"run={checkpoint}", f"output={folder}", "images=64", "budgets=[0.9]")
    record = read_record(folder)
    assert (record.epochs.planned, record.epochs.done, record.seconds) == (None, None, None)
    shutil.copytree(run, tmp_path / "runs" / "whole", ignore=shutil.ignore_patterns("checkpoints"))
    options = [f"runs=[{tmp_path}/runs]", f"runs_dir={tmp_path}/runs"]
    tables.pareto(cli.compose(*options, config_name="pareto"), "src/pareto.py")
    peers.table(cli.compose(*options, "sweep=null", config_name="table"), "src/table.py")
    written = tmp_path / "runs" / "figures"
    assert {path.name for path in written.glob("*.csv")} == {
        "digits-resnet1-1-2-w4-2epochs-counted.csv",
        "digits-resnet1-1-2-w4-unknownepochs-counted.csv",
    }
    assert "epochs not recorded" in (written / "runs.md").read_text()
    assert run_content(folder, examples=2)["record"]["epochs"] == {"planned": None, "done": None}
