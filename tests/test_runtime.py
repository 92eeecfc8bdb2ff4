"""The skipping runtime decides and computes what the trained network does, and F runs for open samples alone."""

import pytest
import torch
from conftest import config
from cosinegate.deploy.folded import Leading, folded
from cosinegate.deploy.skipping import SkippingNetwork
from deployed import EXITS, FORMS, assert_same, digits, eager, gated, images, trained
from test_predictive import masked

from cosinegate.build import build_network
from cosinegate.deploy import skipping
from cosinegate.deploy.kernels import torch_kind
from cosinegate.errors import UserError


@pytest.mark.parametrize(
    ("workers", "overrides"),
    [*((0, form) for form in FORMS), (2, FORMS[1]), *(pytest.param(2, f, marks=pytest.mark.slow) for f in FORMS[2:])],
)
def test_the_runtime_decides_and_computes_what_the_network_does(overrides, workers, rng):
    network = trained(*overrides, rng=rng)
    x = images(100, rng)
    gates = eager(network, x).routing.gates
    assert 0 < gates[:, gated(network)].mean() < 1
    assert len(torch.unique(gates, dim=0)) > 1
    runtime = SkippingNetwork(folded(network), micro_batch=16, workers=workers)
    for number in (100, 17, 16, 1):
        scores = runtime(x[:number])
        assert_same(scores, runtime.gates, network, eager(network, x[:number]))
        with torch.no_grad():
            assert_same(folded(network)(x[:number]), runtime.gates, network, eager(network, x[:number]))
    assert runtime(x[:0]).shape == (0, 10)


def test_the_runtime_is_the_masked_network_on_the_whole_test_set(rng):
    network, x = trained("gate.first_blocks=true", rng=rng), digits("test")
    with torch.no_grad():
        scores, routes = masked(network, x)  # an image at a time, F for all, times 0 or 1
    runtime = SkippingNetwork(folded(network))
    assert len(x) == 359
    expected = eager(network, x)
    assert_same(scores, routes, network, expected)
    assert_same(runtime(x), runtime.gates, network, expected)
    assert len(routes.unique(dim=0)) > 10


@pytest.mark.parametrize("overrides", [EXITS, FORMS[1], FORMS[2]])
def test_what_comes_before_the_first_look_may_be_computed_by_others(overrides, rng):
    plain, x = folded(trained(*overrides, rng=rng)), images(50, rng)
    plain.blocks[0].removed, plain.blocks[0].head = True, None  # its eye sees for later blocks
    own = SkippingNetwork(plain, micro_batch=16)
    scores, calls = own(x), []
    leading = Leading(plain)
    led = SkippingNetwork(plain, micro_batch=16, leading=lambda part: (calls.append(len(part)), leading(part))[1])
    again = led(x)
    same = (led.gates == own.gates).all(1)
    assert same.sum() >= 48  # of 50: a logit may lie on its threshold
    torch.testing.assert_close(again[same], scores[same], rtol=0, atol=1e-4)
    assert not led.gates[:, 0].any()
    assert calls == [16, 16, 16, 2]
    assert len(leading.blocks) == next(i for i, block in enumerate(plain.blocks) if block.looks or block.head)


@pytest.mark.parametrize(("micro_batch", "most"), [(5, 5), (200, 64)])
def test_preparing_meets_every_size_of_a_gated_block_and_changes_nothing(micro_batch, most, rng, monkeypatch):
    network, x = trained(*EXITS, rng=rng), images(40, rng)
    runtime = SkippingNetwork(folded(network), micro_batch)
    scores, met = runtime(x), {}
    for place, block in enumerate(runtime.blocks):
        plain = block.full
        note = lambda x, place=place, plain=plain: (met.setdefault(place, []).append(len(x)), plain(x))[1]  # noqa: E731
        monkeypatch.setattr(block, "full", note)
    image = x[:1].clone()
    runtime.prepare(image)
    assert met == {place: list(range(1, most + 1)) for place in gated(network)}
    assert torch.equal(image, x[:1])
    assert torch.equal(runtime(x), scores)


def test_the_runtime_leaves_the_images_and_the_network_as_they_were(rng):
    network = trained(rng=rng)
    x = images(20, rng)
    before, weights = x.clone(), {name: tensor.clone() for name, tensor in network.state_dict().items()}
    runtime = SkippingNetwork(folded(network))
    first = runtime(x)
    assert torch.equal(first, runtime(x))
    assert torch.equal(x, before)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in network.state_dict().items())
    gates = runtime.gates
    again = runtime(x.contiguous())  # another layout
    torch.testing.assert_close(again[(runtime.gates == gates).all(1)], first[(runtime.gates == gates).all(1)])


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


def test_gates_that_need_f_and_dense_networks_cannot_skip(rng):
    with pytest.raises(UserError, match="gate=predictive"):
        folded(build_network(config("+experiment=digits")))
    assert all(block.head is None for block in folded(build_network(config("+experiment=digits", "gate=none"))).blocks)


@pytest.mark.parametrize("overrides", FORMS[1:3])
def test_the_runtime_does_the_same_without_fused_convolutions(overrides, rng, monkeypatch):
    network, x = trained(*overrides, rng=rng), images(50, rng)
    monkeypatch.setattr(skipping, "FUSES", False)
    runtime = SkippingNetwork(folded(network), micro_batch=16)
    assert_same(runtime(x), runtime.gates, network, eager(network, x))


@pytest.mark.parametrize("opened", ["0110100", "1110000", "0000111", "0000001", "0111111", "1000000"])
def test_open_samples_stand_first_and_few_change_places(opened):
    is_open = torch.tensor([letter == "1" for letter in opened])
    number, own = int(is_open.sum()), torch.arange(7.0)
    x = own.view(7, 1, 1, 1).repeat(1, 2, 3, 3).contiguous(memory_format=torch.channels_last)
    places = skipping.Places()
    places.open_first(x, is_open, number)
    now = x[:, 0, 0, 0]
    assert torch.equal(x, now.view(7, 1, 1, 1).expand_as(x))  # whole maps
    assert sorted(now[:number].tolist()) == own[is_open].tolist()
    assert int((now != own).sum()) == 2 * int((~is_open[:number]).sum())
    assert torch.equal(places.in_own_places(now), own)
    assert torch.equal(places.follow(own), now)
    assert torch.equal(places.follow(now), now)  # once


def test_the_profiler_knows_an_operator_by_its_name():
    kinds = {
        "convolutions": ["mkldnn::_convolution_pointwise", "mkldnn::_convolution_pointwise_.binary", "aten::conv2d"],
        "matrix products": ["aten::linear", "aten::addmm"],
        "statistics": ["cosinegate::statistics", "aten::amax", "aten::sum", "aten::mean"],
        "selecting": ["aten::index_copy_", "aten::index_select", "aten::nonzero"],
        "other": ["aten::cat", "aten::relu_"],
    }
    assert {kind: [name for name in names if torch_kind(name) == kind] for kind, names in kinds.items()} == kinds
