import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from algorithm1 import gumbel, routing_and_loss
from conftest import config

from cosinegate import relaxation
from cosinegate.config.choices import Sided, Target
from cosinegate.hardware.processes import over_processes
from cosinegate.networks import Output, Routing
from cosinegate.objective import CosineGateLoss, prog
from cosinegate.terminal.errors import UserError
from cosinegate.training.build import build_module


@pytest.mark.parametrize("polarity", ["paper", "novelty"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_network_and_objective_equal_algorithm_1_with_their_gradients(monkeypatch, rng, polarity, temperature):
    chosen = config(
        "network.depth=8", "network.width=4", "data=digits", f"gate.polarity={polarity}", "objective.lambda_cons=0.3",
        "objective.tau_target=0.05", f"gate.relaxation.temperature={temperature}", "objective.warmup_epochs=4",
    )  # fmt: skip
    module = build_module(chosen).double()
    network, objective = module.network, module.objective
    for block in network.blocks:  # let c(x) take part
        torch.nn.init.normal_(block.gate.controller.w2.weight, generator=rng)
    images = torch.randn(3, 1, 8, 8, generator=rng, dtype=torch.float64)
    targets = torch.tensor([1, 7, 4])
    uniforms = torch.rand(3, 3, 2, generator=rng, dtype=torch.float64)
    noise = iter([torch.tensor([gumbel(b) - gumbel(a) for a, b in block]) for block in uniforms.tolist()])
    monkeypatch.setattr(relaxation, "gumbel_difference", lambda like, share=None: next(noise).to(like))
    objective.warmup_epochs = 4

    output = network(images)
    fast = objective(output, targets, epoch=3)
    fast.total.backward()
    fast_grads = {name: p.grad.clone() for name, p in network.named_parameters()}
    network.zero_grad()
    total, ce, cons, flops, gates, cirs = routing_and_loss(
        network, images, targets, uniforms, temperature, 0.05, 3, 4, 0.3, 3.0
    )
    total.backward()

    for found, expected in zip(
        (*fast, output.routing.gates, output.routing.cir), (total, ce, cons, flops, gates, cirs), strict=True
    ):
        torch.testing.assert_close(found, expected)
    assert flops > 0
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(fast_grads[name], parameter.grad, msg=name)


@pytest.mark.parametrize(
    ("t", "warmup", "value"), [(0, 40, 0.0), (10, 40, 0.25), (40, 40, 1.0), (160, 40, 1.0), (0, 0, 1.0), (0.5, 2, 0.25)]
)
def test_prog_rises_to_one_over_the_warmup(t, warmup, value):
    assert prog(t, warmup) == value


def output_with(gates: torch.Tensor) -> Output:
    zeros = torch.zeros_like(gates)
    return Output(torch.zeros(len(gates), 10), Routing(gates, zeros, zeros, zeros))


def test_penalty_is_one_sided_and_scaled_by_prog():
    objective = CosineGateLoss(lambda_flops=2.0, lambda_cons=0.0, tau_target=0.6, warmup_epochs=40)
    target = torch.zeros(2, dtype=torch.long)
    assert objective(output_with(torch.full((2, 3), 0.5)), target, epoch=20).flops == 0
    above = objective(output_with(torch.full((2, 3), 0.8)), target, epoch=20)
    torch.testing.assert_close(above.flops, torch.tensor(0.5 * 0.2**2))
    torch.testing.assert_close(above.total, above.ce + 2 * above.flops)


def test_flops_weighting_counts_a_block_by_its_cost():
    gates = torch.tensor([[1.0, 0.0, 0.0]])
    alike, by_cost = (
        CosineGateLoss(lambda_flops=1, lambda_cons=0, tau_target=0.5, block_weights=weights)
        for weights in (None, torch.tensor([2.0, 1.0, 1.0]))
    )
    assert alike.mean_gate(gates).item() == pytest.approx(1 / 3)
    assert by_cost.mean_gate(gates).item() == pytest.approx(0.5)
    module = build_module(config("objective.weighting=flops"))
    weights = module.objective.block_weights
    assert weights.shape == (9,)
    assert weights.sum().item() == pytest.approx(1)
    assert weights[3] < weights[4]  # the first block of a stage reads half the channels


def test_dense_network_has_cross_entropy_alone():
    objective = CosineGateLoss(lambda_flops=1.0, lambda_cons=1.0, tau_target=0.5)
    losses = objective(Output(torch.zeros(2, 10), None), torch.tensor([0, 1]), epoch=0)
    assert losses.total == losses.ce
    assert losses.cons == losses.flops == 0


def _penalty_gradient(rank: int, address: str, gates: torch.Tensor, found) -> None:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    weight = torch.tensor(1.0, requires_grad=True)
    objective = CosineGateLoss(lambda_flops=3.0, lambda_cons=0.0, tau_target=0.5)
    losses = objective(output_with(weight * gates[rank]), torch.zeros(2, dtype=torch.long), epoch=0)
    (losses.total - losses.ce).backward()
    mean = weight.grad.clone()
    dist.all_reduce(mean)  # as DDP averages gradients
    found[rank] = (losses.flops.item(), (mean / 2).item(), over_processes(gates[rank].mean()).item())
    dist.destroy_process_group()


def test_a_two_sided_penalty_pushes_up_as_well():
    one, two = (
        CosineGateLoss(lambda_flops=1.0, lambda_cons=0.0, tau_target=0.5, sided=sided)
        for sided in (Sided.one, Sided.two)
    )
    below, above = torch.full((4, 3), 0.2), torch.full((4, 3), 0.8)
    target = torch.zeros(4, dtype=torch.long)
    assert [objective(output_with(below), target, epoch=0).flops.item() for objective in (one, two)] == pytest.approx(
        [0, 0.09]
    )
    assert [objective(output_with(above), target, epoch=0).flops.item() for objective in (one, two)] == pytest.approx(
        [0.09] * 2
    )


def test_penalty_sees_the_mean_gate_of_all_processes(tmp_path):
    # process 0 is below the target and process 1 above it: a local penalty would be 0 and (0.9 - 0.5)²
    gates = torch.stack((torch.full((2, 3), 0.3), torch.full((2, 3), 0.9)))
    with mp.Manager() as manager:
        found = manager.dict()
        where = f"file://{tmp_path}/store"
        mp.start_processes(_penalty_gradient, (where, gates, found), nprocs=2, start_method="fork")
        results = [found[0], found[1]]
    weight = torch.tensor(1.0, requires_grad=True)
    objective = CosineGateLoss(lambda_flops=3.0, lambda_cons=0.0, tau_target=0.5)
    whole = objective(output_with(weight * gates.flatten(0, 1)), torch.zeros(4, dtype=torch.long), epoch=0)
    (whole.total - whole.ce).backward()
    for flops, gradient, mean in results:
        assert flops == pytest.approx(whole.flops.item(), rel=1e-5)
        assert gradient == pytest.approx(weight.grad.item(), rel=1e-5)
        assert mean == pytest.approx(0.6)


def test_choices_may_be_words_and_values_out_of_range_are_refused():
    terms = {"lambda_flops": 3.0, "lambda_cons": 0.0, "tau_target": 0.7}
    gates = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    for words in ({"sided": "one"}, {"sided": "two"}, {"target": "network"}, {"target": "block", "sided": "two"}):
        choices = {key: {"sided": Sided, "target": Target}[key](word) for key, word in words.items()}
        by_word, by_choice = (CosineGateLoss(**terms, **given).penalty(gates) for given in (words, choices))
        assert torch.equal(by_word, by_choice)
    for words in ({"sided": "tow"}, {"tau_target": 70}, {"lambda_flops": -1}, {"warmup_epochs": -1}):
        with pytest.raises(UserError, match=next(iter(words))):
            CosineGateLoss(**terms | words)
