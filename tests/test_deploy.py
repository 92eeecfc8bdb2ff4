"""What is deployed is what was trained: the skipping runtime, ONNX, int8, safetensors."""

import functools
import hashlib
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import config
from safetensors.torch import load_file
from test_predictive import masked, small

from cosinegate.calibration import calibrate
from cosinegate.data.module import ImageData
from cosinegate.deploy.folded import folded, without_gates
from cosinegate.deploy.int8 import write_int8
from cosinegate.deploy.onnx_forms import BatchForm, BranchForm, quietly, run_onnx, session, write_onnx
from cosinegate.deploy.skipping import SkippingNetwork
from cosinegate.deploy.specialise import routed_otherwise, settled, specialise
from cosinegate.deploy.ways import compiled_form
from cosinegate.deploy.weights import described, read_exported, rebuilt, write_weights
from cosinegate.errors import UserError

EXITS = ("gate=exit", "network.blocks=[1,1,4]", "optimizer.decay_gates=false")
FORMS = [
    (),
    ("gate.first_blocks=true",),
    ("gate.predictor.look=stage", "network.depth=20"),
    ("network.shortcut=projection", "gate.first_blocks=true", "gate.predictor.look=stage"),
    ("network.post_activation=false", "gate.first_blocks=true"),
    (
        "gate.controller.enabled=false",
        "gate.calibration=none",
        "gate.threshold=0.5",
        "gate.gamma.init=-2.5",
        "gate.polarity=paper",
    ),
    EXITS,
]


@functools.cache
def digits(split: str) -> torch.Tensor:
    data = ImageData(config("+experiment=digits").data, seed=0)
    data.setup()
    return data.whole_images(split)[0]


def images(number: int, rng: torch.Generator) -> torch.Tensor:
    """Real ones, drawn from the test set."""
    drawn = digits("test")[torch.randint(len(digits("test")), (number,), generator=rng)]
    return drawn.contiguous(memory_format=torch.channels_last)


def trained(*overrides: str, rng: torch.Generator):
    """A network with BatchNorm statistics that are not those it was born with, and gates that route."""
    network = small(*overrides)
    network.train()
    for _ in range(3):
        network(images(64, rng) * 1.1 + 0.1)
    network.eval()
    if "gate.calibration=none" not in overrides:
        shares = [0.8, 0.5, 0.3] if "gate=exit" in overrides else [0.5] * len(gated(network))
        calibrate(network, shares, images(64, rng))
    else:
        with torch.no_grad():
            logits = network(images(64, rng)).routing.logits
        for place in gated(network):
            network.blocks[place].gate.opening.threshold = logits[:, place].median().sigmoid().item()
    return network


def eager(network, x):
    with torch.no_grad():
        output = network(x)
    return output.logits, output.routing.gates.bool()


def gated(network) -> list[int]:
    return [i for i, block in enumerate(network.blocks) if block.gate is not None]


@pytest.mark.parametrize("overrides", FORMS)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_runtime_decides_and_computes_what_the_network_does(overrides, workers, rng):
    network = trained(*overrides, rng=rng)
    x = images(100, rng)
    logits, gates = eager(network, x)
    assert 0 < gates[:, gated(network)].float().mean() < 1
    assert len(torch.unique(gates, dim=0)) > 1
    runtime = SkippingNetwork(folded(network), micro_batch=16, workers=workers)
    for number in (100, 17, 16, 1, 0):
        scores = runtime(x[:number])
        assert torch.equal(runtime.gates, gates[:number])
        torch.testing.assert_close(scores, logits[:number], rtol=0, atol=1e-4)
        assert torch.equal(scores.argmax(1), logits[:number].argmax(1))
    with torch.no_grad():
        torch.testing.assert_close(folded(network)(x), logits, rtol=0, atol=1e-4)


def test_the_runtime_is_the_masked_network_on_the_whole_test_set(rng):
    network, x = trained("gate.first_blocks=true", rng=rng), digits("test")
    with torch.no_grad():
        scores, routes = masked(network, x)  # an image at a time, F for all, times 0 or 1
    runtime = SkippingNetwork(folded(network))
    assert len(x) == 359
    torch.testing.assert_close(runtime(x), scores, rtol=0, atol=1e-4)
    assert torch.equal(runtime.gates, routes.bool())
    assert torch.equal(runtime(x).argmax(1), scores.argmax(1))
    assert len(routes.unique(dim=0)) > 10


