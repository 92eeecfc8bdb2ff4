import pytest
import torch
from conftest import config

from cosinegate.config.choices import Polarity
from cosinegate.config.identity import convolution_weights
from cosinegate.networks import ResidualBlock
from cosinegate.training.build import build_module, build_network


def count(network) -> int:
    return sum(p.numel() for p in network.parameters())


def images(batch=4, channels=3, size=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, channels, size, size, generator=generator).contiguous(memory_format=torch.channels_last)


def test_resnet20_has_exactly_the_parameters_of_he_et_al():
    assert count(build_network(config("gate=none"))) == 269_722


@pytest.mark.parametrize(("depth", "millions"), [(32, 0.46), (44, 0.66), (56, 0.85), (110, 1.7)])
def test_deeper_networks_have_the_published_size(depth, millions):
    parameters = count(build_network(config("gate=none", f"network.depth={depth}")))
    assert parameters / 1e6 == pytest.approx(millions, abs=0.05 if depth == 110 else 0.01)


def test_gates_add_less_than_one_percent():
    added = count(build_network(config())) - 269_722
    assert added == 1_581
    assert added / 269_722 < 0.01


@pytest.mark.parametrize("depth", [8, 14, 20])
@pytest.mark.parametrize("width", [4, 16])
@pytest.mark.parametrize(("data", "channels", "size"), [("cifar10", 3, 32), ("mnist", 1, 28), ("digits", 1, 7)])
@pytest.mark.parametrize("gate", ["cosine", "none"])
def test_every_network_runs_forward_and_backward(depth, width, data, channels, size, gate):
    chosen = config(f"data={data}", f"network.depth={depth}", f"network.width={width}", f"gate={gate}")
    network = build_network(chosen)
    output = network(images(2, channels, size))
    assert output.logits.shape == (2, 10)
    blocks = (depth - 2) // 2
    if gate == "none":
        assert output.routing is None
    else:
        assert {tuple(field.shape) for field in output.routing} == {(2, blocks)}
    (output.logits.square().sum() + (0 if gate == "none" else output.routing.consistency.sum())).backward()
    for name, parameter in network.named_parameters():
        # W2 starts at zero, so W1 gets its first gradient in the second step
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


SWITCHES = [
    "network.shortcut=projection",
    "network.post_activation=false",
    "gate.controller.enabled=false",
    "network.widths=[16,32,80]",
    "gate.controller.reduction=4",
    "gate.gamma.learnable=false",
    "gate.polarity=novelty",
    "gate.relaxation.hard=true",
    "gate.relaxation.temperature=0.5",
    "gate.threshold=0.001",
    "objective.consistency.detach_target=true",
]


def behaviour(*overrides):
    """The parameters, and what the network computes with them: training, evaluation, gradient of the consistency."""
    network = build_module(config("network.depth=8", *overrides)).network
    parameters = [(name, tuple(p.shape), p.requires_grad) for name, p in network.named_parameters()]
    torch.manual_seed(0)
    output = network(images())
    (gradient,) = torch.autograd.grad(output.routing.consistency.sum(), network.stem[0].weight, retain_graph=True)
    return parameters, [output.logits, output.routing.gates, gradient, network.eval()(images()).logits]


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_changes_what_it_names(switch):
    (before, computed), (after, recomputed) = behaviour(), behaviour(switch)
    assert all(torch.isfinite(tensor).all() for tensor in recomputed)
    same = all(torch.equal(a, b) for a, b in zip(computed, recomputed, strict=True))
    assert before != after or not same
    again, repeated = behaviour(switch)
    assert after == again
    assert all(torch.equal(a, b) for a, b in zip(recomputed, repeated, strict=True))  # it was the switch, not chance


def test_polarity_decides_which_way_cir_moves_the_logit():
    for polarity, sign in ((Polarity.paper, -1), (Polarity.novelty, 1)):
        network = build_network(config(f"gate.polarity={polarity.name}", "network.depth=8"))
        routing = network(images()).routing
        assert torch.equal(routing.logits.sign(), torch.full_like(routing.logits, sign))
        torch.testing.assert_close(routing.logits, sign * 2.5 * routing.cir)  # γ·CIR exactly: W2 starts at zero


