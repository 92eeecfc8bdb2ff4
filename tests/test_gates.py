"""Every gate of conf/gate through the same slot: trained, stopped, resumed, evaluated, deployed, exported."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, config
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from sklearn.datasets import load_digits

from cosinegate import cli
from cosinegate.build import build_module, build_network
from cosinegate.config import validate
from cosinegate.deploy.flops import dense_flops, forward_flops
from cosinegate.deploy.folded import folded
from cosinegate.deploy.onnx_forms import BatchForm, BranchForm, require_exportable, run_onnx, session, write_onnx
from cosinegate.deploy.skipping import SkippingNetwork
from cosinegate.deploy.specialise import specialise
from cosinegate.deploy.trained import Trained, load_trained
from cosinegate.deploy.weights import described, rebuilt, write_weights
from cosinegate.errors import UserError
from cosinegate.evaluate import load_checkpoint
from cosinegate.gates.random import fingerprint, uniform
from cosinegate.gates.skipnet_recurrent import Cell
from cosinegate.record import read_metrics
from cosinegate.run import train

GATES = sorted(path.stem for path in (ROOT / "conf" / "gate").glob("*.yaml"))
LOSS = {"aig": "per_block", "random": "plain", "fixed": "plain", "drop": "plain", "predictive": "predictive"}
LOSS |= dict.fromkeys(("skipnet", "skipnet_recurrent", "constant"), "two_sided") | {"attention": "dynconv"}
SMALL = ["data=digits", "network.depth=14", "network.width=4", "threads=1", "objective.warmup_epochs=0"]
SHORT = ["trainer.max_epochs=2", *(f"trainer.limit_{stage}_batches=1" for stage in ("val", "test"))]
SHORT += ["trainer.limit_train_batches=3", "+callbacks.fault._target_=faults.Fault", "+callbacks.fault.seed=0"]

# train/loss after two epochs of three batches on the digits; a change that should not move it must not
GOLDEN = {
    "aig": 2.272130,
    "attention": 2.359709,
    "cir_only": 2.357982,
    "constant": 2.269971,
    "controller_only": 2.273135,
    "cosine": 2.357960,
    "drop": 2.207358,
    "fixed": 2.077166,
    "none": 2.061610,
    "predictive": 2.320870,
    "random": 2.272593,
    "skipnet": 2.286252,
    "skipnet_recurrent": 3.238463,
}
WHY_NOT = {  # no skipping runtime, and why
    "none": "a dense network has no gates",
    "cosine": "look at F(x) before they decide",
    "cir_only": "look at F(x) before they decide",
    "drop": "open for every image",
    "constant": "open for every image",  # after six steps
}


def chosen(gate: str, *overrides: str):
    pattern = ["gate.pattern=[1,0,1,1,0,1]"] if gate == "fixed" else []
    return config(f"gate={gate}", f"objective={LOSS.get(gate, 'cosinegate')}", *SMALL, *pattern, *overrides)


def images(number: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(number, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return made.to(memory_format=torch.channels_last)


@pytest.fixture(scope="module", params=GATES)
def run(request, tmp_path_factory):
    """A short run of a gate."""
    of = chosen(request.param, *SHORT, f"runs_dir={tmp_path_factory.mktemp('gates')}")
    record = train(of)
    return SimpleNamespace(gate=request.param, record=record, folder=Path(of.run_dir))


def test_every_gate_trains_to_its_golden_loss(run):
    assert run.record["status"] == "finished"
    assert read_metrics(run.folder)[2]["train/loss"] == pytest.approx(GOLDEN[run.gate], rel=2e-3)


def test_every_gate_ends_a_stopped_run_as_one_that_never_stopped(run, tmp_path, monkeypatch):
    stopped = chosen(run.gate, *SHORT, f"runs_dir={tmp_path}")
    monkeypatch.setenv("FAULT", "1")
    with pytest.raises(RuntimeError, match="a fault"):
        train(stopped.copy())
    monkeypatch.delenv("FAULT")
    train(stopped)
    whole, resumed = (
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for folder in (run.folder, Path(stopped.run_dir))
    )
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_every_gate_evaluates_alike_every_time_and_in_every_batch(run):
    network = load_checkpoint(run.folder / "checkpoints" / "last.ckpt")[0].network.eval()
    x, before = images(12), torch.get_rng_state()
    with torch.no_grad():
        first, second = network(x), network(x)
        alone = [network(x[n : n + 1]) for n in range(3)]
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(before, torch.get_rng_state())
    torch.testing.assert_close(first.logits[:3], torch.cat([one.logits for one in alone]), rtol=1e-4, atol=1e-5)
    if run.gate != "none":
        assert set(first.routing.gates.unique().tolist()) <= {0.0, 1.0}
        assert torch.equal(first.routing.gates[:3], torch.cat([one.routing.gates for one in alone]))


def deployable(run) -> Trained:
    """The run's network with gates that route, or that close a block for all, where they cannot."""
    path = run.folder / "checkpoints" / "last.ckpt"
    module, of = load_checkpoint(path)
    network = module.network.eval()
    if run.gate == "constant":
        network.blocks[1].gate.logit.data.fill_(-3.0)
    made = Trained(path, of, network, folded(network, (8, 8)), data=None)
    if all(block.gate is None or block.gate.ranks for block in network.blocks):
        made.calibrate(0.7, images(64, seed=1))
    return made


