"""Compiling: what gates have settled goes, what is left computes the same, and every change is reported."""

import copy

import pytest
import torch
from conftest import ROOT, config
from deployed import (
    CLOSED,
    FEW,
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
    write,
)
from torch import nn

from cosinegate.deploy.card import actions_of, read_network
from cosinegate.deploy.fold import folded
from cosinegate.deploy.runtime import Runtime
from cosinegate.gates import CosineGate
from cosinegate.networks.compile import Action, compile_gates
from cosinegate.networks.flops import dense_flops, forward_flops
from cosinegate.terminal.errors import UserError

GATED = sorted(path.stem for path in (ROOT / "conf" / "gate").glob("*.yaml") if path.stem != "none")


@pytest.mark.parametrize("gate", GATED)
def test_every_gate_is_compiled_to_the_same_answers(gate, tmp_path):
    """With equal bits; folded, on torch's runtime, and read back from weights and card."""
    pattern = [CLOSED, OPEN, ROUTES, OPEN, CLOSED, ROUTES]
    network, x = settled(network_of(of := chosen(gate)), pattern), images()
    before, state = {name: tensor.clone() for name, tensor in network.state_dict().items()}, torch.get_rng_state()
    compiled, changes = compile_gates(network, x)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(network.state_dict()[name], tensor) for name, tensor in before.items())
    assert set(compiled.state_dict()) <= set(before)
    trained, after = eager(network, x), eager(compiled, x)
    assert torch.equal(after.logits, trained.logits)
    assert changes.blocks_with(Action.removed) == [0, 4]
    routes = [] if gate == "constant" else [2, 5]
    assert changes.blocks_with(Action.kept) == routes
    assert changes.blocks_with(Action.always) == [index for index in (1, 2, 3, 5) if index not in routes]
    assert (changes.computed, changes.dynamic) == (4, len(routes))
    assert (after.routing is None) == (routes == [])
    if routes:
        assert torch.equal(after.routing.gates, trained.routing.gates)
        assert 0.2 < trained.routing.gates[:, 2].mean() < 0.8
        assert all(changes.blocks[index].needs_f == isinstance(network.blocks[2].gate, CosineGate) for index in routes)
    for program in (folded(compiled), Runtime(folded(compiled))):
        with torch.no_grad():
            output = program(x)
        taken = trained.routing.gates if output.routing is None else output.routing.gates
        assert_same(output.logits, taken, network, trained)
    write(compiled, of, actions_of(changes), tmp_path)
    _, again, _ = read_network(tmp_path)
    for index, block in enumerate(again.blocks):  # what a test moved is no part of a config
        if block.gate is not None:
            block.gate.opening = network.blocks[index].gate.opening
            vars(block.gate).update({k: v for k, v in vars(network.blocks[index].gate).items() if k == "rate"})
    assert torch.equal(eager(again, x).logits, eager(compiled.to(memory_format=torch.channels_last), x).logits)


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
    network, x = cosine(pattern, *overrides).double(), images()
    compiled, changes = compile_gates(network, x)
    for precision in (torch.float64, torch.float32):
        assert torch.equal(eager(network.to(precision), x).logits, eager(compiled.to(precision), x).logits)
    assert changes.blocks_with(Action.removed) == [index for index, kind in enumerate(pattern) if kind == CLOSED]
    assert changes.dynamic == 0
    assert eager(compiled, x).routing is None
    assert not [name for name in compiled.state_dict() if ".gate." in name]
    for index, block in enumerate(compiled.blocks):
        changes_shape = not isinstance(network.blocks[index].shortcut, nn.Identity)
        assert isinstance(block.shortcut, nn.Identity) != changes_shape
        assert (block.residual is None) == (pattern[index] == CLOSED)
    expected = eager(network, x).logits
    for program in (folded(compiled), Runtime(folded(compiled))):
        with torch.no_grad():
            torch.testing.assert_close(program(x).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_settled_network_is_one_graph_without_a_branch():
    compiled, _ = compile_gates(cosine([CLOSED, OPEN] * 3), images())
    operators = {str(node.target) for node in torch.export.export(folded(compiled), (images(),)).graph.nodes}
    assert [name for name in operators if "conv" in name]
    assert not [name for name in operators if "cond" in name or "where" in name or "nonzero" in name]


def test_torchvisions_network_is_compiled_too():
    network = network_of(config("data=digits", "network=torchvision", "network.model=resnet18", "gate=cosine"))
    pattern = [OPEN, CLOSED, CLOSED, OPEN, OPEN, CLOSED, CLOSED, OPEN]  # two that change the shape among those closed
    compiled, changes = compile_gates(settled(network, pattern), images())
    assert changes.blocks_with(Action.removed) == [1, 2, 5, 6]
    assert torch.equal(eager(network, images(50)).logits, eager(compiled, images(50)).logits)
    with torch.no_grad():
        found, expected = Runtime(folded(compiled))(images(50)).logits, eager(network, images(50)).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_closed_block_keeps_its_relu_where_the_input_may_be_negative():
    network = cosine([CLOSED] * 6)
    network.stem = network.stem[:2]  # without its ReLU
    compiled, _ = compile_gates(network, images())
    assert torch.equal(eager(network, images()).logits, eager(compiled, images()).logits)
    assert isinstance(compiled.blocks[0].activation, nn.ReLU)
    assert isinstance(compiled.blocks[1].activation, nn.Identity)  # of what is not negative any more


def test_compiled_flops_are_those_of_what_is_left():
    network = cosine([OPEN, CLOSED, OPEN, CLOSED, OPEN, OPEN])
    compiled, _ = compile_gates(network, images())
    dense = dense_flops(network, (8, 8, 1))
    assert forward_flops(network, images(1)) > dense
    smaller = copy.deepcopy(network)
    for index in (1, 3):
        smaller.blocks[index].residual = None
    assert forward_flops(compiled, images(1)) == dense_flops(smaller, (8, 8, 1)) < dense


def test_tolerance_counts_a_few_images_as_none_and_reports_how_many():
    network = cosine([OPEN, ROUTES, OPEN, ROUTES, OPEN, OPEN])
    fraction = eager(network, images()).routing.gates.double().mean(0)
    kept = compile_gates(network, images())[1]
    assert kept.blocks_with(Action.kept) == [1, 3]
    assert all(kept.blocks[index].needs_f for index in (1, 3))
    assert "so nothing is saved there" in str(kept.blocks[1])
    least = min(fraction[1], 1 - fraction[1]).item()
    for tolerance in (least, least - 1e-3):
        _, changes = compile_gates(network, images(), tolerance=tolerance)
        assert (1 in changes.blocks_with(Action.kept)) == (tolerance < least)
    _, changes = compile_gates(network, images(), tolerance=least)
    assert changes.blocks[1].other_route == pytest.approx(least, abs=1e-6)
    assert changes.blocks[1].open_fraction == pytest.approx(fraction[1].item())
    for tolerance in (-0.1, 0.5, float("nan")):
        with pytest.raises(UserError, match="tolerance"):
            compile_gates(network, images(), tolerance=tolerance)


def test_rounding_settles_every_block_as_most_images_have_it():
    network = cosine([CLOSED, ROUTES, OPEN, ROUTES, OPEN, ROUTES])
    fraction = eager(network, images()).routing.gates.mean(0)
    compiled, changes = compile_gates(network, images(), "round")
    assert changes.dynamic == 0
    assert changes.blocks_with(Action.removed) == [index for index in range(6) if fraction[index] < 0.5]
    for change in changes.blocks:
        least = min(fraction[change.block].item(), 1 - fraction[change.block].item())
        assert change.other_route == pytest.approx(least)
    assert set(compiled.state_dict()) <= set(network.state_dict())
    assert eager(compiled, images()).routing is None


def test_predicting_routes_before_f_and_reports_its_agreement(tmp_path):
    of = chosen("cosine")
    network = settled(network_of(of), [CLOSED, OPEN, ROUTES, OPEN, OPEN, ROUTES])
    x, state = digits("train"), torch.get_rng_state()
    compiled, changes = compile_gates(network, x, "predict")
    again, same = compile_gates(network, x, "predict")
    assert changes == same
    assert torch.equal(eager(compiled, x).logits, eager(again, x).logits)
    assert torch.equal(state, torch.get_rng_state())
    assert changes.blocks_with(Action.predicted) == [2, 5]
    for index in (2, 5):
        change = changes.blocks[index]
        assert change.random_agreement < change.agreement <= 1
        assert change.other_route == pytest.approx(1 - change.agreement)
        assert "a random gate as often open" in str(change)
        assert compiled.blocks[index].gate.decides_first
    own, theirs = (eager(made, x).routing.gates[:, 2] for made in (network, compiled))
    assert (own == theirs).float().mean() > changes.blocks[2].random_agreement
    assert forward_flops(compiled, x[:64]) < forward_flops(network, x[:64])
    output = eager(compiled, images())
    with torch.no_grad():
        found = Runtime(folded(compiled))(images())
    assert_same(found.logits, found.routing.gates, compiled, output)
    twice, later = compile_gates(compiled, x)  # the fitted gates stay what they are
    assert later.blocks_with(Action.predicted) == [2, 5]
    write(twice, of, actions_of(later), tmp_path)
    read = eager(read_network(tmp_path)[1], images())
    assert_same(read.logits, read.routing.gates, compiled, output)


def test_three_images_are_too_few_to_be_fitted_and_the_block_is_rounded():
    network = cosine([OPEN, OPEN, ROUTES, OPEN, OPEN, OPEN])
    logit = eager(network, images()).routing.logits[:, 2].sort(descending=True).values[2:4].mean()
    network.blocks[2].gate.opening.threshold = logit.sigmoid().item()
    few = compile_gates(network, images(), "predict")[1].blocks[2]
    assert few.action is Action.removed
    assert few.open_fraction == pytest.approx(3 / 200)


def test_what_cannot_be_compiled_is_one_line():
    with pytest.raises(UserError, match="nothing to compile"):
        compile_gates(network_of(config("gate=none", *FEW)), images())
    network = cosine([CLOSED, OPEN] * 3)
    with pytest.raises(UserError, match="nothing to compile"):
        compile_gates(compile_gates(network, images())[0], images())
    routes = compile_gates(cosine([CLOSED, ROUTES] * 3), images())[0]
    assert compile_gates(routes, images(), "round")[1].blocks_with(Action.removed)[0] == 0  # it was gone before
    with pytest.raises(UserError, match="no images"):
        compile_gates(network, images(0))
    with pytest.raises(UserError, match="dynamic = guess: must be one of keep, round, predict"):
        compile_gates(network, images(), "guess")
