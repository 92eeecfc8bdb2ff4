"""Every gate of conf/gate through the same slot: trained, stopped, resumed, evaluated, deployed, exported."""

import copy
import re
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import torch
from conftest import ROOT, config
from cosinegate.deploy.folded import folded
from cosinegate.deploy.skipping import SkippingNetwork
from cosinegate.deploy.trained import Trained, load_trained
from cosinegate.deploy.weights import described, rebuilt, write_weights
from deployed import assert_same
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from cosinegate import cli
from cosinegate.build import build_module, build_network
from cosinegate.config import validate
from cosinegate.deploy.compile import Action, compile_gates
from cosinegate.deploy.int8 import is_of_gate, write_int8
from cosinegate.deploy.onnx_forms import BatchForm, BranchForm, require_exportable, run_onnx, session, write_onnx
from cosinegate.errors import UserError
from cosinegate.lit import LitCosineGate
from cosinegate.load import load_checkpoint
from cosinegate.record import read_metrics
from cosinegate.train import train

GATES = sorted(path.stem for path in (ROOT / "conf" / "gate").glob("*.yaml"))
LOSS = {"aig": "per_block", "random": "plain", "fixed": "plain", "drop": "plain"}
LOSS |= dict.fromkeys(("predictive", "exit"), "predictive")
LOSS |= dict.fromkeys(("skipnet", "skipnet_recurrent", "constant"), "two_sided") | {"attention": "dynconv"}
SMALL = ["data=digits", "network.depth=14", "network.width=4", "threads=1", "objective.warmup_epochs=0"]
EXITS = ["network.blocks=[1,1,4]", "gate.quantile.fit=64", "optimizer.decay_gates=false", "objective.tau_target=0.75"]
SHORT = ["trainer.max_epochs=2", *(f"trainer.limit_{stage}_batches=1" for stage in ("val", "test"))]
SHORT += ["trainer.limit_train_batches=3", "+callbacks.fault._target_=faults.Fault", "+callbacks.fault.seed=0"]

# train/loss after two epochs of three batches on the digits, in double precision; what should not move it must not
GOLDEN = {
    "aig": 2.257960,
    "attention": 2.387494,
    "cir_only": 2.347975,
    "constant": 2.295221,
    "controller_only": 2.301309,
    "cosine": 2.347972,
    "cosine_novelty": 2.244854,
    "drop": 2.258807,
    "exit": 2.070647,
    "fixed": 2.142122,
    "none": 2.129651,
    "predictive": 2.408423,
    "random": 2.286109,
    "skipnet": 2.326258,
    "skipnet_recurrent": 2.578755,
}
WHY_NOT = {  # no skipping runtime, and why
    "cosine_novelty": "look at F(x) before they decide",
    "none": "a dense network has no gates",
    "cosine": "look at F(x) before they decide",
    "cir_only": "look at F(x) before they decide",
    "drop": "open for every image",
    "constant": "open for every image",  # after six steps
}


def chosen(gate: str, *overrides: str):
    own = {"fixed": ["gate.pattern=[1,0,1,1,0,1]"], "exit": EXITS}.get(gate, [])
    return config(f"gate={gate}", f"objective={LOSS.get(gate, 'cosinegate')}", *SMALL, *own, *overrides)