def test_every_gate_that_decides_first_skips_and_is_exported_and_the_others_say_why_not(run, tmp_path):
    if run.gate in WHY_NOT:
        with pytest.raises(UserError, match=re.escape(WHY_NOT[run.gate])):
            load_trained(str(run.folder))
        if run.gate != "constant":
            return
    made, x = deployable(run), images(16, seed=2)
    with torch.no_grad():
        eager = made.eager(x)
    gates = eager.routing.gates.bool()
    assert 0 < gates.float().mean() < 1
    runtime = SkippingNetwork(made.folded, micro_batch=5)
    torch.testing.assert_close(runtime(x), eager.logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(runtime.gates, gates)
    write_weights(made.folded, tmp_path / "weights")
    torch.testing.assert_close(rebuilt(described(made.folded), tmp_path / "weights")(x), made.folded(x))
    if run.gate == "random":
        with pytest.raises(UserError, match="cannot be exported"):
            require_exportable(made.folded, run.folder)
        return
    places = [i for i, block in enumerate(made.folded.blocks) if block.head is not None]
    recurrent = [(BranchForm, 1)] if run.gate == "skipnet_recurrent" else []  # its state passes by the branches
    for form, batch in [(BatchForm, 16), *recurrent]:
        write_onnx(form(made.folded), tmp_path / "x.onnx", (1, 8, 8), one_image=batch == 1)
        scores, decided = run_onnx(session(tmp_path / "x.onnx", 1), x.contiguous().numpy(), batch)
        torch.testing.assert_close(torch.from_numpy(scores), eager.logits, rtol=1e-4, atol=1e-4)
        assert places == [] if decided is None else torch.equal(torch.from_numpy(decided), gates[:, places])


def test_specialising_keeps_the_memory_that_later_gates_need():
    plain = folded(build_network(chosen("skipnet_recurrent")), (8, 8))
    x = images(32)
    turns = [-math.inf, -math.inf, None, math.inf, -math.inf, -math.inf]  # one gate is left
    y, seen = torch.relu(plain.stem(x)), plain.begin(x)
    for block, turn in zip(plain.blocks, turns, strict=True):
        seen = block.eye(y, seen)
        block.head.turn.fill_(block.head.score(seen).median() if turn is None else turn)
        y = torch.where(block.head(seen)[:, :, None, None], block.full(y), block.identity(y))
    special, _ = specialise(plain, x, tolerance=0.0)
    assert [block.head is not None for block in special.blocks] == [i == 2 for i in range(6)]
    assert [block.looks for block in special.blocks] == [i <= 2 for i in range(6)]
    torch.testing.assert_close(special(x), plain(x))


# what each gate promises


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_opens_with_what_it_is_and_where_it_comes_from(gate):
    comment = [line for line in (ROOT / "conf" / "gate" / f"{gate}.yaml").read_text().splitlines() if line[:1] == "#"]
    assert len(comment) >= 2
    assert comment[1].startswith("# From: ")


@pytest.mark.parametrize("gate", GATES)
def test_the_network_around_any_gate_begins_with_the_same_weights(gate):
    dense, gated = (build_module(chosen(name, "seed=3")).network.state_dict() for name in ("none", gate))
    assert all(torch.equal(value, gated[name]) for name, value in dense.items())


@pytest.mark.parametrize("gate", ["aig", "attention", "constant"])
def test_gates_with_a_start_begin_about_that_open(gate):
    network = build_network(chosen(gate)).train()
    opened = network(images(256)).routing.gates
    assert opened.mean().item() == pytest.approx(0.85, abs=0.05)
    assert set(opened.detach().unique().tolist()) == {0.0, 1.0}  # straight-through


# each gate's equation from its paper, of the inputs of all blocks, with one parameter after the other


def layer(x, linear):
    return x @ linear.weight.T + (0 if linear.bias is None else linear.bias)


def normalised(x, bn):
    places = [0, *range(2, x.dim())]
    x = (x - x.mean(places, keepdim=True)) / (x.var(places, unbiased=False, keepdim=True) + 1e-5).sqrt()
    shape = [1, -1] + [1] * (x.dim() - 2)
    return x * bn.weight.view(shape) + bn.bias.view(shape)


def slow_aig(gate, x):
    first, bn, _, last = gate.score
    return layer(normalised(layer(x.mean((2, 3)), first), bn).clamp_min(0), last)


def slow_skipnet(gate, x):
    conv, bn, *_, last = gate.score
    b, c, h, w = x.shape
    windows = torch.nn.functional.unfold(x, 3, padding=1, stride=2)  # (B, 9C, places)
    seen = (conv.weight.flatten(1) @ windows).view(b, c, (h + 1) // 2, (w + 1) // 2)
    return layer(normalised(seen, bn).clamp_min(0).mean((2, 3)), last)


def slow_attention(gate, x):
    score, pooled = gate.score, x.mean((2, 3))
    attention = 1 / (1 + torch.exp(-layer(layer(pooled, score.w1).clamp_min(0), score.w2)))
    return layer(attention * pooled, score.readout)


def slow_controller(gate, x):
    return gate.gamma * layer(layer(x.mean((2, 3)), gate.controller.w1).clamp_min(0), gate.controller.w2)


def slow_recurrent(gates, inputs):
    cell = gates[0].cell
    lstm = torch.nn.LSTM(cell.hidden, cell.hidden).double()
    with torch.no_grad():
        lstm.weight_ih_l0.copy_(cell.gates.weight[:, : cell.hidden])
        lstm.weight_hh_l0.copy_(cell.gates.weight[:, cell.hidden :])
        lstm.bias_ih_l0.copy_(cell.gates.bias)
        lstm.bias_hh_l0.zero_()
    states, _ = lstm(torch.stack([layer(x.mean((2, 3)), gate.embed) for gate, x in zip(gates, inputs, strict=True)]))
    return [layer(state, gates[0].readout) for state in states]


def each(slow):
    return lambda gates, inputs: [slow(gate, x) for gate, x in zip(gates, inputs, strict=True)]


SLOW = {"aig": each(slow_aig), "skipnet": each(slow_skipnet), "attention": each(slow_attention)}
SLOW |= {"controller_only": each(slow_controller), "skipnet_recurrent": slow_recurrent}
SLOW |= {"constant": each(lambda gate, x: gate.logit.expand(len(x), 1))}


@pytest.mark.parametrize("gate", sorted(SLOW))
def test_a_gates_logit_is_its_equation_and_opens_it_as_its_paper_says(gate):
    network, inputs = build_network(chosen(gate)).double().train(), []
    for number, parameter in enumerate(parameter for block in network.blocks for parameter in block.gate.parameters()):
        if parameter.requires_grad:  # none is as it begins: zeros and ones would hide their part
            torch.manual_seed(number)
            parameter.data += 0.3 * torch.randn_like(parameter)
    for block in network.blocks:
        block.register_forward_pre_hook(lambda block, given: inputs.append(given[0].detach().clone()))
    with torch.no_grad():
        found = network(images(9).double()).routing
        slow = torch.cat(SLOW[gate]([block.gate for block in network.blocks], inputs), dim=1)
    torch.testing.assert_close(found.logits, slow)
    if gate.startswith("skipnet"):  # no noise: what is open in training is open in evaluation
        assert torch.equal(found.gates, (slow > 0).double())


def test_a_fixed_pattern_is_the_one_that_was_given():
    network = build_network(chosen("fixed"))
    for mode in (True, False):
        assert network.train(mode)(images(3)).routing.gates.tolist() == [[1, 0, 1, 1, 0, 1]] * 3


def test_random_gates_keep_their_rate_on_real_images_and_know_neither_batch_nor_layout():
    pixels = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    x = (pixels - 0.3) / 0.37
    drawn = torch.stack([uniform(fingerprint(x), place) for place in range(9)], dim=1)
    error = math.sqrt(0.7 * 0.3 / len(x))
    assert ((drawn < 0.7).double().mean(0) - 0.7).abs().max() < 4 * error
    correlation = torch.corrcoef(drawn.T) - torch.eye(9)
    assert correlation.abs().max() < 5 / math.sqrt(len(x))
    some = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:100]]
    last = some.to(memory_format=torch.channels_last)
    assert torch.equal(fingerprint(some), fingerprint(last))
    assert torch.equal(fingerprint(some)[3:4], fingerprint(some[3:4]))
    moved = some.clone()
    moved[:, 0, 4, 4] += 1 / 16
    assert (fingerprint(some) != fingerprint(moved)).all()
    with torch.no_grad():
        gates = build_network(chosen("random", "gate.rate=0.4")).eval()(x).routing.gates.double()
    assert (gates.mean(0) - 0.4).abs().max() < 4 * math.sqrt(0.4 * 0.6 / len(x))
    assert len(gates.unique(dim=0)) == 2**6  # every block by a draw of its own


