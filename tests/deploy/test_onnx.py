"""The ONNX forms take the trained network's routes: one image, any number of them, int8."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import config
from deployed import (
    CLOSED,
    LAST_STAGE,
    OPEN,
    ROUTES,
    assert_same,
    chosen,
    digits,
    eager,
    images,
    network_of,
    settled,
    with_exits,
)
from same_routes import assert_same_scores, near_exit

from cosinegate.deploy.engines import torch_compiled
from cosinegate.deploy.fold import folded
from cosinegate.deploy.int8 import is_of_gate, write_int8
from cosinegate.deploy.onnx_forms import (
    BatchForm,
    OneImageForm,
    quietly,
    require_exportable,
    run_onnx,
    session,
    write_onnx,
)
from cosinegate.networks.compile import compile_gates
from cosinegate.terminal.errors import UserError

SHAPE = (1, 8, 8)


@pytest.fixture(scope="module")
def exits(tmp_path_factory):
    """A network with exits and its two forms, exported from zeros."""
    folder, network = tmp_path_factory.mktemp("onnx"), with_exits()
    for form, name in ((OneImageForm, "one"), (BatchForm, "batch")):
        write_onnx(form(folded(network)), folder / f"{name}.onnx", SHAPE)
    return network, folder


def operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


def test_both_forms_take_every_exit_on_all_digits(exits):
    """Run on images whose routes differ within a batch: nothing is frozen by tracing."""
    network, folder = exits
    x = digits("test")
    expected, near = eager(network, x), near_exit(network, x)
    assert len(expected.routing.gates.unique(dim=0)) == 3
    for name, batches in (("one", (1,)), ("batch", (1, 50, len(x)))):
        model = session(folder / f"{name}.onnx", 1)
        for batch in batches:
            scores, route = map(torch.from_numpy, run_onnx(model, x.contiguous().numpy(), batch))
            assert_same(scores, route, network, expected, near=near)
    assert "If" in operators(folder / "one.onnx")
    assert {"NonZero", "If"} & set(operators(folder / "batch.onnx")) == {"NonZero"}


@pytest.mark.parametrize("threshold", [-torch.inf, torch.inf])
def test_the_batch_form_with_no_exit_taken_and_with_nobody_left(threshold, exits, tmp_path):
    _, folder = exits
    model = onnx.load(folder / "batch.onnx")
    (kept,) = [weight for weight in model.graph.initializer if weight.name.endswith("threshold")]
    kept.CopyFrom(onnx.numpy_helper.from_array(np.array(threshold, np.float32), kept.name))
    onnx.save(model, tmp_path / "moved.onnx")
    early, x = with_exits(), digits("test")[:40]
    early.threshold.fill_(threshold)
    scores, route = run_onnx(session(tmp_path / "moved.onnx", 1), x.contiguous().numpy(), 8)
    assert (route == ([True] * 5 if threshold < 0 else [True] * 3 + [False] * 2)).all()
    assert_same_scores(torch.from_numpy(scores), eager(early, x).logits)


def test_only_the_taken_branch_runs(exits, tmp_path):
    """onnxruntime's own profile: the convolutions behind an exit that is taken do not appear."""
    network, folder = exits
    x = digits("test")[:60]
    computed, near = eager(network, x).routing.gates.sum(1), near_exit(network, x).any(1)
    convolutions = {}
    for number in (3, 5):
        image = x[(computed == number) & ~near][:1].contiguous().numpy()
        model = session(folder / "one.onnx", 1, profile=tmp_path / "profile")
        model.run(None, {"images": image})
        events = json.loads(Path(model.end_profiling()).read_text())
        kernels = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("kernel_time")]
        convolutions[number] = sum(event["args"].get("op_name") in ("Conv", "FusedConv") for event in kernels)
    assert convolutions[5] - convolutions[3] == 2 * 2  # two blocks of two


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    """A network of which some gates are left, its exported form, and that in int8."""
    network = settled(network_of(chosen("aig")), [CLOSED, ROUTES, OPEN, OPEN, OPEN, ROUTES])
    folder = tmp_path_factory.mktemp("gated")
    compiled, _ = compile_gates(network, images())
    write_onnx(BatchForm(folded(compiled)), folder / "batch.onnx", SHAPE)
    write_int8(folder / "batch.onnx", folder / "int8.onnx", digits("train")[:128])
    return network, folder


def test_a_gate_that_is_left_routes_in_any_batch(gated):
    network, folder = gated
    x = digits("test")
    expected = eager(network, x)
    assert len(expected.routing.gates.unique(dim=0)) > 2
    for batch in (1, len(x)):
        found = run_onnx(session(folder / "batch.onnx", 1), x.contiguous().numpy(), batch)
        scores, route = map(torch.from_numpy, found)
        assert_same(scores, route, network, expected)


def test_int8_runs_and_keeps_most_decisions(gated):
    network, folder = gated
    graph = onnx.load(folder / "int8.onnx").graph
    names = [node.op_type for node in graph.node]
    assert names.count("QuantizeLinear") >= names.count("Conv") > 0
    kept = [onnx.numpy_helper.to_array(weight) for weight in graph.initializer]
    largest = max(np.abs(weight.astype(int)).max() for weight in kept if weight.dtype == np.int8 and weight.ndim == 4)
    assert largest <= 64  # seven bits: of eight, sums saturate on some processors
    assert not [node for node in graph.node if node.op_type == "Conv" and is_of_gate(node) and "quant" in node.input[1]]
    x = digits("test")
    expected = eager(network, x)
    scores, route = map(torch.from_numpy, run_onnx(session(folder / "int8.onnx", 1), x.contiguous().numpy(), 64))
    assert (route == expected.routing.gates.bool()).float().mean() > 0.85
    assert (scores.argmax(1) == expected.logits.argmax(1)).float().mean() > 0.6


def test_a_network_of_one_route_has_scores_alone(tmp_path):
    network = network_of(config(*LAST_STAGE, "network.shortcut=projection"))
    write_onnx(BatchForm(folded(network)), tmp_path / "dense.onnx", SHAPE)
    assert not {"If", "NonZero", "Gather", "Where"} & set(operators(tmp_path / "dense.onnx"))
    x = digits("test")
    scores, route = run_onnx(session(tmp_path / "dense.onnx", 1), x.contiguous().numpy(), 64)
    assert route is None
    np.testing.assert_allclose(scores, eager(network, x).logits.numpy(), rtol=1e-4, atol=1e-4)


def test_random_gates_cannot_be_exported(tmp_path):
    with pytest.raises(UserError, match="dynamic=round settles them"):
        require_exportable(network_of(chosen("random")), tmp_path)
    require_exportable(network_of(chosen("aig")), tmp_path)


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


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.slow
def test_what_is_compiled_is_the_network():
    network, x = network_of(config(*LAST_STAGE)), digits("test")[:8]
    with torch.no_grad():
        (scores,) = torch_compiled(BatchForm(folded(network)).eval(), x)(x)
    torch.testing.assert_close(scores, eager(network, x).logits, rtol=1e-4, atol=1e-4)


def test_no_compiler_is_said(monkeypatch, capsys):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert torch_compiled(BatchForm(network_of(config(*LAST_STAGE))), images(2)) is None
    assert "no C++ compiler" in capsys.readouterr().out
