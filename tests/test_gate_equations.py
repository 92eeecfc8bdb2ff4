"""What each gate computes: its paper's equation, written slowly and apart, and what a control promises."""

import math

import pytest
import torch
from cosinegate.gates.skipnet_recurrent import Cell
from sklearn.datasets import load_digits
from test_gates import chosen, images

from cosinegate.build import build_network
from cosinegate.gates.random import fingerprint, uniform
from cosinegate.networks.flops import dense_flops, forward_flops

# each gate's equation from its paper, of the inputs of all blocks, with one parameter after the other


def layer(x, linear):
    return x @ linear.weight.T + (0 if linear.bias is None else linear.bias)


def normalised(x, bn):
    places = [0, *range(2, x.dim())]
    x = (x - x.mean(places, keepdim=True)) / (x.var(places, unbiased=False, keepdim=True) + 1e-5).sqrt()
    shape = [1, -1] + [1] * (x.dim() - 2)
    return x * bn.weight.view(shape) + bn.bias.view(shape)


def slow_aig(gate, x):
    first, bn, _, last = gate.score
    return layer(normalised(layer(x.mean((2, 3)), first), bn).clamp_min(0), last)


def slow_skipnet(gate, x):
    conv, bn, *_, last = gate.score
    b, c, h, w = x.shape
    windows = torch.nn.functional.unfold(x, 3, padding=1, stride=2)  # (B, 9C, places)
    seen = (conv.weight.flatten(1) @ windows).view(b, c, (h + 1) // 2, (w + 1) // 2)
    return layer(normalised(seen, bn).clamp_min(0).mean((2, 3)), last)


def slow_attention(gate, x):
    score, pooled = gate.score, x.mean((2, 3))
    attention = 1 / (1 + torch.exp(-layer(layer(pooled, score.w1).clamp_min(0), score.w2)))
    return layer(attention * pooled, score.readout)


def slow_controller(gate, x):
    return gate.gamma * layer(layer(x.mean((2, 3)), gate.controller.w1).clamp_min(0), gate.controller.w2)


def slow_recurrent(gates, inputs):
    cell = gates[0].cell
    lstm = torch.nn.LSTM(cell.hidden, cell.hidden).double()
    with torch.no_grad():
        lstm.weight_ih_l0.copy_(cell.gates.weight[:, : cell.hidden])
        lstm.weight_hh_l0.copy_(cell.gates.weight[:, cell.hidden :])
        lstm.bias_ih_l0.copy_(cell.gates.bias)
        lstm.bias_hh_l0.zero_()
    states, _ = lstm(torch.stack([layer(x.mean((2, 3)), gate.embed) for gate, x in zip(gates, inputs, strict=True)]))
    return [layer(state, gates[0].readout) for state in states]


def each(slow):
    return lambda gates, inputs: [slow(gate, x) for gate, x in zip(gates, inputs, strict=True)]


SLOW = {"aig": each(slow_aig), "skipnet": each(slow_skipnet), "attention": each(slow_attention)}
SLOW |= {"controller_only": each(slow_controller), "skipnet_recurrent": slow_recurrent}
SLOW |= {"constant": each(lambda gate, x: gate.logit.expand(len(x), 1))}


@pytest.mark.parametrize("gate", sorted(SLOW))
def test_a_gates_logit_is_its_equation_and_opens_it_as_its_paper_says(gate):
    network, inputs = build_network(chosen(gate)).double().train(), []
    for number, parameter in enumerate(parameter for block in network.blocks for parameter in block.gate.parameters()):
        if parameter.requires_grad:  # none is as it begins: zeros and ones would hide their part
            torch.manual_seed(number)
            parameter.data += 0.3 * torch.randn_like(parameter)
    for block in network.blocks:
        block.register_forward_pre_hook(lambda block, given: inputs.append(given[0].detach().clone()))
    with torch.no_grad():
        found = network(images(9).double()).routing
        slow = torch.cat(SLOW[gate]([block.gate for block in network.blocks], inputs), dim=1)
    torch.testing.assert_close(found.logits, slow)
    if gate.startswith("skipnet"):  # no noise: what is open in training is open in evaluation
        assert torch.equal(found.gates, (slow > 0).double())


def test_a_fixed_pattern_is_the_one_that_was_given():
    network = build_network(chosen("fixed"))
    for mode in (True, False):
        assert network.train(mode)(images(3)).routing.gates.tolist() == [[1, 0, 1, 1, 0, 1]] * 3


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


def test_stochastic_depth_keeps_its_mean_and_drops_more_with_depth():
    network = build_network(chosen("drop", "gate.rate=0.4")).train()
    gates = torch.cat([network(images(256)).routing.gates for _ in range(4)])
    keep = torch.linspace(0.9, 0.4, 6)
    torch.testing.assert_close((gates > 0).float().mean(0), keep, atol=0.06, rtol=0)
    torch.testing.assert_close(gates.mean(0), torch.ones(6), atol=0.15, rtol=0)
    assert (network.eval()(images(256)).routing.gates == 1).all()


def test_the_recurrent_gates_cell_is_an_lstms():
    cell, lstm = Cell(5, 4), torch.nn.LSTMCell(5, 4)
    with torch.no_grad():
        lstm.weight_ih.copy_(cell.gates.weight[:, :5])
        lstm.weight_hh.copy_(cell.gates.weight[:, 5:])
        lstm.bias_ih.copy_(cell.gates.bias)
        lstm.bias_hh.zero_()
    x, state = torch.randn(3, 5), (torch.randn(3, 4), torch.randn(3, 4))
    for found, expected in zip(cell(x, state), lstm(x, state), strict=True):
        torch.testing.assert_close(found, expected)


def test_the_recurrent_gates_share_one_memory_that_goes_on_with_the_images():
    network = build_network(chosen("skipnet_recurrent")).eval()
    cells = {id(block.gate.cell) for block in network.blocks}
    assert len(cells) == 1
    names = [name for name, _ in network.named_parameters()]
    assert sum(".cell." in name for name in names) == 2
    network.blocks[0].gate.opening.threshold = 1e-9  # of all: every gate is open, so that images go one way
    with torch.no_grad():
        before = network(images(4)).routing.logits
        network.blocks[0].gate.embed.weight.mul_(50)
        after = network(images(4)).routing.logits
    assert not torch.allclose(before[:, 5], after[:, 5])  # what the first block saw, the last one still knows


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
