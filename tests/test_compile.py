"""Compiling: what gates have settled goes, what is left computes the same, and every change is reported."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import assert_one_line, config, process
from cosinegate.deploy.folded import folded
from cosinegate.deploy.skipping import SkippingNetwork
from cosinegate.deploy.weights import described, read_exported, rebuilt, sha256, write_weights
from deployed import digits
from test_gates import GATES, LOSS
from torch import nn

from cosinegate.build import build_network
from cosinegate.deploy.compile import Action, compile_gates
from cosinegate.deploy.onnx_forms import BatchForm, run_onnx, session, write_onnx
from cosinegate.errors import UserError
from cosinegate.gates import CosineGate
from cosinegate.networks.flops import dense_flops, forward_flops
from cosinegate.record import read_record

GATED = [gate for gate in GATES if gate != "none"]
FEW = ("data=digits", "network.depth=14", "network.width=4")
OWN = {"fixed": ["gate.pattern=[1,0,1,1,0,1]"]}
OWN["exit"] = ["network.blocks=[1,1,4]", "gate.quantile.fit=64", "optimizer.decay_gates=false"]
OWN["exit"] += ["objective.tau_target=0.75"]
MARGIN = 1e-4  # of a logit from its threshold: closer than that, two float32 programs may decide otherwise
CLOSED, ROUTES, OPEN = "closed", "routes", "open"


def images(number: int = 200) -> torch.Tensor:
    return digits("train")[:number].contiguous(memory_format=torch.channels_last)


def network_of(*overrides: str) -> nn.Module:
    """With moments of BatchNorm that are not those it was born with."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        network = build_network(config(*overrides)).train()
        for _ in range(3):
            network(images())
    return network.eval()


@torch.no_grad()
def settled(network: nn.Module, pattern: list[str]) -> nn.Module:
    """The gates' thresholds moved, block after block, so that each is closed, open, or open for half of the images."""
    x = network.stem(images().to(next(network.parameters()).dtype))
    seen = network.begin(images())
    for block, wanted in zip(network.blocks, pattern, strict=True):
        seen = block.look(x, seen)
        if block.gate is not None and block.gate.opening is not None:
            logits = block.decide(x, seen).logit.sort().values
            apart = (logits[1:] - logits[:-1])[50:150].argmax() + 50  # where no two programs decide otherwise
            turn = {CLOSED: logits[-1] + 1, OPEN: logits[0] - 1, ROUTES: (logits[apart] + logits[apart + 1]) / 2}[
                wanted
            ]
            opening = block.gate.opening = copy.deepcopy(block.gate.opening)
            opening.threshold = turn if isinstance(opening.threshold, torch.Tensor) else turn.double().sigmoid().item()
        x, _ = block(x, seen)
    return network


def cosine(pattern: list[str], *overrides: str) -> nn.Module:
    return settled(network_of("gate=cosine", *FEW, *overrides), pattern)


@torch.no_grad()
def outputs(*networks: nn.Module) -> list[torch.Tensor]:
    return [network(images().to(next(network.parameters()).dtype)).logits for network in networks]


