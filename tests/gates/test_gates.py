"""Every gate of conf/gate through the same slot: trained, stopped, resumed, evaluated, deployed, exported."""

import copy
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import torch
from conftest import ROOT, THREADS, config
from deployed import assert_same
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from same_routes import assert_same_scores

from cosinegate import cli
from cosinegate.config.checks import validate
from cosinegate.deploy.card import WEIGHTS, described, read_network, sha256, write_card, write_weights
from cosinegate.deploy.fold import folded
from cosinegate.deploy.int8 import is_of_gate, write_int8
from cosinegate.deploy.onnx_forms import BatchForm, require_exportable, run_onnx, session, write_onnx
from cosinegate.deploy.runtime import Runtime
from cosinegate.deploy.source import load_source, require_something_to_deploy
from cosinegate.gates.controls.constant import ConstantGate
from cosinegate.gates.controls.random import RandomGate
from cosinegate.lit import LitCosineGate
from cosinegate.networks.flops import dense_flops, forward_flops
from cosinegate.runs.record import read_metrics
from cosinegate.terminal.errors import UserError
from cosinegate.train import train
from cosinegate.training.build import build_module, build_network
from cosinegate.training.load import load_checkpoint

GATES = sorted(path.stem for path in (ROOT / "conf" / "gate").glob("*.yaml"))
LOSS = {"aig": "per_block", "random": "plain", "skipnet": "two_sided", "constant": "two_sided"}
SMALL = ["data=digits", "network.depth=14", "network.width=4", f"threads={THREADS}", "objective.warmup_epochs=0"]
SHORT = ["trainer.max_epochs=2", *(f"trainer.limit_{stage}_batches=1" for stage in ("val", "test"))]
SHORT += ["trainer.limit_train_batches=3", "+callbacks.fault._target_=faults.Fault", "+callbacks.fault.seed=0"]

# train/loss after two epochs of three batches on the digits, in double precision; what should not move it must not
GOLDEN = {
    "aig": 2.257960,
    "cir_only": 2.347975,
    "constant": 2.295221,
    "controller_only": 2.301309,
    "cosine": 2.347972,
    "cosine_novelty": 2.244854,
    "none": 2.129651,
    "random": 2.286109,
    "skipnet": 2.326258,
}


def chosen(gate: str, *overrides: str):
    return config(f"gate={gate}", f"objective={LOSS.get(gate, 'cosinegate')}", *SMALL, *overrides)


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
    loss = read_metrics(Path(of.run_dir))[2]["train/loss"]
    assert gate in GOLDEN, f'a new gate: add "{gate}": {loss!r} to GOLDEN'
    assert loss == pytest.approx(GOLDEN[gate], rel=1e-5)


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
    assert bool(learns) == (run.gate not in ("none", "random"))


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
        assert_same_scores(scores, first.logits[:3])
        return
    assert set(first.routing.gates.unique().tolist()) <= {0.0, 1.0}
    gates = torch.cat([one.routing.gates for one in alone] + [first.routing.gates[3:]])
    assert_same(torch.cat((scores, first.logits[3:])), gates, network, first)


@torch.no_grad()
def let_route(network, x: torch.Tensor) -> None:
    """Gives every gate a threshold of its own among its logits, where they lie furthest apart: no two programs decide
    otherwise there. A constant gate closes every other block for all images.
    """
    y = network.stem(x)
    for index, block in enumerate(network.blocks):
        gate = block.gate
        if gate is not None and not isinstance(gate, RandomGate):
            gate.opening = copy.deepcopy(gate.opening)
            if isinstance(gate, ConstantGate):
                gate.logit.fill_(3.0 - 6.0 * (index % 2))
            else:
                chance = block(y.clone(), x)[1].decision.logit.sigmoid().sort().values
                middle = slice(len(x) // 4, 3 * len(x) // 4)
                apart = chance.diff()[middle].argmax() + len(x) // 4
                gate.opening.threshold = chance[apart : apart + 2].mean().item()
        y, _ = block(y, x)


def deployable(run):
    """The run's network with gates that route, or that close a block for all, where they cannot; and its config."""
    module, of = load_checkpoint(run.folder / "checkpoints" / "last.ckpt")
    network = module.network.eval()
    if run.gate == "controller_only":  # after six steps it hardly tells images apart: all would lie on a threshold
        for block in network.blocks:
            torch.nn.init.constant_(block.gate.controller.w1.weight, 0.3)
            torch.nn.init.constant_(block.gate.controller.w2.weight, 1.0)
    let_route(network, images(16, seed=2))
    return network, of


def test_a_dense_run_has_nothing_to_deploy(run):
    source = load_source(str(run.folder))
    if run.gate != "none":
        require_something_to_deploy(source)
        return
    with pytest.raises(UserError, match="a dense network has no gates"):
        require_something_to_deploy(source)


def test_every_gate_is_deployed_as_it_evaluates_and_skips_where_it_decides_first(run, tmp_path):
    if run.gate == "none":
        return
    network, of = deployable(run)
    x = images(16, seed=2)
    with torch.no_grad():
        eager = network(x)
    assert 0 < eager.routing.gates.mean() < 1
    runtime = Runtime(folded(network))
    found = runtime(x)
    assert_same(found.logits, found.routing.gates, network, eager)
    skips = forward_flops(runtime.network, x) < len(x) * dense_flops(network, (8, 8, 1))
    assert skips == network.blocks[0].gate.decides_first
    write_weights(network, tmp_path / WEIGHTS)
    write_card({"network": described(network, of, None), "files": {WEIGHTS: sha256(tmp_path / WEIGHTS)}}, tmp_path)
    _, again, _ = read_network(tmp_path)
    assert again.state_dict().keys() == network.state_dict().keys()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in network.state_dict().items())
    if run.gate == "random":
        with pytest.raises(UserError, match="cannot be exported"):
            require_exportable(network, run.folder)
    else:
        require_exportable(network, run.folder)


