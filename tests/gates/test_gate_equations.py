"""What each gate computes: its paper's equation, written slowly and apart, and what a control promises."""

import copy
import math
import struct

import lightning.pytorch as L
import pytest
import torch
from algorithm1 import controller, dot, norm
from conftest import config
from sklearn.datasets import load_digits
from test_gates import chosen, images, let_route

from cosinegate.config.identity import leaves, primitives
from cosinegate.gates.controls.random import fingerprint, uniform
from cosinegate.networks.flops import dense_flops, forward_flops
from cosinegate.training.build import build_module, build_network

# each gate's equation from its paper, of the inputs of all blocks, with one parameter after the other


def layer(x, linear):
    return x @ linear.weight.T + (0 if linear.bias is None else linear.bias)


def normalised(x, bn):
    places, shape = [0, *range(2, x.dim())], [1, -1] + [1] * (x.dim() - 2)
    mean, variance = bn.running_mean.view(shape), bn.running_var.view(shape)
    if bn.training:
        mean, variance = x.mean(places, keepdim=True), x.var(places, unbiased=False, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt() * bn.weight.view(shape) + bn.bias.view(shape)


def slow_aig(gate, x):
    first, bn, _, last = gate.score
    return layer(normalised(layer(x.mean((2, 3)), first), bn).clamp_min(0), last)


def slow_skipnet(gate, x):
    conv, bn, *_, last = gate.score
    b, c, h, w = x.shape
    windows = torch.nn.functional.unfold(x, 3, padding=1, stride=2)  # (B, 9C, places)
    seen = (conv.weight.flatten(1) @ windows).view(b, c, (h + 1) // 2, (w + 1) // 2)
    return layer(normalised(seen, bn).clamp_min(0).mean((2, 3)), last)


def slow_controller(gate, x):
    return gate.gamma * layer(layer(x.mean((2, 3)), gate.controller.w1).clamp_min(0), gate.controller.w2)


def slow_constant(gate, x):
    return gate.logit.expand(len(x), 1)


SLOW = {"aig": slow_aig, "skipnet": slow_skipnet, "controller_only": slow_controller, "constant": slow_constant}


def move_parameters(network) -> None:
    """None stays as it begins: zeros and ones would hide their part."""
    for number, parameter in enumerate(p for block in network.blocks if block.gate for p in block.gate.parameters()):
        if parameter.requires_grad:
            torch.manual_seed(number)
            parameter.data += 0.3 * torch.randn_like(parameter)


@pytest.mark.parametrize("gate", sorted(SLOW))
def test_a_gates_logit_is_its_equation_and_opens_it_as_its_paper_says(gate):
    network, inputs = build_network(chosen(gate)).double().train(), []
    move_parameters(network)
    for block in network.blocks:
        block.register_forward_pre_hook(lambda block, given: inputs.append(given[0].detach().clone()))
    with torch.no_grad():
        found = network(images(9).double()).routing
        slow = torch.cat([SLOW[gate](block.gate, x) for block, x in zip(network.blocks, inputs, strict=True)], dim=1)
    torch.testing.assert_close(found.logits, slow)
    if gate == "skipnet":  # no noise: what is open in training is open in evaluation
        assert torch.equal(found.gates, (slow > 0).double())


# what each gate decides in evaluation, a sample at a time

WORD = 2**64


def mixed(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


def slow_random(gate, image) -> float:
    """rate - u, where splitmix64 draws u from the bits of the image and the gate's index."""
    golden, values = 0x9E3779B97F4A7C15, image.flatten().tolist()
    bits = [int.from_bytes(struct.pack("<d", value), "little") for value in values]
    found = sum(mixed((word + place * golden) % WORD) for place, word in enumerate(bits, start=1)) % WORD
    drawn = mixed(mixed((found + (gate.gate_index + 1) * golden) % WORD))
    return gate.rate - (drawn >> 11) / 2**53


def slow_cir(s, r):
    u, v = s.reshape(-1), r.reshape(-1)
    return 1 - dot(u, v) / (norm(u) * norm(v))


DECIDES = {  # the logit of one sample: its block's input, both paths, and its image
    "cosine": lambda gate, x, s, r, image: gate.gamma * (slow_cir(s, r) + controller(gate, x)),
    "cir_only": lambda gate, x, s, r, image: gate.gamma * slow_cir(s, r),
    "controller_only": lambda gate, x, s, r, image: gate.gamma * controller(gate, x),
    "skipnet": lambda gate, x, s, r, image: slow_skipnet(gate, x[None])[0, 0],
    "aig": lambda gate, x, s, r, image: slow_aig(gate, x[None])[0, 0],
    "constant": lambda gate, x, s, r, image: gate.logit,
    "random": lambda gate, x, s, r, image: slow_random(gate, image),
}
DECIDES["cosine_novelty"] = DECIDES["cosine"]


@torch.no_grad()
def slow_evaluation(gate: str, network, batch):
    """Scores, gates and logits, with F computed for every sample and a gate's 0 or 1 times it."""
    x, gates, logits = network.stem(batch), [], []
    for block in network.blocks:
        s, r = block.shortcut(x).clone(), block.residual(x)
        if block.gate is None:
            decided, opened = [math.nan] * len(x), [1.0] * len(x)
        else:
            decided = [float(DECIDES[gate](block.gate, x[n], s[n], r[n], batch[n])) for n in range(len(x))]
            delta = 0.5 if gate == "random" else block.gate.opening.threshold
            opened = [float(1 / (1 + math.exp(-logit)) > delta) for logit in decided]
        x = block.activation(torch.stack([s[n] + opened[n] * r[n] for n in range(len(x))]))
        gates.append(opened)
        logits.append(decided)
    gates, logits = (torch.tensor(columns, dtype=torch.float64).T for columns in (gates, logits))
    return network.head(x.mean((2, 3))), gates, logits


def assert_evaluates_slowly(gate: str, network, batch) -> torch.Tensor:
    """Returns the gates (B, N), which are those of the slow form, as are scores and logits."""
    with torch.no_grad():
        found = network(batch)
    scores, gates, logits = slow_evaluation(gate, network, batch)
    torch.testing.assert_close(found.logits, scores)
    assert torch.equal(found.routing.gates.double(), gates)
    tolerance = 1e-6 if gate == "random" else 1e-10  # a random gate's logit is of single precision
    torch.testing.assert_close(found.routing.logits.double(), logits, rtol=0, atol=tolerance, equal_nan=True)
    return gates


OPENING = {"kind", "first_blocks", "threshold"} | {
    f"relaxation.{key}" for key in ("hard", "temperature", "temperature_end", "annealing", "noise_until")
}
EQUATION = OPENING | {"polarity", "gamma.init", "gamma.learnable", "controller.enabled", "controller.reduction"}
KEYS = dict.fromkeys(("cosine", "cosine_novelty", "cir_only", "controller_only"), EQUATION) | {
    "skipnet": OPENING | {"start"},
    "aig": OPENING | {"start", "hidden"},
    "constant": OPENING | {"start"},
    "random": {"kind", "first_blocks", "rate"},
}


@pytest.mark.parametrize("gate", sorted(KEYS))
def test_a_gate_shows_its_own_keys_trains_a_step_and_evaluates_as_its_slow_form(gate):
    assert set(leaves(primitives(config(f"gate={gate}").gate))) == KEYS[gate]
    module = build_module(chosen(gate)).double().train()
    network, x, target = module.network, images(24).double(), torch.arange(24) % 10
    move_parameters(network)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    module.trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    sgd = module.configure_optimizers()["optimizer"]
    torch.manual_seed(0)
    losses = module.objective(network(x), target, epoch=0)
    losses.total.backward()
    sgd.step()
    assert torch.isfinite(losses.total)
    still = [name for name, p in network.named_parameters() if torch.equal(p, before[name])]
    assert [name for name in still if ".residual." not in name] == []  # a hard gate may close a block for all images
    assert any(".gate." in name for name in before) == (gate != "random")

    let_route(network.eval(), x)
    gates = assert_evaluates_slowly(gate, network, x)
    assert 0 < gates.mean() < 1
    if gate != "constant":
        assert ((gates.mean(0) > 0.1) & (gates.mean(0) < 0.95)).all()


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("gate.first_blocks=false",),
        ("network.shortcut=projection",),
        ("network.post_activation=false",),
    ],
)
def test_evaluation_skips_f_and_gives_what_masking_gives(overrides):
    network, x = build_network(chosen("aig", *overrides)).double().eval(), images(40).double()
    let_route(network, x)
    gates = assert_evaluates_slowly("aig", network, x)
    gated = [block.gate is not None for block in network.blocks]
    assert ((gates[:, gated].mean(0) > 0.1) & (gates[:, gated].mean(0) < 0.9)).all()
    everything = copy.deepcopy(network)
    for block in everything.blocks:
        if block.gate is not None:
            block.gate.opening.threshold = 1e-9
    assert forward_flops(network, x) < 0.9 * forward_flops(everything, x)


@pytest.mark.parametrize(("threshold", "is_open"), [(1e-9, True), (1 - 1e-9, False)])
def test_all_open_and_all_closed_are_legal_batches(threshold, is_open):
    network = build_network(chosen("aig", f"gate.threshold={threshold}")).double().eval()
    gates = assert_evaluates_slowly("aig", network, images(5).double())
    assert (gates == is_open).all()


# what a control promises


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