@pytest.mark.parametrize("gate", GATED)
def test_every_gate_is_compiled_to_the_same_answers(gate, tmp_path):
    """In the network's own precision, folded, as ONNX, and read back from weights and card."""
    network = network_of(f"gate={gate}", f"objective={LOSS.get(gate, 'cosinegate')}", *FEW, *OWN.get(gate, []))
    if gate != "exit":
        network = settled(network, [CLOSED, OPEN, ROUTES, OPEN, CLOSED, ROUTES])
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    state = torch.get_rng_state()
    compiled, changes = compile_gates(network, images())
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert set(compiled.state_dict()) <= set(before)
    with torch.no_grad():
        trained, after = network(images()), compiled(images())
    assert torch.equal(after.logits, trained.logits)
    closed, opened = changes.places(Action.removed), changes.places(Action.always)
    assert all(not trained.routing.gates[:, place].any() for place in closed)
    assert all(trained.routing.gates[:, place].all() for place in opened)
    assert len(closed) + len(opened) >= {"random": 0}.get(gate, 1)
    assert changes.computed == sum(block.residual is not None for block in compiled.blocks)
    if after.routing is not None:
        assert torch.equal(after.routing.gates, trained.routing.gates)
    plain = folded(compiled, (8, 8), compares=True)
    runtime = SkippingNetwork(plain)
    torch.testing.assert_close(runtime(images()), trained.logits, rtol=0, atol=1e-4)
    assert torch.equal(runtime.gates, trained.routing.gates.bool())
    write_weights(plain, tmp_path / "weights")
    again = rebuilt(json.loads(json.dumps(described(plain))), tmp_path / "weights")
    assert torch.equal(SkippingNetwork(again)(images()), runtime(images()))
    if gate in ("cosine", "constant"):  # one with gates that compare, one without any; the others' tests are elsewhere
        write_onnx(BatchForm(plain), tmp_path / "x.onnx", (1, 8, 8), one_image=False)
        scores, decided = run_onnx(session(tmp_path / "x.onnx", 1), images().contiguous().numpy(), 64)
        torch.testing.assert_close(torch.from_numpy(scores), trained.logits, rtol=0, atol=1e-4)
        assert (decided is None) == (changes.dynamic == 0)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("gate.polarity=novelty", "network.shortcut=projection"),
        ("network.post_activation=false",),
        ("network.blocks=[1,2,3]", "network.widths=[4,6,9]", "gate.controller.enabled=false"),
    ],
)
@pytest.mark.parametrize("pattern", [[CLOSED, OPEN] * 3, [OPEN, CLOSED, CLOSED] * 2, [CLOSED] * 6, [OPEN] * 6])
def test_a_settled_network_is_a_plain_one_with_the_same_bits(overrides, pattern):
    """Blocks that change the shape among those that are closed, all of them, none of them."""
    network = cosine(pattern, *overrides).double()
    compiled, changes = compile_gates(network, images())
    assert torch.equal(*outputs(network, compiled))
    for precision in (torch.float64, torch.float32):
        assert torch.equal(*outputs(network.to(precision), compiled.to(precision)))
    assert changes.places(Action.removed) == [place for place, kind in enumerate(pattern) if kind == CLOSED]
    assert changes.dynamic == 0
    assert compiled(images()).routing is None
    assert not [name for name in compiled.state_dict() if ".gate." in name]
    for place, block in enumerate(compiled.blocks):
        changes_shape = not isinstance(network.blocks[place].shortcut, nn.Identity)
        assert isinstance(block.shortcut, nn.Identity) != changes_shape
        assert (block.residual is None) == (pattern[place] == CLOSED)
    plain = folded(compiled)
    torch.testing.assert_close(plain(images()), outputs(network)[0], rtol=1e-4, atol=1e-4)
    exported = torch.export.export(plain, (images(),))
    operators = {str(node.target) for node in exported.graph.nodes}
    assert not [name for name in operators if "cond" in name or "where" in name or "nonzero" in name]


def test_a_closed_block_keeps_its_relu_where_the_input_may_be_negative():
    network = cosine([CLOSED] * 6)
    network.stem = network.stem[:2]  # without its ReLU
    x = images()
    compiled, _ = compile_gates(network, x)
    assert torch.equal(*outputs(network, compiled))
    assert isinstance(compiled.blocks[0].activation, nn.ReLU)
    assert isinstance(compiled.blocks[1].activation, nn.Identity)  # of what is not negative any more


def test_compiled_flops_are_those_of_what_is_left():
    network = cosine([OPEN, CLOSED, OPEN, CLOSED, OPEN, OPEN])
    compiled, _ = compile_gates(network, images())
    dense = dense_flops(network, (8, 8, 1))
    assert forward_flops(network, images(1)) > dense
    smaller = copy.deepcopy(network)
    for place in (1, 3):
        smaller.blocks[place].residual = None
    assert forward_flops(compiled, images(1)) == dense_flops(smaller, (8, 8, 1)) < dense


