"""Early exits: fitted to a frozen network, which stays as it is; a budget moves their threshold and no weight."""

import copy
import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import assert_one_line, config, process
from deployed import (
    CLOSED,
    LAST_STAGE,
    OPEN,
    assert_same,
    chosen,
    classifying,
    cosine,
    digits,
    eager,
    images,
    labels,
    network_of,
    with_exits,
    write,
)
from same_routes import near_exit

from cosinegate.deploy.card import read_network
from cosinegate.deploy.exits import EarlyExitNetwork
from cosinegate.deploy.exits.budget import exit_logits, mean_cost, path_costs, set_budget
from cosinegate.deploy.exits.command import exits as exits_command
from cosinegate.deploy.exits.fit import default_exits, fit_exits, new_exits
from cosinegate.evaluate import evaluate
from cosinegate.networks.compile import Action, compile_gates
from cosinegate.networks.flops import dense_flops, forward_flops
from cosinegate.report.content import run_content
from cosinegate.runs.record import read_record
from cosinegate.terminal.errors import UserError
from cosinegate.train import train
from cosinegate.training.load import load_checkpoint

AFTER = [2, 3]


def test_the_batch_that_shrinks_gives_what_images_one_by_one_give():
    network, x = with_exits(), digits("test")
    together, near = eager(network, x), near_exit(network, x)
    assert len(together.routing.gates.unique(dim=0)) == 3
    alone = [eager(network, image[None]) for image in x]
    scores = torch.cat([output.logits for output in alone])
    assert_same(scores, torch.cat([output.routing.gates for output in alone]), network, together, near=near)


def test_an_image_has_the_scores_of_the_first_exit_that_is_sure():
    network, x = with_exits(), digits("test")
    with torch.no_grad():
        steps = list(network.network.walk(x))
        answers = [network.exit_after(index)(steps[index].y) for index in AFTER]
        scores = torch.stack([scores for scores, _ in answers] + [network.network.classify(steps[-1].y)])
        stays = torch.stack([logit > network.threshold for _, logit in answers], dim=1).cummin(1).values  # (B, E)
    exited = stays.sum(1)
    assert exited.unique().tolist() == [0, 1, 2]
    expected = torch.stack([stays[:, 0] | True] * 3 + [stays[:, 0], stays[:, 1]], dim=1)
    output = eager(network, x)
    on_threshold = near_exit(network, x).any(1)
    assert torch.equal(output.routing.gates.bool()[~on_threshold], expected[~on_threshold])
    picked = scores[exited, torch.arange(len(x))]
    torch.testing.assert_close(output.logits[~on_threshold], picked[~on_threshold], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("threshold", "blocks"), [(-torch.inf, 5), (torch.inf, 3)])
def test_the_ends_of_the_threshold_keep_every_image_or_none(threshold, blocks):
    network, x = with_exits(), digits("test")
    network.threshold.fill_(threshold)
    output = eager(network, x)
    assert (output.routing.gates.sum(1) == blocks).all()
    if blocks == 5:
        assert torch.equal(output.logits, eager(network.network, x).logits)
    costs = path_costs(network, x[:1])
    assert forward_flops(network, x) == pytest.approx(
        len(x) * (costs[-1] if blocks == 5 else costs[0]).item() * dense_flops(network.network, (8, 8, 1))
    )


def test_exits_are_off_in_training():
    network, x = with_exits().train(), images(20)
    network.threshold.fill_(torch.inf)
    plain = copy.deepcopy(network.network)
    assert torch.equal(network(x).logits, plain(x).logits)


def test_fitting_moves_no_weight_of_the_network_and_is_the_same_every_time():
    network, x, y = classifying(network_of(config(*LAST_STAGE))), digits("train")[:300], labels("train")[:300]
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    first = fit_exits(network.train(), AFTER, x, y)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)  # whatever was drawn before
        state = torch.get_rng_state()
        second = fit_exits(network.eval(), AFTER, x, y)
        assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    for index in AFTER:
        for name, tensor in first[index].state_dict().items():
            assert torch.equal(tensor, second[index].state_dict()[name])
        assert not any(parameter.requires_grad for parameter in first[index].parameters())


def test_classifiers_are_fitted_to_the_labels_and_policies_to_whether_the_answer_changes():
    network, x, y = with_exits(), digits("train"), labels("train")
    unfitted = EarlyExitNetwork(network.network, new_exits(network.network, AFTER, x[:1])).eval()
    whole = eager(network.network, x).logits.argmax(1)
    with torch.no_grad():
        steps = list(network.network.walk(x))
        for index in AFTER:
            scores, logit = network.exit_after(index)(steps[index].y)
            drawn, _ = unfitted.exit_after(index)(steps[index].y)
            assert (scores.argmax(1) == y).float().mean() > 0.8 > (drawn.argmax(1) == y).float().mean() + 0.5
            changes = scores.argmax(1) != whole
            assert 0 < changes.float().mean() < 0.5
            ranks = logit.argsort().argsort().float()  # where the answer changes, the logit is higher
            area = (ranks[changes].mean() - (changes.sum() - 1) / 2) / (~changes).sum()
            assert area > 0.8