def test_the_runtime_leaves_the_images_and_the_network_as_they_were(rng):
    network = trained(rng=rng)
    x = images(20, rng)
    before, weights = x.clone(), {name: tensor.clone() for name, tensor in network.state_dict().items()}
    runtime = SkippingNetwork(folded(network))
    first = runtime(x)
    assert torch.equal(first, runtime(x))
    assert torch.equal(x, before)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in network.state_dict().items())
    torch.testing.assert_close(runtime(x.contiguous()), first)  # another layout


@pytest.mark.parametrize("form", [lambda network: network, SkippingNetwork], ids=["folded", "skipping"])
@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 3, 8, 8), (1, 1, 8)])
def test_images_of_another_shape_are_one_line(shape, form, rng):
    runtime = form(folded(trained(rng=rng)))
    with pytest.raises(UserError, match="must be \\(batch, 1, height, width\\)"):
        runtime(torch.zeros(shape))


@pytest.mark.parametrize("form", [lambda network: network, SkippingNetwork], ids=["folded", "skipping"])
def test_images_of_another_size_or_type_are_one_line(form, rng):
    runtime = form(folded(trained(rng=rng), size=(8, 8)))
    with pytest.raises(UserError, match="must be \\(batch, 1, 8, 8\\)"):
        runtime(torch.zeros(2, 1, 9, 8))
    with pytest.raises(UserError, match="must be normalised"):
        runtime(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))


def test_f_runs_for_open_samples_only(rng, monkeypatch):
    network = trained(rng=rng)
    runtime = SkippingNetwork(folded(network), micro_batch=32)
    seen = {}
    for place, block in enumerate(runtime.blocks):
        plain = block.full
        monkeypatch.setattr(
            block, "full", lambda x, place=place, plain=plain: (seen.setdefault(place, []).append(len(x)), plain(x))[1]
        )
    runtime(images(32, rng))
    for place in range(len(runtime.blocks)):
        assert sum(seen.get(place, [])) == runtime.gates[:, place].sum()


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.slow
def test_the_compiled_dense_network_is_the_dense_network(rng):
    dense, x = without_gates(folded(trained(rng=rng))), images(8, rng)
    with torch.no_grad():
        torch.testing.assert_close(compiled_form(dense, x)["compiled"](x), dense(x), rtol=0, atol=1e-4)


def test_gates_that_need_f_and_dense_networks_cannot_skip(rng):
    with pytest.raises(UserError, match="gate=predictive"):
        folded(small_exact())
    assert all(block.head is None for block in without_gates(folded(trained(rng=rng))).blocks)


def small_exact():
    from cosinegate.build import build_network

    return build_network(config("+experiment=digits"))


@pytest.mark.parametrize(
    "overrides", [FORMS[0], FORMS[3], *(pytest.param(form, marks=pytest.mark.slow) for form in (*FORMS[1:3], EXITS))]
)
def test_onnx_takes_every_route_and_any_batch(overrides, rng, tmp_path):
    """Exported from zeros; run on images whose routes differ within a batch: nothing is frozen by tracing."""
    network = trained(*overrides, rng=rng)
    plain = folded(network)
    write_onnx(BranchForm(plain), tmp_path / "branch.onnx", (1, 8, 8), one_image=True)
    write_onnx(BatchForm(plain), tmp_path / "batch.onnx", (1, 8, 8), one_image=False)
    x = images(48, rng)
    logits, gates = eager(network, x)
    routes = gates[:, gated(network)]
    assert len(torch.unique(routes, dim=0)) > 2
    array = x.contiguous().numpy()
    for name, batches in (("branch", (1,)), ("batch", (1, 5, 48))):
        model = session(tmp_path / f"{name}.onnx", 1)
        for batch in batches:
            scores, decided = run_onnx(model, array, batch)
            assert np.array_equal(decided, routes.numpy())
            np.testing.assert_allclose(scores, logits.numpy(), rtol=0, atol=1e-4)
    operators = {node.op_type for node in _graph(tmp_path / "branch.onnx").node}
    assert "If" in operators
    assert {"NonZero", "If"} & {node.op_type for node in _graph(tmp_path / "batch.onnx").node} == {"NonZero"}