def test_tolerance_counts_a_few_images_as_none_and_says_how_many():
    network = cosine([OPEN, ROUTES, OPEN, ROUTES, OPEN, OPEN])
    with torch.no_grad():
        share = network(images()).routing.gates.double().mean(0)
    kept = compile_gates(network, images())[1]
    assert kept.places(Action.kept) == [1, 3]
    assert all(kept.blocks[place].needs_f for place in (1, 3))
    least = min(share[1], 1 - share[1]).item()
    _, changes = compile_gates(network, images(), tolerance=least)
    assert 1 not in changes.places(Action.kept)
    assert changes.blocks[1].other_route == pytest.approx(least, abs=1e-6)
    assert changes.blocks[1].open_fraction == pytest.approx(share[1].item())
    for tolerance in (-0.1, 0.5, float("nan")):
        with pytest.raises(UserError, match="tolerance"):
            compile_gates(network, images(), tolerance=tolerance)


def test_rounding_settles_every_block_as_most_images_have_it():
    network = cosine([CLOSED, ROUTES, OPEN, ROUTES, OPEN, ROUTES])
    with torch.no_grad():
        share = network(images()).routing.gates.mean(0)
    compiled, changes = compile_gates(network, images(), "round")
    assert changes.dynamic == 0
    assert changes.places(Action.removed) == [place for place in range(6) if share[place] < 0.5]
    for change in changes.blocks:
        assert change.other_route == pytest.approx(min(share[change.block].item(), 1 - share[change.block].item()))
    assert compiled(images()).routing is None


def test_predicting_routes_before_f_and_tells_its_agreement(tmp_path):
    network = cosine([CLOSED, OPEN, ROUTES, OPEN, OPEN, ROUTES])
    x, state = digits("train"), torch.get_rng_state()
    compiled, changes = compile_gates(network, x, "predict")
    again, same = compile_gates(network, x, "predict")
    assert changes == same
    assert torch.equal(*outputs(compiled, again))
    assert torch.equal(state, torch.get_rng_state())
    assert changes.places(Action.predicted) == [2, 5]
    for place in (2, 5):
        change = changes.blocks[place]
        assert change.random_agreement < change.agreement < 1.01
        assert change.other_route == pytest.approx(1 - change.agreement)
        assert "a random gate as often open" in str(change)
        assert not isinstance(compiled.blocks[place].gate, CosineGate)
    with torch.no_grad():
        own, theirs = (made(x).routing.gates[:, 2] for made in (network, compiled))
    assert (own == theirs).float().mean() > changes.blocks[2].random_agreement
    assert forward_flops(compiled, x[:64]) < forward_flops(network, x[:64])
    plain = folded(compiled, (8, 8))
    runtime = SkippingNetwork(plain)
    with torch.no_grad():
        output = compiled(images())
    sure = (output.routing.logits[:, [2, 5]].abs() > MARGIN).all(1)
    scores = runtime(images())
    torch.testing.assert_close(scores[sure], output.logits[sure], rtol=0, atol=1e-4)
    assert torch.equal(runtime.gates[sure], output.routing.gates.bool()[sure])
    turn = network(images()).routing.logits[:, 2].sort(descending=True).values[2:4].mean()
    network.blocks[2].gate.opening.threshold = turn.sigmoid().item()
    few = compile_gates(network, images(), "predict")[1].blocks[2]  # three are too few to be fitted
    assert few.action is Action.removed
    assert few.open_fraction == pytest.approx(3 / 200)


def test_what_cannot_be_compiled_is_one_line():
    with pytest.raises(UserError, match="nothing to compile"):
        compile_gates(network_of("gate=none", *FEW), images())
    network = cosine([CLOSED, OPEN] * 3)
    with pytest.raises(UserError, match="nothing to compile"):
        compile_gates(compile_gates(network, images())[0], images())
    routes = compile_gates(cosine([CLOSED, ROUTES] * 3), images())[0]
    assert compile_gates(routes, images(), "round")[1].places(Action.removed)[0] == 0  # it was gone before
    with pytest.raises(UserError, match="no images"):
        compile_gates(network, images(0))
    with pytest.raises(UserError, match="dynamic = guess: must be one of keep, round, predict"):
        compile_gates(network, images(), "guess")


