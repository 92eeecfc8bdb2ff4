import pytest
import torch
from conftest import config

from cosinegate.networks.flops import block_flops, dense_flops, forward_flops
from cosinegate.training.build import build_network, reference_flops

SHAPE = (32, 32, 3)


def by_hand(depth=20, width=16) -> int:
    """Two FLOPs a multiply-add: stem, every 3x3 convolution, head."""
    n = (depth - 2) // 6
    total = 2 * 9 * 3 * width * 32 * 32
    inputs, size = width, 32
    for stage in range(3):
        outputs, size = width * 2**stage, 32 // 2**stage
        for _ in range(n):
            total += 2 * 9 * (inputs * outputs + outputs * outputs) * size * size
            inputs = outputs
    return total + 2 * inputs * 10


def test_dense_flops_are_those_of_a_count_by_hand():
    dense = build_network(config("gate=none"))
    assert dense_flops(dense, SHAPE) == forward_flops(dense, torch.zeros(1, 3, 32, 32)) == by_hand()
    for gate in ("gate=cosine", "gate=skipnet"):
        assert dense_flops(build_network(config(gate)), SHAPE) == by_hand()


@pytest.mark.parametrize(
    ("chosen", "share"),
    [("+experiment=static", 0.767), ("network.blocks=[2,1,5] network.widths=[16,32,80]", 1.185), ("gate=aig", 1.0)],
)
def test_every_network_is_timed_against_the_one_of_its_depth_and_width(chosen, share):
    of = config(*chosen.split())
    assert reference_flops(of) == by_hand()
    assert dense_flops(build_network(of), SHAPE) / reference_flops(of) == pytest.approx(share, abs=5e-4)


def test_the_papers_gate_executes_more_than_the_dense_network_even_when_all_gates_are_closed():
    network = build_network(config())
    for block in network.blocks:
        block.gate.gamma.data.fill_(-1e6)
    x = torch.randn(2, 3, 32, 32)
    assert network.eval()(x).routing.gates.sum() == 0
    executed = forward_flops(network, x)
    dots = sum(3 * 2 * 2 * c * s * s for c, s in ((16, 32), (32, 16), (64, 8))) * 3
    controllers = 2 * sum(2 * (p.numel()) for b in network.blocks for p in b.gate.controller.parameters())
    assert executed == 2 * by_hand() + dots + controllers
    assert executed > 2 * by_hand()


def test_counting_is_the_same_under_inference_mode():
    network = build_network(config("network.depth=8"))
    x = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        inside = forward_flops(network, x)
    assert inside == forward_flops(network, x)


def test_block_flops_add_up_to_the_network_without_stem_and_head():
    network = build_network(config())
    stem, head = 2 * 9 * 3 * 16 * 32 * 32, 2 * 64 * 10
    assert block_flops(network, SHAPE).sum().item() == pytest.approx(by_hand() - stem - head)