def test_closed_gate_is_the_identity_on_a_non_negative_input():
    block: ResidualBlock = build_network(config("network.depth=8")).eval().blocks[0]
    block.gate.gamma.data.fill_(-1e6)
    x = images(channels=16).relu()
    y, routing = block(x, images())
    assert routing.decision.gate.tolist() == [0.0] * 4
    assert torch.equal(x, y)


def test_open_gates_are_the_dense_network():
    gated = build_network(config("network.depth=14")).eval()
    dense = build_network(config("network.depth=14", "gate=none")).eval()
    dense.load_state_dict({k: v for k, v in gated.state_dict().items() if ".gate." not in k})
    for block in gated.blocks:
        block.gate.gamma.data.fill_(1e6)
    torch.testing.assert_close(gated(images()).logits, dense(images()).logits)


@pytest.mark.parametrize("gate", ["cosine", "controller_only"])
def test_a_seed_gives_the_network_the_same_weights_with_any_gate(gate):
    dense, gated = (build_module(config(f"gate={choice}", "seed=3")).network for choice in ("none", gate))
    of_gated = gated.state_dict()
    assert all(torch.equal(value, of_gated[name]) for name, value in dense.state_dict().items())
    first, *others = (block.gate.controller.w1.weight for block in gated.blocks if block.gate is not None)
    assert not any(first.shape == other.shape and torch.equal(first, other) for other in others)


def test_evaluation_is_deterministic_and_hard_and_training_is_not():
    network = build_network(config())
    trained = [network(images()).routing.gates for _ in range(2)]
    assert not torch.equal(*trained)
    assert ((trained[0] > 0) & (trained[0] < 1)).all()
    network.eval()
    before = torch.get_rng_state()
    first, second = network(images()), network(images())
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(before, torch.get_rng_state())
    assert set(first.routing.gates.unique().tolist()) <= {0.0, 1.0}
    assert torch.equal(first.routing.gates, (torch.sigmoid(first.routing.logits) > 0.45).float())


def test_a_sample_is_routed_alike_alone_and_in_a_batch():
    network, x = build_network(config("gate.polarity=novelty", "network.depth=14")).eval().double(), images(6).double()
    together = network(x)
    alone = [network(x[n : n + 1]) for n in range(6)]
    torch.testing.assert_close(together.logits, torch.cat([output.logits for output in alone]))
    assert torch.equal(together.routing.gates, torch.cat([output.routing.gates for output in alone]))


def test_layouts_give_the_same_output():
    network = build_network(config("network.depth=14")).eval()
    x = images()
    last = network.to(memory_format=torch.channels_last)(x).logits
    plain = network.to(memory_format=torch.contiguous_format)(x.contiguous()).logits
    torch.testing.assert_close(last, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("network", "millions"),
    [("resnet20", 0.27), ("resnet32", 0.46), ("resnet56", 0.85), ("resnet110", 1.7), ("wide_resnet20", 1.07)],
)
@pytest.mark.parametrize("gate", ["none", "cosine"])
def test_networks_of_conf_compose_with_the_published_size(network, millions, gate):
    with torch.device("meta"):
        made = build_network(config(f"network={network}", f"gate={gate}"))
    parameters = sum(p.numel() for name, p in made.named_parameters() if ".gate." not in name)
    assert parameters / 1e6 == pytest.approx(millions, abs=0.05 if network == "resnet110" else 0.01)


@pytest.mark.parametrize("shape", ["network.depth=14", "network.blocks=[2,1,5] network.widths=[6,6,20]"])
def test_the_weights_that_a_config_is_refused_by_are_those_of_the_network(shape):
    chosen = config("gate=none", "network.width=8", *shape.split())
    built = build_network(chosen)
    counted = sum(p.numel() for block in built.blocks for p in block.residual.parameters() if p.ndim == 4)
    assert counted == convolution_weights(chosen.network)


def test_stages_have_the_channels_that_widths_names():
    named = build_network(config("network.depth=14", "network.widths=[16,32,80]", "gate=none"))
    assert [block.residual[3].out_channels for block in named.blocks] == [16, 16, 32, 32, 80, 80]
    assert named.head.in_features == 80
    plain, same = (build_network(config("gate=none", *more)) for more in ([], ["network.widths=[16,32,64]"]))
    assert [p.shape for p in plain.parameters()] == [p.shape for p in same.parameters()]