def images(number: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(number, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return made.to(memory_format=torch.channels_last)


@pytest.fixture(scope="module", params=GATES)
def run(request, tmp_path_factory):
    """A short run of a gate."""
    of = chosen(request.param, *SHORT, f"runs_dir={tmp_path_factory.mktemp('gates')}")
    record = train(of)
    return SimpleNamespace(gate=request.param, record=record, folder=Path(of.run_dir))


@pytest.mark.parametrize("gate", GATES)
def test_every_gate_trains_to_its_golden_loss(gate, in_double, tmp_path):
    of = chosen(gate, *SHORT, in_double, f"runs_dir={tmp_path}")
    assert train(of).status == "finished"
    assert read_metrics(Path(of.run_dir))[2]["train/loss"] == pytest.approx(GOLDEN[gate], rel=1e-5)


def test_every_gate_ends_a_stopped_run_as_one_that_never_stopped(run, tmp_path, monkeypatch):
    stopped, steps = chosen(run.gate, *SHORT, f"runs_dir={tmp_path}"), []
    monkeypatch.setenv("FAULT", "1")
    with pytest.raises(RuntimeError, match="a fault"):
        train(stopped.copy())
    monkeypatch.delenv("FAULT")
    step = LitCosineGate.training_step
    monkeypatch.setattr(
        LitCosineGate, "training_step", lambda *what: steps.append(what[0].current_epoch) or step(*what)
    )
    train(stopped)
    assert steps == [1, 1, 1]  # the second epoch alone
    whole, resumed = (
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for folder in (run.folder, Path(stopped.run_dir))
    )
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_every_gate_learns_what_it_has_to_learn(run):
    path = run.folder / "checkpoints" / "last.ckpt"
    module, of = load_checkpoint(path)
    start = build_module(of).network.state_dict()
    learns = {name for name, p in module.network.named_parameters() if ".gate." in name and p.requires_grad}
    still = {name for name in learns if torch.equal(module.network.state_dict()[name].cpu(), start[name])}
    assert still == set(), still
    assert bool(learns) == (run.gate not in ("none", "random", "fixed", "drop"))


def test_every_gate_evaluates_alike_every_time_and_in_every_batch(run):
    network = load_checkpoint(run.folder / "checkpoints" / "last.ckpt")[0].network.eval()
    x, before = images(12), torch.get_rng_state()
    with torch.no_grad():
        first, second = network(x), network(x)
        alone = [network(x[n : n + 1]) for n in range(3)]
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(before, torch.get_rng_state())
    scores = torch.cat([one.logits for one in alone])
    if run.gate == "none":
        torch.testing.assert_close(first.logits[:3], scores, rtol=0, atol=1e-4)
        return
    assert set(first.routing.gates.unique().tolist()) <= {0.0, 1.0}
    gates = torch.cat([one.routing.gates for one in alone] + [first.routing.gates[3:]])
    assert_same(torch.cat((scores, first.logits[3:])), gates, network, first)


def deployable(run) -> Trained:
    """The run's network with gates that route, or that close a block for all, where they cannot."""
    path = run.folder / "checkpoints" / "last.ckpt"
    module, of = load_checkpoint(path)
    network = module.network.eval()
    if run.gate == "constant":
        network.blocks[1].gate.logit.data.fill_(-3.0)
    if run.gate == "controller_only":  # after six steps it hardly tells images apart: all would lie on a threshold
        for block in network.blocks:
            torch.nn.init.constant_(block.gate.controller.w1.weight, 0.3)
            torch.nn.init.constant_(block.gate.controller.w2.weight, 1.0)
    made = Trained(path, of, network, folded(network, (8, 8)), data=None)
    if all(block.gate is None or block.gate.ranks for block in network.blocks):
        made.calibrate(0.7, images(64, seed=1))
    return made


def test_every_gate_that_decides_first_skips_and_the_others_say_why_not(run, tmp_path):
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
    assert_same(runtime(x), runtime.gates, made.eager, eager)
    write_weights(made.folded, tmp_path / "weights")
    torch.testing.assert_close(rebuilt(described(made.folded), tmp_path / "weights")(x), made.folded(x))
    if run.gate == "random":
        with pytest.raises(UserError, match="cannot be exported"):
            require_exportable(made.folded, run.folder)


EXPORTED = [gate for gate in GATES if gate not in WHY_NOT and gate != "random"]


@pytest.mark.parametrize("form", [pytest.param(BatchForm, marks=pytest.mark.slow), BranchForm])
@pytest.mark.parametrize(  # what is passed on is state here, and a map, an image's own statistics or a score there
    "gate", ["skipnet_recurrent", *(pytest.param(g, marks=pytest.mark.slow) for g in EXPORTED if "recurrent" not in g)]
)
def test_every_gate_that_decides_first_is_exported(gate, form, tmp_path):
    of = chosen(gate, *SHORT, f"runs_dir={tmp_path}")
    train(of)
    made, x = deployable(SimpleNamespace(gate=gate, folder=Path(of.run_dir))), images(16, seed=2)
    with torch.no_grad():
        eager = made.eager(x)
    places = [i for i, block in enumerate(made.folded.blocks) if block.head is not None]
    write_onnx(form(made.folded), tmp_path / "x.onnx", (1, 8, 8), one_image=form is BranchForm)
    batch = 1 if form is BranchForm else 16
    scores, decided = run_onnx(session(tmp_path / "x.onnx", 1), x.contiguous().numpy(), batch)
    routes = eager.routing.gates.bool().clone()
    assert (decided is None) == (places == [])
    if places:
        routes[:, places] = torch.from_numpy(decided)
    assert_same(torch.from_numpy(scores), routes, made.eager, eager)


@pytest.mark.slow
def test_int8_leaves_the_convolutions_of_gates_as_they_are(tmp_path):
    write_onnx(BatchForm(folded(build_network(chosen("skipnet")), (8, 8))), tmp_path / "x", (1, 8, 8), one_image=False)
    write_int8(tmp_path / "x", tmp_path / "int8", images(64))
    graph = onnx.load(tmp_path / "int8").graph
    convolutions = [node for node in graph.node if node.op_type == "Conv"]
    of_gates = [node for node in convolutions if is_of_gate(node)]
    dequantised = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    assert (len(of_gates), len(convolutions)) == (
        6,
        6 + 1 + 12 + 4,
    )  # gates, the stem, F, shortcuts of two blocks twice
    assert not any(node.input[1] in dequantised for node in of_gates)
    assert all(name in dequantised for node in convolutions if node not in of_gates for name in node.input[:2])


@torch.no_grad()
def test_compiling_keeps_the_memory_that_later_gates_need():
    network, x = build_network(chosen("skipnet_recurrent")).eval(), images(32)
    y, seen = network.stem(x), network.begin(x)
    thresholds = [1e-9, 1e-9, None, 1 - 1e-9, 1e-9, 1e-9]  # one gate is left
    for block, threshold in zip(network.blocks, thresholds, strict=True):
        seen, block.gate.opening = block.look(y, seen), copy.deepcopy(block.gate.opening)
        open_at = block.gate.decide(seen).logit.sigmoid().sort().values
        apart = (open_at[1:] - open_at[:-1])[8:24].argmax() + 8  # where no two programs decide otherwise
        block.gate.opening.threshold = open_at[apart : apart + 2].mean().item() if threshold is None else threshold
        y, _ = block(y, seen)
    compiled, changes = compile_gates(network, x)
    assert changes.places(Action.kept) == [2]
    assert [block.looks for block in compiled.blocks] == [i <= 2 for i in range(6)]
    assert torch.equal(compiled(x).logits, network(x).logits)
    plain = folded(compiled, (8, 8))
    assert [block.looks for block in plain.blocks] == [i <= 2 for i in range(6)]
    torch.testing.assert_close(plain(x), network(x).logits, rtol=1e-4, atol=1e-4)


# what each gate promises


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_opens_with_what_it_is_and_where_it_comes_from(gate):
    comment = [line for line in (ROOT / "conf" / "gate" / f"{gate}.yaml").read_text().splitlines() if line[:1] == "#"]
    assert len(comment) >= 2
    assert comment[1].startswith("# From: ")


@pytest.mark.parametrize("gate", GATES)
def test_the_network_around_any_gate_begins_with_the_same_weights(gate):
    shape = ["network.blocks=[1,1,4]"] if gate == "exit" else []
    dense, gated = (build_module(chosen(name, "seed=3", *shape)).network.state_dict() for name in ("none", gate))
    assert all(torch.equal(value, gated[name]) for name, value in dense.items())


@pytest.mark.parametrize("gate", ["aig", "attention", "constant"])
def test_gates_with_a_start_begin_about_that_open(gate):
    network = build_network(chosen(gate)).train()
    opened = network(images(256)).routing.gates
    assert opened.mean().item() == pytest.approx(0.85, abs=0.05)
    assert set(opened.detach().unique().tolist()) == {0.0, 1.0}  # straight-through


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
    (["gate=aig", "gate.exits=true"], "gate.exits", "gate.signal=predicted"),
    (["gate=exit", "objective=predictive", "objective.lambda_full=1"], "gate.exits", "objective.lambda_full=0"),
    (["gate=exit", "objective=predictive", "gate.predictor.look=stage"], "gate.exits", "gate.predictor.look=block"),
    (["gate=exit", "objective=predictive", "network=resnet18"], "gate.exits", "network.torchvision=null"),
    (
        ["gate=exit", "objective=predictive", "gate.quantile.sharing=block"],
        "gate.exits",
        "gate.quantile.sharing=network",
    ),
    (["gate=exit", "objective=predictive", "objective.lambda_flops=1"], "gate.exits", "objective.lambda_flops=0"),
    (["gate=exit", "objective=predictive", "network.blocks=[2,2,1]"], "gate.exits", "no block is left"),
    (["+experiment=predictive_balanced", "gate.quantile.worth=[3,2,1,0]"], "gate.exits", "gate.quantile.worth=null"),
    (["gate=exit", "objective=predictive", "optimizer.decay_gates=false"], "objective.tau_target", "0.778"),
    (["objective.lambda_exit=-1"], "objective.lambda_exit", "at least 0"),
    (["gate.exit_classifier=own"], "gate.exit_classifier", "gate=exit"),
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
