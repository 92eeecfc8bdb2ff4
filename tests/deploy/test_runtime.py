"""The runtime on torch computes what the network does, with fused convolutions and without."""

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
    cosine,
    digits,
    eager,
    images,
    network_of,
    settled,
    with_exits,
)
from same_routes import near_exit

from cosinegate.deploy import runtime as on_torch
from cosinegate.deploy.exits import EarlyExitNetwork
from cosinegate.deploy.fold import folded
from cosinegate.deploy.kernels import torch_kind
from cosinegate.deploy.runtime import Runtime
from cosinegate.networks.compile import compile_gates

SHAPES = [(), ("network.shortcut=projection",), ("network.post_activation=false",), ("network.widths=[4,6,9]",)]


@pytest.mark.parametrize("fuses", [True, False])
@pytest.mark.parametrize("overrides", SHAPES)
def test_a_network_of_one_route_has_the_scores_of_the_trained_one(overrides, fuses, monkeypatch):
    monkeypatch.setattr(on_torch, "FUSES", fuses and on_torch.FUSES)
    network, x = cosine([OPEN, CLOSED, OPEN, OPEN, CLOSED, OPEN], *overrides), digits("test")
    runtime = Runtime(folded(compile_gates(network, images())[0]))
    for number in (len(x), 17, 1):
        output = runtime(x[:number])
        assert output.routing is None
        torch.testing.assert_close(output.logits, eager(network, x[:number]).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gate", ["cosine", "aig"])
def test_a_gate_that_is_left_decides_as_the_network_does(gate):
    network = settled(network_of(chosen(gate)), [CLOSED, ROUTES, OPEN, OPEN, OPEN, ROUTES])
    runtime, x = Runtime(folded(compile_gates(network, images())[0])), digits("test")
    expected, output = eager(network, x), runtime(x)
    assert len(expected.routing.gates.unique(dim=0)) > 2
    assert_same(output.logits, output.routing.gates, network, expected)


@pytest.mark.parametrize("fuses", [True, False])
def test_exits_are_taken_as_the_network_takes_them(fuses, monkeypatch):
    monkeypatch.setattr(on_torch, "FUSES", fuses and on_torch.FUSES)
    network, x = with_exits(), digits("test")
    runtime, expected = Runtime(folded(network)), eager(network, x)
    assert len(expected.routing.gates.unique(dim=0)) == 3
    near = near_exit(network, x)
    for number in (len(x), 17, 1):
        output = runtime(x[:number])
        part = type(expected)(expected.logits[:number], type(expected.routing)(*(f[:number] for f in expected.routing)))
        assert_same(output.logits, output.routing.gates, network, part, near=near[:number])


def test_a_block_runs_for_the_images_that_have_not_exited_alone(monkeypatch):
    network, x = with_exits(), digits("test")
    runtime, seen = Runtime(folded(network)), {}
    for index, block in enumerate(runtime.network.blocks):
        block.register_forward_pre_hook(lambda module, inputs, index=index: seen.update({index: len(inputs[0])}))
    route = runtime(x).routing.gates
    assert [seen[index] for index in range(5)] == route.sum(0).tolist()
    assert len(set(seen.values())) == 3


def test_preparing_meets_every_batch_size_behind_an_exit_and_changes_nothing(monkeypatch):
    monkeypatch.setattr(on_torch, "PREPARED", 9)
    network, x = with_exits(), digits("test")
    runtime, met = Runtime(folded(network)), {}
    scores, image = runtime(x).logits, x[:1].clone()
    for index, block in enumerate(runtime.network.blocks):
        block.register_forward_pre_hook(
            lambda module, inputs, index=index: met.setdefault(index, []).append(len(inputs[0]))
        )
    runtime.prepare(image)
    assert {index: sorted(sizes) for index, sizes in met.items()} == {
        index: [1] if index <= 2 else list(range(1, 10)) for index in range(5)
    }
    assert torch.equal(image, x[:1])
    assert torch.equal(runtime(x).logits, scores)
    Runtime(folded(network.network)).prepare(image)  # nothing to prepare


def test_the_runtime_leaves_the_images_and_the_network_as_they_were():
    for network in (with_exits(), network_of(config(*LAST_STAGE))):
        x, plain = digits("test")[:20].clone(), folded(network)
        before, weights = x.clone(), {name: tensor.clone() for name, tensor in plain.state_dict().items()}
        runtime = Runtime(plain)
        first = runtime(x)
        assert torch.equal(first.logits, runtime(x).logits)
        assert torch.equal(x, before)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in plain.state_dict().items())
        assert torch.equal(runtime(x.contiguous()).logits, first.logits)  # another layout


def test_no_image_gives_no_scores():
    early = with_exits()
    assert isinstance(early, EarlyExitNetwork)
    output = eager(early, images(0))
    assert output.logits.shape == (0, 10)
    assert output.routing.gates.shape == (0, 5)


def test_the_profiler_knows_an_operator_by_its_name():
    kinds = {
        "convolutions": ["mkldnn::_convolution_pointwise", "mkldnn::_convolution_pointwise_.binary", "aten::conv2d"],
        "matrix products": ["aten::linear", "aten::addmm"],
        "statistics": ["cosinegate::statistics", "aten::amax", "aten::sum", "aten::mean"],
        "selecting": ["aten::index_copy_", "aten::index_select", "aten::nonzero"],
        "other": ["aten::cat", "aten::relu_"],
    }
    assert {kind: [name for name in names if torch_kind(name) == kind] for kind, names in kinds.items()} == kinds