def _graph(path):
    import onnx

    return onnx.load(path).graph


@pytest.mark.parametrize("overrides", [(), pytest.param(EXITS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("turn", [-torch.inf, torch.inf])
def test_onnx_with_all_open_and_with_an_empty_selection(turn, overrides, rng, tmp_path):
    network = trained(*overrides, rng=rng)
    for block in network.blocks:
        if block.gate is not None:
            block.gate.opening.threshold.fill_(turn)
    x = images(6, rng)
    logits, _ = eager(network, x)
    for form, name, batch in ((BranchForm, "branch", 1), (BatchForm, "batch", 6)):
        write_onnx(form(folded(network)), tmp_path / f"{name}.onnx", (1, 8, 8), one_image=batch == 1)
        scores, decided = run_onnx(session(tmp_path / f"{name}.onnx", 1), x.contiguous().numpy(), batch)
        assert (decided == (turn < 0)).all()
        np.testing.assert_allclose(scores, logits.numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("overrides", [("gate.predictor.look=stage",), pytest.param(EXITS, marks=pytest.mark.slow)])
def test_only_the_taken_branch_runs(overrides, rng, tmp_path):
    """onnxruntime's own profile: a closed gate's convolutions do not appear."""
    import onnxruntime

    network = trained(*overrides, rng=rng)
    counts = {}
    for turn in (-torch.inf, torch.inf):
        for block in network.blocks:
            if block.gate is not None:
                block.gate.opening.threshold.fill_(turn)
        write_onnx(BranchForm(folded(network)), tmp_path / "branch.onnx", (1, 8, 8), one_image=True)
        options = onnxruntime.SessionOptions()
        options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
        model = onnxruntime.InferenceSession(str(tmp_path / "branch.onnx"), options)
        model.run(None, {"images": images(1, rng).contiguous().numpy()})
        events = json.loads(Path(model.end_profiling()).read_text())
        kernels = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("kernel_time")]
        counts[turn] = sum(e["args"].get("op_name") in ("Conv", "FusedConv") for e in kernels)
    assert counts[-torch.inf] - counts[torch.inf] == 2 * len(gated(network))


def test_int8_runs_and_keeps_most_decisions(rng, tmp_path):
    network = trained(rng=rng)
    write_onnx(BatchForm(folded(network)), tmp_path / "batch.onnx", (1, 8, 8), one_image=False)
    x = images(128, rng) * torch.linspace(0.3, 3, 128)[:, None, None, None]  # images that differ as real ones do
    write_int8(tmp_path / "batch.onnx", tmp_path / "int8.onnx", x)
    operators = [node.op_type for node in _graph(tmp_path / "int8.onnx").node]
    assert operators.count("QuantizeLinear") >= operators.count("Conv") > 0
    import onnx

    kept = [onnx.numpy_helper.to_array(weight) for weight in _graph(tmp_path / "int8.onnx").initializer]
    largest = max(np.abs(weight.astype(int)).max() for weight in kept if weight.dtype == np.int8 and weight.ndim == 4)
    assert largest <= 64  # seven bits: of eight, sums saturate on some processors
    logits, gates = eager(network, x)
    scores, decided = run_onnx(session(tmp_path / "int8.onnx", 1), x.contiguous().numpy(), 128)
    assert (torch.from_numpy(decided) == gates[:, gated(network)]).float().mean() > 0.85
    assert (torch.from_numpy(scores).argmax(1) == logits.argmax(1)).float().mean() > 0.6


@pytest.mark.parametrize("overrides", FORMS)
def test_weights_and_card_rebuild_the_network(overrides, rng, tmp_path):
    network = folded(trained(*overrides, rng=rng))
    write_weights(network, tmp_path / "weights.safetensors")
    digest = hashlib.sha256((tmp_path / "weights.safetensors").read_bytes()).hexdigest()
    card = {"network": described(network), "files": {"weights.safetensors": digest}}
    (tmp_path / "card.json").write_text(json.dumps(card))
    again = read_exported(tmp_path)
    x = images(9, rng)
    assert torch.equal(SkippingNetwork(again)(x), SkippingNetwork(network)(x))
    bad = tmp_path / "cut.safetensors"
    bad.write_bytes((tmp_path / "weights.safetensors").read_bytes()[:-50])
    with pytest.raises(UserError, match="not the weights of its card"):
        rebuilt(described(network), bad)
    with pytest.raises(UserError, match="not the weights of its card"):
        rebuilt(described(network) | {"width": 3}, tmp_path / "weights.safetensors")
    with pytest.raises(UserError, match="this program reads"):
        rebuilt(described(network) | {"format": 99}, tmp_path / "weights.safetensors")
    if overrides == EXITS:
        older = json.loads(json.dumps(described(network)).replace('"exit"', '"scored"'))
        with pytest.raises(UserError, match="another version: scored is none of"):
            rebuilt(older | {"format": 3}, tmp_path / "weights.safetensors")
    (tmp_path / "card.json").write_text(json.dumps(card | {"files": {"weights.safetensors": "another"}}))
    with pytest.raises(UserError, match="missing or damaged"):
        read_exported(str(tmp_path))
    (tmp_path / "card.json").write_text("{")
    with pytest.raises(UserError, match="not an export's card"):
        read_exported(tmp_path)


def test_specialising_removes_what_never_changes_and_says_what_that_costs(rng, tmp_path):
    network = trained("network.depth=20", "gate.predictor.look=stage", rng=rng)
    turns = {1: torch.inf, 2: -torch.inf, 7: -torch.inf, 8: -torch.inf}
    for place, turn in turns.items():
        network.blocks[place].gate.opening.threshold.fill_(turn)
    x = images(60, rng)
    logits, gates = eager(network, x)
    made, changes = specialise(folded(network), x, tolerance=0.0)
    assert [(change["block"], change["done"]) for change in changes] == [
        (1, "removed"),
        (2, "always computed"),
        (7, "always computed"),
        (8, "always computed"),
    ]
    assert all(change["otherwise"] == 0 for change in changes)
    alone, of_thresholds = settled(folded(network))  # infinite ones need no images to be known
    assert of_thresholds == changes
    assert [block.head is None for block in alone.blocks] == [block.head is None for block in made.blocks]
    runtime = SkippingNetwork(made)
    torch.testing.assert_close(runtime(x), logits, rtol=0, atol=1e-4)
    assert torch.equal(runtime.gates, gates)
    assert [block.looks for block in made.blocks] == [i == 4 for i in range(9)]
    write_onnx(BranchForm(made), tmp_path / "branch.onnx", (1, 8, 8), one_image=True)
    scores, decided = run_onnx(session(tmp_path / "branch.onnx", 1), x.contiguous().numpy(), 1)
    np.testing.assert_allclose(scores, logits.numpy(), rtol=0, atol=1e-4)
    assert np.array_equal(decided, gates[:, [4, 5]].numpy())
    write_weights(made, tmp_path / "weights")
    assert not [name for name in load_file(tmp_path / "weights") if name.startswith("blocks.1.")]
    torch.testing.assert_close(SkippingNetwork(rebuilt(described(made), tmp_path / "weights"))(x), runtime(x))
    with pytest.raises(UserError, match="not the weights of its card"):
        rebuilt(described(folded(network)), tmp_path / "weights")
    least = gates[:, [4, 5]].float().mean(0)
    tolerant, more = specialise(folded(network), x, tolerance=float(max(least.min(), 0.02)))
    runtime = SkippingNetwork(tolerant)
    runtime(x)
    assert len(more) >= len(changes)
    assert routed_otherwise(gates, runtime.gates) <= sum(change["otherwise"] for change in more) + 1e-6


def test_a_quiet_export_leaves_logging_as_it_was(capsys, caplog):
    def export_that_fails() -> None:
        with quietly():
            print("a step")
            logging.getLogger("torch.onnx").warning("a step")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        export_that_fails()
    assert capsys.readouterr().out == caplog.text == ""
    logging.getLogger("torch.onnx").warning("later")
    assert "later" in caplog.text


def test_no_compiler_is_said(monkeypatch, capsys, rng):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert compiled_form(folded(trained(rng=rng)), images(2, rng)) == {}
    assert "no C++ compiler" in capsys.readouterr().out