def test_random_gates_draw_anew_in_training_at_their_rate():
    network = build_network(chosen("random", "gate.rate=0.4")).train()
    first, second = (network(images(128)).routing.gates for _ in range(2))
    assert not torch.equal(first, second)
    assert first.mean().item() == pytest.approx(0.4, abs=0.06)


def test_stochastic_depth_keeps_its_mean_and_drops_more_with_depth():
    network = build_network(chosen("drop", "gate.rate=0.4")).train()
    gates = torch.cat([network(images(256)).routing.gates for _ in range(4)])
    keep = torch.linspace(0.9, 0.4, 6)
    torch.testing.assert_close((gates > 0).float().mean(0), keep, atol=0.06, rtol=0)
    torch.testing.assert_close(gates.mean(0), torch.ones(6), atol=0.15, rtol=0)
    assert (network.eval()(images(256)).routing.gates == 1).all()


def test_the_recurrent_gates_cell_is_an_lstms():
    cell, lstm = Cell(5, 4), torch.nn.LSTMCell(5, 4)
    with torch.no_grad():
        lstm.weight_ih.copy_(cell.gates.weight[:, :5])
        lstm.weight_hh.copy_(cell.gates.weight[:, 5:])
        lstm.bias_ih.copy_(cell.gates.bias)
        lstm.bias_hh.zero_()
    x, state = torch.randn(3, 5), (torch.randn(3, 4), torch.randn(3, 4))
    for found, expected in zip(cell(x, state), lstm(x, state), strict=True):
        torch.testing.assert_close(found, expected)