@pytest.mark.parametrize("budget", [0.65, 0.8, 0.95])
def test_a_budget_is_met_on_the_images_it_was_set_by(budget):
    network, x = with_exits(), digits("train")[:500]
    found = set_budget(network, budget, x)
    costs = path_costs(network, x[:1])
    step = (costs[-1] - costs[0]).item() / len(x)
    assert budget - step - 1e-9 <= found <= budget
    logits = exit_logits(network, x)
    assert found == mean_cost(logits, costs, network.threshold.item())
    own = dense_flops(network.network, (8, 8, 1))
    on_threshold = near_exit(network, x).any(1).sum().item()
    assert forward_flops(network, x) / len(x) / own == pytest.approx(found, abs=(on_threshold + 1e-6) * step)


def test_a_larger_budget_lets_no_image_exit_earlier():
    routes = [eager(with_exits(budget), digits("test")).routing.gates for budget in (0.65, 0.8, 0.95)]
    assert all((less <= more).all() for less, more in itertools.pairwise(routes))
    assert routes[0].sum() < routes[1].sum() < routes[2].sum()


def test_a_budget_out_of_range_is_one_line():
    network = with_exits()
    for budget in (0.3, 1.2):
        with pytest.raises(UserError, match=rf"budget = {budget}: must lie from 0\.\d+ .* to 1\.\d+"):
            set_budget(network, budget, images(50))


@torch.no_grad()
def taking(network: EarlyExitNetwork, place: int) -> EarlyExitNetwork:
    """A copy without gates in which every image takes the exit of that place among its exits, or none."""
    forced = copy.deepcopy(network)
    forced.threshold.fill_(0.0)
    for number, index in enumerate(network.after):
        last = forced.exit_after(index).policy[2]
        last.weight.zero_()
        last.bias.fill_(-1.0 if number == place else 1.0)
    for block in forced.blocks:
        block.gate = None
    return forced


@pytest.mark.parametrize("gate", ["none", "cosine", "aig"])
def test_path_costs_are_the_flops_of_real_passes(gate):
    """Where gates are left, as if all of them were open."""
    network = network_of(config(*LAST_STAGE) if gate == "none" else chosen(gate))
    early = EarlyExitNetwork(network, new_exits(network, [1, 3], images(1))).eval()
    costs, own = path_costs(early, images(1)), dense_flops(network, (8, 8, 1))
    real = [forward_flops(taking(early, place), images(3)) / (3 * own) for place in range(3)]
    assert costs.tolist() == pytest.approx(real)
    assert real[0] < real[1] < 1 < real[2]


def test_exits_stand_where_blocks_run_that_others_follow():
    """On a compiled network too: behind a block that was removed, an exit would see nothing new."""
    compiled, _ = compile_gates(classifying(cosine([OPEN, OPEN, OPEN, OPEN, CLOSED, OPEN])), images())
    assert default_exits(compiled, images(1)) == []  # block 4 is removed, and nothing follows block 5
    assert default_exits(network_of(config(*LAST_STAGE)), images(1)) == [2, 3]
    for after in ([4], [5], [6], [-1], []):
        with pytest.raises(UserError, match=r"must be blocks that run .* of \[0, 1, 2, 3\]"):
            new_exits(compiled, after, images(1))
    early = EarlyExitNetwork(compiled, fit_exits(compiled, [1, 3], digits("train"), labels("train"))).eval()
    set_budget(early, 0.8, digits("train"))
    output = eager(early, digits("test"))
    assert early.after == [1, 3]
    assert not output.routing.gates[:, 4].any()
    assert output.routing.gates.sum(1).unique().tolist() == [2, 4, 5]
    assert (output.logits.argmax(1) == labels("test")).float().mean() > 0.4


# the command

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
    for name, words in {"frontier.json": "no file that this command wrote", "card.json": "holds no exits"}.items():
        other = made.parents[1] / f"other-{name}"
        other.mkdir()
        (other / name).write_text("{}")
        with pytest.raises(UserError, match=words):
            ask(f"run={run}", BUDGETS, f"output={other}")
        assert (other / name).read_text() == "{}"
        shutil.rmtree(other)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["budgets=[]"], "budgets = []"),
        (["budgets=[0.9,0.1]"], "budget = 0.1: must lie from"),
        (["budgets=[0.7,-1]"], "budgets = [0.7, -1.0]"),
        (["after=[7]"], "after = [7]: must be blocks that run"),
        (["after=[]"], "after = []: must be blocks that run"),
        (["images=0"], "images = 0"),
        (["dynamic=round", "tolerance=0.1", "checkpoint=best", "budgets=[2]"], "budget = 2: must lie from"),
    ],
)
def test_what_cannot_be_is_one_line_before_any_work(asked, words, run, capsys):
    with pytest.raises(UserError) as caught:
        ask(f"run={run}", *asked)
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
