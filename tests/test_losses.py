"""The penalties of other papers, by config: each against a slow form of its own, and its gradient."""

import itertools

import pytest
import torch
from conftest import ROOT, config
from test_objective import output_with

from cosinegate.config.choices import Sided, Target
from cosinegate.objective import CosineGateLoss
from cosinegate.training.build import build_module

WEIGHTS = [3.0, 1.0, 2.0, 4.0]
GATED = [True, False, True, True]


def slow_penalty(gates, tau, weights, sided, target, gated) -> float:
    """With loops, from the papers' words."""

    def cost(excess):
        return excess**2 if sided is Sided.two or excess > 0 else 0.0

    columns = [sum(column) / len(column) for column in zip(*gates, strict=True)]
    weights = [1.0] * len(columns) if weights is None else weights
    if target is Target.network:
        return cost(sum(w * o for w, o in zip(weights, columns, strict=True)) / sum(weights) - tau)
    kept = [(w, o) for w, o, has in zip(weights, columns, gated, strict=True) if has]
    return sum(w * cost(o - tau) for w, o in kept) / sum(w for w, _ in kept)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("target", list(Target))
def test_every_penalty_equals_its_slow_form_and_its_gradient(weights, target, rng):
    seen = set()
    for sided, tau in itertools.product(Sided, (0.3, 0.7)):
        objective = CosineGateLoss(
            lambda_flops=1.0,
            lambda_cons=0.0,
            tau_target=tau,
            warmup_epochs=4,
            sided=sided,
            target=target,
            block_weights=None if weights is None else torch.tensor(weights, dtype=torch.float64),
            gated=torch.tensor(GATED),
        ).double()
        gates = torch.rand(5, 4, generator=rng, dtype=torch.float64).requires_grad_()
        expected = slow_penalty(gates.tolist(), tau, weights, sided, target, GATED)
        losses = objective(output_with(gates), torch.zeros(5, dtype=torch.long), epoch=1)
        assert losses.flops.item() == pytest.approx(0.25 * expected, rel=1e-6, abs=1e-9)
        assert torch.autograd.gradcheck(objective.penalty, gates)
        seen.add(round(expected, 9))
    assert len(seen) > 2


def test_the_objectives_of_conf_are_the_papers():
    paper, aig = (build_module(config(f"objective={name}")).objective for name in ("cosinegate", "per_block"))
    assert (paper.target, paper.sided, paper.block_weights) == (Target.network, Sided.one, None)
    assert (aig.target, aig.sided, aig.lambda_flops, aig.lambda_cons) == (Target.block, Sided.two, 2.0, 0.0)
    later = build_module(config("objective=per_block", "gate=aig", "gate.first_blocks=false")).objective
    assert later.gated.tolist() == [False, True, True] * 3


OBJECTIVES = {  # sided, target, weighted by FLOPs, λ_flops, λ_cons
    "cosinegate": (Sided.one, Target.network, False, 3.0, 0.01),
    "two_sided": (Sided.two, Target.network, False, 3.0, 0.0),
    "flops": (Sided.two, Target.network, True, 3.0, 0.0),
    "per_block": (Sided.two, Target.block, False, 2.0, 0.0),
    "plain": (Sided.one, Target.network, False, 0.0, 0.0),
}


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "conf" / "objective").glob("*.yaml")))
def test_every_objective_is_what_it_is_called(name):
    made = build_module(config(f"objective={name}")).objective
    found = (made.sided, made.target, made.block_weights is not None, made.lambda_flops, made.lambda_cons)
    assert found == OBJECTIVES[name]