def test_the_recurrent_gates_share_one_memory_that_goes_on_with_the_images():
    network = build_network(chosen("skipnet_recurrent")).eval()
    cells = {id(block.gate.cell) for block in network.blocks}
    assert len(cells) == 1
    names = [name for name, _ in network.named_parameters()]
    assert sum(".cell." in name for name in names) == 2
    network.blocks[0].gate.opening.threshold = 1e-9  # of all: every gate is open, so that images go one way
    with torch.no_grad():
        before = network(images(4)).routing.logits
        network.blocks[0].gate.embed.weight.mul_(50)
        after = network(images(4)).routing.logits
    assert not torch.allclose(before[:, 5], after[:, 5])  # what the first block saw, the last one still knows


def test_a_convolutional_gate_is_paid_for():
    """SkipNet's costs an eighth of a block of two convolutions: an open network executes more than the dense one."""
    network = build_network(chosen("skipnet", "gate.start=0.999")).eval()
    with torch.no_grad():
        for block in network.blocks:
            block.gate.score[-1].weight.zero_()
    x = images(4)
    assert network(x).routing.gates.mean() == 1
    assert 1.08 < forward_flops(network, x) / (4 * dense_flops(network, (8, 8, 1))) < 1.15


def test_the_controller_alone_looks_at_no_f():
    network = build_network(chosen("controller_only", "objective.lambda_cons=0")).train()
    output = network(images(8))
    torch.testing.assert_close(output.routing.logits, torch.zeros(8, 6))  # W2 begins at zero
    assert torch.isnan(output.routing.cir).all()
    assert all(block.gate.decides_first for block in network.blocks)


