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
from cosinegate.deploy.folded import Leading, folded
from cosinegate.deploy.skipping import SkippingNetwork
from cosinegate.deploy.ways import compiled_form
from deployed import EXITS, FORMS, assert_same, eager, gated, images, trained

from cosinegate.build import build_network
from cosinegate.deploy.int8 import write_int8
from cosinegate.deploy.onnx_forms import BatchForm, BranchForm, quietly, run_onnx, session, write_onnx


@pytest.mark.parametrize("overrides", [EXITS, *(pytest.param(form, marks=pytest.mark.slow) for form in FORMS[:4])])
def test_onnx_takes_every_route_and_any_batch(overrides, rng, tmp_path):
    """Exported from zeros; run on images whose routes differ within a batch: nothing is frozen by tracing."""
    network = trained(*overrides, rng=rng)
    plain = folded(network)
    write_onnx(BranchForm(plain), tmp_path / "branch.onnx", (1, 8, 8), one_image=True)
    write_onnx(BatchForm(plain), tmp_path / "batch.onnx", (1, 8, 8), one_image=False)
    x = images(48, rng)
    expected = eager(network, x)
    assert len(torch.unique(expected.routing.gates, dim=0)) > 2
    array = x.contiguous().numpy()
    for name, batches in (("branch", (1,)), ("batch", (1, 5, 48))):
        model = session(tmp_path / f"{name}.onnx", 1)
        for batch in batches:
            scores, decided = map(torch.from_numpy, run_onnx(model, array, batch))
            assert_same(scores, decided, network, expected)
    operators = {node.op_type for node in _graph(tmp_path / "branch.onnx").node}
    assert "If" in operators
    assert {"NonZero", "If"} & {node.op_type for node in _graph(tmp_path / "batch.onnx").node} == {"NonZero"}


def _graph(path):
    return onnx.load(path).graph


@pytest.mark.parametrize("overrides", [("network.blocks=[1,3,1]",), pytest.param(EXITS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("turn", [-torch.inf, torch.inf])
def test_onnx_with_all_open_and_with_an_empty_selection(turn, overrides, rng, tmp_path):
    network = trained(*overrides, rng=rng)
    for block in network.blocks:
        if block.gate is not None:
            block.gate.opening.threshold.fill_(turn)
    x = images(6, rng)
    logits = eager(network, x).logits
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

    kept = [onnx.numpy_helper.to_array(weight) for weight in _graph(tmp_path / "int8.onnx").initializer]
    largest = max(np.abs(weight.astype(int)).max() for weight in kept if weight.dtype == np.int8 and weight.ndim == 4)
    assert largest <= 64  # seven bits: of eight, sums saturate on some processors
    logits, routing = eager(network, x)[:2]
    scores, decided = map(torch.from_numpy, run_onnx(session(tmp_path / "int8.onnx", 1), x.contiguous().numpy(), 128))
    assert (decided == routing.gates[:, gated(network)]).float().mean() > 0.85
    assert (scores.argmax(1) == logits.argmax(1)).float().mean() > 0.6


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
def test_what_is_compiled_is_the_network(rng):
    dense, x = folded(build_network(config("+experiment=digits", "gate=none"))), images(8, rng)
    with torch.no_grad():
        torch.testing.assert_close(compiled_form(dense, x)(x), dense(x), rtol=0, atol=1e-4)
    network = trained(*EXITS, rng=rng)
    skipping = SkippingNetwork(folded(network), leading=compiled_form(Leading(folded(network)), x))
    assert_same(skipping(x), skipping.gates, network, eager(network, x))


def test_no_compiler_is_said(monkeypatch, capsys, rng):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert compiled_form(folded(trained(rng=rng)), images(2, rng)) is None
    assert "no C++ compiler" in capsys.readouterr().out