# through the real commands


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of the paper's gate, through quickstart's own command."""
    folder = tmp_path_factory.mktemp("runs")
    short = ["threads=1", "callbacks.curves=null", "trainer.max_epochs=3", f"runs_dir={folder}"]
    done = process("src/quickstart.py", "+experiment=digits", *short)
    assert done.returncode == 0, done.stderr
    (made,) = (folder / "digits").glob("*-s*")
    (made / "words").write_text(done.stdout)
    return made


def test_quickstart_trains_compiles_exports_and_times(run):
    words, record = (run / "words").read_text(), read_record(run)
    compiled = record.compiled
    assert record.flops.compiled == compiled.executed
    assert compiled.images == 359
    assert f"blocks {compiled.blocks} of 3, same answers on {compiled.same_class} of 359" in words
    card = json.loads((run / "export" / "card.json").read_text())
    assert card["executed"] == pytest.approx(compiled.executed, rel=1e-6)
    assert card["compiled"]["computed"] == compiled.blocks
    assert sorted(card["files"]) == ["int8.onnx", "network.onnx", "weights.safetensors"]
    for name in ("runtime", "network.onnx"):
        assert card["forms"][name]["equal"]
    timed = json.loads((run / "benchmark" / "benchmark.json").read_text())
    assert timed["model"] == "compiled"
    assert {(row["batch"], row["engine"]) for row in timed["rows"] if row["bar"] is not None} == {
        (batch, engine) for batch in (1, 64) for engine in ("torch", "onnxruntime")
    }
    assert all(row["bar"] == pytest.approx(timed["executed"] + 0.05) for row in timed["rows"] if row["bar"] is not None)
    assert record.latency_ms == min(
        row["ms_per_image"]
        for row in timed["rows"]
        if (row["model"], row["batch"]) == ("compiled", 1) and "int8" not in row["engine"]
    )
    last = words.strip().splitlines()[-1]
    assert last.startswith("compiled: ")
    assert last.endswith(f"{run}/export/network.onnx")


@pytest.mark.parametrize("asked", [["dynamic=round"], ["dynamic=predict", "budget=0.6"], ["budget=0.6"]])
def test_every_figure_is_printed_before_and_after(asked, run, tmp_path):
    """A budget moves the thresholds, so that blocks route by what they need F(x) for."""
    done = process("src/export.py", f"run={run}", *asked, f"folder={tmp_path / 'export'}", "threads=1")
    assert done.returncode == 0, done.stderr
    for words in ("accuracy", "other class", "other route", "mean gate", "FLOPs", "parameters", "blocks", "block 2:"):
        assert words in done.stdout
    assert "300 training images, for the run kept none aside" in done.stdout
    card, record = json.loads((tmp_path / "export" / "card.json").read_text()), read_record(run)
    trained, compiled = card["forms"]["trained"], card["forms"]["compiled"]
    assert (trained["blocks"], trained["parameters"]) == (3, record.parameters)
    assert trained["executed"] == pytest.approx(record.flops.executed)
    actions = {block["action"] for block in card["compiled"]["blocks"]}
    if asked == ["dynamic=round"]:
        assert trained["accuracy"] == pytest.approx(record.accuracy.test)
        assert compiled["parameters"] < trained["parameters"]
        assert actions <= {"removed", "always"}
    elif "dynamic=predict" in asked:
        assert actions == {"predicted"}
        assert "a random gate as often open" in done.stdout
        assert compiled["executed"] < 1 < trained["executed"]
        assert {"branch.onnx", "batch.onnx"} <= set(card["files"])
    else:
        assert actions == {"kept"}
        assert "so nothing is saved there" in done.stdout
        assert "skipped before F: nothing is saved" in done.stdout
        assert compiled["same_class"] == compiled["same_route"] == 1
        assert compiled["executed"] == trained["executed"]
        assert card["output"]["gates"] == [0, 1, 2]
    evaluated = json.loads(process("src/evaluate.py", f"run={tmp_path / 'export'}", "json=true").stdout)
    assert evaluated["accuracy"] == pytest.approx(card["forms"]["runtime"]["accuracy"])
    assert evaluated["flops"]["executed"] == pytest.approx(compiled["executed"], abs=0.01)


def test_an_export_is_evaluated_as_its_run_is(run):
    own, theirs = (
        json.loads(process("src/evaluate.py", f"run={folder}", "json=true").stdout) for folder in (run, run / "export")
    )
    assert theirs["accuracy"] == pytest.approx(own["accuracy"])
    assert theirs["loss"] == pytest.approx(own["loss"], abs=1e-4)
    assert theirs["mean_gate"] == own["mean_gate"]
    assert theirs["flops"]["executed"] == pytest.approx(read_record(run).flops.compiled, rel=1e-6)
    assert own["flops"]["executed"] > 1 > theirs["flops"]["executed"]


def test_a_run_without_the_figure_gets_it_from_its_export_and_the_frontier_shows_it(run, tmp_path):
    older = shutil.copytree(run, tmp_path / "runs" / "older")
    record = json.loads((older / "record.json").read_text())
    del record["compiled"], record["flops"]["compiled"]
    (older / "record.json").write_text(json.dumps(record))
    assert process("src/export.py", f"run={older}", "threads=1").returncode == 0
    assert read_record(older).compiled == read_record(run).compiled
    drawn = process("src/pareto.py", f"runs={older.parent}", "x=executed", f"folder={tmp_path / 'pareto'}")
    assert drawn.returncode == 0, drawn.stderr
    (table,) = (tmp_path / "pareto").glob("*.csv")
    header, row = (line.split(",") for line in table.read_text().splitlines())
    figures = dict(zip(header, row, strict=True))
    assert float(figures["executed"]) > 1 > float(figures["compiled"])


def test_quickstart_of_a_dense_network_or_of_several_runs_is_one_line(tmp_path):
    short = ["threads=1", "callbacks.curves=null", "trainer.max_epochs=1", "trainer.limit_train_batches=1"]
    done = process("src/quickstart.py", "+experiment=digits", "gate=none", *short, f"runs_dir={tmp_path}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().endswith("a dense network has no gates, so there is nothing to compile")
    assert_one_line(process("src/quickstart.py", "-m", "+experiment=digits", "seed=0,1"), "multirun", "src/train.py")
    assert_one_line(process("src/quickstart.py", "+experiment=digits", "objective.tau_target=2"), "tau_target")


def hostile(folder: Path) -> dict[str, dict]:
    """Cards that claim what they should not, by what the line says."""
    card = json.loads((folder / "card.json").read_text())
    network, blocks = card["network"], card["network"]["blocks"]
    wide = [*blocks[:-1], blocks[-1] | {"outputs": 10**9}]
    grown = [
        block | ({"inputs": 8, "outputs": 10**9, "shortcut": "pad"} if block["removed"] else {}) for block in blocks
    ]
    return {
        "1200 blocks": card | {"network": network | {"blocks": blocks * 400}},
        "not the weights": card | {"network": network | {"blocks": wide}},
        "channels": card | {"network": network | {"blocks": grown}},
        "format 99": card | {"network": network | {"format": 99}},
        "missing or damaged": card | {"files": {"weights.safetensors": "0" * 64}},
        "not an export's card": {"network": 5},
        "not a card of this version": card | {"data": ["digits"]},
        "dense_flops": card | {"dense_flops": -1},
        "data.std": card | {"input": card["input"] | {"std": [0.0]}},
        "classes": card | {"data": "digits", "network": network | {"classes": 7}},
    }


def test_a_hostile_or_foreign_folder_is_one_line(run, tmp_path):
    good = run / "export"
    for number, (words, card) in enumerate(hostile(good).items()):
        folder = tmp_path / str(number)
        shutil.copytree(good, folder)
        (folder / "card.json").write_text(json.dumps(card))
        assert_one_line(process("src/evaluate.py", f"run={folder}"), words if words != "classes" else "not the weights")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "card.json").write_text('{"title": "of another program"}')
    assert_one_line(process("src/evaluate.py", f"run={foreign}"), "not an export's card")
    for command in ("export", "benchmark"):
        assert_one_line(process(f"src/{command}.py", f"run={good}"), "has no checkpoints")
    assert_one_line(process("src/export.py", f"run={run}", f"folder={foreign}"), "is there and is no export")
    assert (foreign / "card.json").exists()
    huge = shutil.copytree(good, tmp_path / "huge")
    with (huge / "weights.safetensors").open("r+b") as file:
        file.truncate(2**40)  # of holes: it takes no disk, and would take a terabyte of memory
    assert_one_line(process("src/evaluate.py", f"run={huge}"), "missing or damaged")
    assert (
        sha256(good / "weights.safetensors")
        == json.loads((good / "card.json").read_text())["files"]["weights.safetensors"]
    )
    read_exported(good)