def test_a_checkpoint_from_before_these_keys_is_read_as_it_was_meant(tmp_path):
    of = chosen("cosine", *SHORT, f"runs_dir={tmp_path}")
    module = build_module(of)
    old = dict(module.hparams)
    for group, keys in {
        "gate": ("start", "hidden", "rate", "pattern"),
        "objective": ("target", "targets", "bounds", "reinforce"),
        "network": ("torchvision",),
    }.items():
        old[group] = {key: value for key, value in old[group].items() if key not in keys}
    old["callbacks"] = {}
    torch.save({"hyper_parameters": old, "state_dict": module.state_dict()}, tmp_path / "old.ckpt")
    again, _ = load_checkpoint(tmp_path / "old.ckpt")
    assert torch.equal(again.eval()(images(2)).logits, module.eval()(images(2)).logits)


BAD = [
    (["gate=skipnets"], "skipnets", "skipnet_recurrent"),
    (["gate.kind=skipnets"], "gate.kind", "skipnets", "aig"),
    (["network=resnet21"], "resnet21", "resnet20"),
    (["network.torchvision=vgg16"], "network.torchvision", "vgg16", "resnet18"),
    (["gate=random", "gate.rate=1.5"], "gate.rate", "1.5", "at most 1"),
    (["gate=random", "gate.rate=0"], "gate.rate", "above 0"),
    (["gate=aig", "gate.start=1"], "gate.start", "between 0 and 1"),
    (["gate=fixed", "gate.pattern=[1,2]"], "gate.pattern", "0 and 1"),
    (["gate=fixed", "gate.pattern=[1,0]"], "gate.pattern", "must be 9"),
    (["gate=random", "gate.calibration=quantile"], "gate.calibration", "random", "no logit"),
    (["gate=aig", "gate.calibration=quantile", "gate.quantile.credit=cost"], "gate.quantile.credit", "predicted"),
    (["objective.bounds=2"], "objective.bounds", "from 0 to 1"),
    (["objective.targets=[0.5]"], "objective.targets", "9 shares", "objective.target=block"),
    (["objective.reinforce.alpha=-1"], "objective.reinforce.alpha", "at least 0"),
]


def validated(*overrides: str):
    of = config(*overrides)
    validate(of)
    return of


@pytest.mark.parametrize("case", BAD, ids=lambda case: " ".join(case[0]))
def test_a_gate_or_network_that_cannot_be_is_one_line(case):
    overrides, *fragments = case
    with pytest.raises((UserError, HydraException, OmegaConfBaseException)) as caught:
        build_module(validated(*overrides))
    line = cli.one_line(caught.value)
    assert "\n" not in line
    for fragment in fragments:
        assert fragment in line


def test_gates_without_a_threshold_have_no_budget_to_move():
    network = build_network(chosen("random")).eval()
    made = Trained(Path("x"), chosen("random"), network, folded(network, (8, 8)), data=None)
    with pytest.raises(UserError, match="gates of kind random have no threshold"):
        made.check_budget(0.5)