EXPORTED = [gate for gate in GATES if gate not in ("none", "random")]


@pytest.mark.parametrize(
    "gate", [gate if gate == "skipnet" else pytest.param(gate, marks=pytest.mark.slow) for gate in EXPORTED]
)
def test_every_gate_is_exported_with_its_routes_left_open(gate, tmp_path):
    of = chosen(gate, *SHORT, f"runs_dir={tmp_path}")
    train(of)
    network, _ = deployable(SimpleNamespace(gate=gate, folder=Path(of.run_dir)))
    x = images(16, seed=2)
    with torch.no_grad():
        eager = network(x)
    assert 0 < eager.routing.gates.mean() < 1
    write_onnx(BatchForm(folded(network)), tmp_path / "x.onnx", (1, 8, 8))
    for batch in (1, 16):
        scores, decided = run_onnx(session(tmp_path / "x.onnx", 1), x.contiguous().numpy(), batch)
        assert_same(torch.from_numpy(scores), torch.from_numpy(decided), network, eager)


@pytest.mark.slow
def test_int8_leaves_the_convolutions_of_gates_as_they_are(tmp_path):
    write_onnx(BatchForm(folded(build_network(chosen("skipnet")).eval())), tmp_path / "x", (1, 8, 8))
    write_int8(tmp_path / "x", tmp_path / "int8", images(64))
    graph = onnx.load(tmp_path / "int8").graph
    convolutions = [node for node in graph.node if node.op_type == "Conv"]
    of_gates = [node for node in convolutions if is_of_gate(node)]
    dequantised = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    assert (len(of_gates), len(convolutions)) == (6, 6 + 1 + 12 + 2)  # gates, the stem, F, shortcuts of two blocks
    assert not any(node.input[1] in dequantised for node in of_gates)
    assert all(name in dequantised for node in convolutions if node not in of_gates for name in node.input[:2])


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


@pytest.mark.parametrize("gate", ["aig", "constant"])
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
        "gate": ("first_blocks",),
        "objective": ("sided", "target"),
        "network": ("blocks", "widths", "library", "model", "options"),
    }.items():
        old[group] = {key: value for key, value in old[group].items() if key not in keys}
    old["callbacks"] = {}
    torch.save({"hyper_parameters": old, "state_dict": module.state_dict()}, tmp_path / "old.ckpt")
    again, _ = load_checkpoint(tmp_path / "old.ckpt")
    assert torch.equal(again.eval()(images(2)).logits, module.eval()(images(2)).logits)


BAD = [
    (["gate=skipnets"], "skipnets", "skipnet"),
    (["gate.kind=skipnets"], "gate.kind", "skipnets", "aig"),
    (["network=resnet21"], "resnet21", "resnet20"),
    (["network.library=keras"], "network.library", "keras", "torchvision"),
    (["gate=random", "gate.rate=1.5"], "gate.rate", "1.5", "at most 1"),
    (["gate=random", "gate.rate=0"], "gate.rate", "above 0"),
    (["gate=random", "gate.gamma.init=-1"], "gate.gamma", "no such key", "rate"),
    (["gate=none", "gate.threshold=0.4"], "gate.threshold", "no such key", "kind"),
    (["gate.rate=0.5"], "gate.rate", "no such key", "gamma"),
    (["gate=aig", "gate.start=1"], "gate.start", "between 0 and 1"),
    (["gate=aig", "gate.hidden=0"], "gate.hidden", "at least 1"),
    (["gate=constant", "gate.start=0"], "gate.start", "between 0 and 1"),
    (["gate=constant", "gate.start=null"], "gate.start", "Optional"),
    (["gate=aig", "gate.first_blocks=false", "network.depth=8"], "gate.first_blocks", "no block is left"),
    (["gate=controller_only", "gate.controller.enabled=false"], "gate.controller.enabled", "nothing else"),
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
