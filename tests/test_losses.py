"""The penalties of other papers, by config: each against a slow form of its own, and its gradient."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from conftest import ROOT, config
from test_objective import output_with

from cosinegate.build import build_module, build_objective
from cosinegate.choices import Sided, Target
from cosinegate.lit import LitCosineGate
from cosinegate.networks import Output, Routing
from cosinegate.objective import Objective, bounds_at
from cosinegate.record import read_metrics
from cosinegate.train import train

WEIGHTS = [3.0, 1.0, 2.0, 4.0]
GATED = [True, False, True, True]
TARGETS = [0.2, 0.9, 0.5]


def slow_penalty(gates, tau, weights, sided, target, targets, gated, bounds, done) -> float:
    """With loops, from the papers' words."""

    def mean(numbers):
        return sum(numbers) / len(numbers)

    def cost(excess):
        return excess**2 if sided is Sided.two or excess > 0 else 0.0

    columns = [mean(column) for column in zip(*gates, strict=True)]
    weights = [1.0] * len(columns) if weights is None else weights
    if target is Target.network:
        total = cost(sum(w * o for w, o in zip(weights, columns, strict=True)) / sum(weights) - tau)
    else:
        kept = [(w, o) for w, o, has in zip(weights, columns, gated, strict=True) if has]
        wanted = targets or [tau] * len(kept)
        total = sum(w * cost(o - t) for (w, o), t in zip(kept, wanted, strict=True)) / sum(w for w, _ in kept)
    if bounds > 0:
        held = math.cos(min(1.0, done / bounds) * math.pi / 2) ** 2
        low, high = held * tau, 1 - held * (1 - tau)
        blocks = [o for o, has in zip(columns, gated, strict=True) if has]
        total += mean([max(0.0, o - high) ** 2 + max(0.0, low - o) ** 2 for o in blocks])
    return total


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("target", list(Target))
@pytest.mark.parametrize("bounds", [0.0, 0.5])
def test_every_penalty_equals_its_slow_form_and_its_gradient(weights, target, bounds, rng):
    seen = set()
    choices = itertools.product(Sided, (0.3, 0.7), [None, TARGETS] if target is Target.block else [None])
    for sided, tau, targets in choices:
        objective = Objective(
            1.0,
            0.0,
            tau,
            None if weights is None else torch.tensor(weights, dtype=torch.float64),
            sided,
            target=target,
            targets=targets,
            gated=torch.tensor(GATED),
            bounds=bounds,
        ).double()
        objective.prog, objective.done = 0.25, 0.2
        gates = torch.rand(5, 4, generator=rng, dtype=torch.float64).requires_grad_()
        expected = slow_penalty(gates.tolist(), tau, weights, sided, target, targets, GATED, bounds, 0.2)
        losses = objective(output_with(gates), torch.zeros(5, dtype=torch.long))
        assert losses.flops.item() == pytest.approx(0.25 * expected, rel=1e-6, abs=1e-9)
        assert torch.autograd.gradcheck(objective.penalty, gates)
        seen.add(round(expected, 9))
    assert len(seen) > 2


def test_dynconvs_bounds_are_the_target_at_first_and_open_to_anything():
    assert bounds_at(0.0, 0.33, 0.6) == pytest.approx((0.6, 0.6))
    assert bounds_at(0.165, 0.33, 0.6) == pytest.approx((0.3, 0.8))  # cos²(π/4) is a half
    assert bounds_at(0.33, 0.33, 0.6) == pytest.approx((0.0, 1.0))
    assert bounds_at(0.9, 0.33, 0.6) == pytest.approx((0.0, 1.0))
    assert bounds_at(0.5, 0.0, 0.6) == (0.0, 1.0)


def test_the_objectives_of_conf_are_the_papers():
    made = {name: build_objective(config(f"objective={name}")) for name in ("cosinegate", "per_block", "dynconv")}
    paper, aig, dynconv = made.values()
    assert (paper.target, paper.sided, paper.bounds, paper.block_weights) == (Target.network, Sided.one, 0.0, None)
    assert (aig.target, aig.sided, aig.lambda_flops, aig.lambda_cons) == (Target.block, Sided.two, 2.0, 0.0)
    assert (dynconv.bounds, dynconv.lambda_flops, len(dynconv.block_weights)) == (0.33, 10.0, 9)
    first = build_objective(config("objective=per_block", "gate=predictive", "objective.tau_target=0.7"))
    assert first.gated.tolist() == [False, True, True] * 3


OBJECTIVES = {  # sided, target, weighted by FLOPs, λ_flops, λ_cons, weight of the reward
    "cosinegate": (Sided.one, Target.network, False, 3.0, 0.01, 0.0),
    "two_sided": (Sided.two, Target.network, False, 3.0, 0.0, 0.0),
    "flops": (Sided.two, Target.network, True, 3.0, 0.0, 0.0),
    "per_block": (Sided.two, Target.block, False, 2.0, 0.0, 0.0),
    "dynconv": (Sided.two, Target.network, True, 10.0, 0.0, 0.0),
    "plain": (Sided.one, Target.network, False, 0.0, 0.0, 0.0),
    "predictive": (Sided.one, Target.network, False, 0.0, 0.0, 0.0),
    "reinforce": (Sided.one, Target.network, False, 0.0, 0.0, 0.1),
}


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "conf" / "objective").glob("*.yaml")))
def test_every_objective_is_what_it_is_called(name):
    made = build_objective(config(f"objective={name}"))
    found = (made.sided, made.target, made.block_weights is not None, made.lambda_flops, made.lambda_cons)
    assert (*found, made.reward_weight) == OBJECTIVES[name]


def slow_reward_loss(gates, logits, ce, alpha) -> float:
    total = 0.0
    for acted, scores, loss in zip(gates, logits, ce, strict=True):
        for i, (action, score) in enumerate(zip(acted, scores, strict=True)):
            reward = -loss + sum((1 - later) * alpha / len(acted) for later in acted[i:])
            chance = 1 / (1 + math.exp(-score))
            total -= math.log(chance if action else 1 - chance) * reward
    return total / len(gates)


def test_reinforce_equals_its_slow_form_and_reaches_the_logits_alone(rng):
    objective = Objective(0.0, 0.0, 0.5, gated=torch.tensor(GATED), reward=(0.3, 0.4))
    objective.sampled = True
    logits = torch.randn(5, 4, generator=rng, dtype=torch.float64)
    logits[:, 1] = torch.nan  # a block without a gate
    logits.requires_grad_()
    gates = (torch.rand(5, 4, generator=rng, dtype=torch.float64) > 0.5).double().requires_grad_()
    zeros, scores = torch.zeros(5, 4, dtype=torch.float64), torch.randn(5, 10, generator=rng, dtype=torch.float64)
    scores.requires_grad_()
    target = torch.arange(5)
    losses = objective(Output(scores, Routing(gates, logits, zeros, zeros, zeros, zeros)), target)
    ce = torch.nn.functional.cross_entropy(scores, target, reduction="none")
    kept = [0, 2, 3]
    expected = slow_reward_loss(gates[:, kept].tolist(), logits[:, kept].tolist(), ce.tolist(), 0.4)
    assert losses.reward.item() == pytest.approx(expected)
    assert losses.total.item() == pytest.approx(ce.mean().item() + 0.3 * expected)
    losses.reward.backward()
    assert scores.grad is None
    assert gates.grad is None
    assert (logits.grad[:, kept] != 0).all()
    assert torch.autograd.gradcheck(
        lambda given: objective.reward_loss(Routing(gates, given, zeros, zeros, zeros, zeros), ce),
        torch.randn(5, 4, dtype=torch.float64).requires_grad_(),
    )


def test_reinforce_teaches_gates_to_skip_what_does_not_help():
    """One gate whose block changes no loss: the reward for skipping closes it."""
    torch.manual_seed(0)
    objective = Objective(0.0, 0.0, 0.5, reward=(1.0, 1.0))
    logit = torch.tensor(1.0, requires_grad=True)
    sgd = torch.optim.SGD([logit], lr=0.5)
    for _ in range(60):
        gates = torch.bernoulli(torch.sigmoid(logit.detach()).expand(256, 1))
        routing = Routing(gates, logit.expand(256, 1), *[torch.zeros(256, 1)] * 4)
        sgd.zero_grad()
        objective.reward_loss(routing, torch.zeros(256)).backward()
        sgd.step()
    assert logit < -1


def test_the_stage_of_reward_begins_at_its_epoch_with_gates_that_are_sampled(tmp_path, monkeypatch):
    seen, rewards, step = [], [], LitCosineGate.training_step

    def watched(self, batch, batch_idx):
        found = step(self, batch, batch_idx)
        logits, gates = found["output"].routing.logits, found["output"].routing.gates
        by_threshold = torch.equal(gates, (logits > 0).to(gates.dtype))
        seen.append((self.objective.sampled, by_threshold))
        rewards.append(found["losses"].reward.item())
        return found

    monkeypatch.setattr(LitCosineGate, "training_step", watched)
    short = ["data=digits", "network.depth=8", "network.width=4", "threads=1", "trainer.max_epochs=2"]
    short += [f"trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test")]
    by_reward = ["gate=skipnet", "objective=reinforce", "objective.reinforce.start_epoch=1"]
    chosen = config(*by_reward, *short, f"runs_dir={tmp_path}")
    train(chosen)
    assert seen == [(False, True)] * 2 + [(True, False)] * 2
    logged = [row["train/loss_reward"] for row in read_metrics(Path(chosen.run_dir)).values()]
    assert logged == pytest.approx([0.0, sum(rewards[2:]) / 2])
    assert rewards[2] != 0


def test_a_penalty_without_a_stage_of_reward_samples_nothing():
    module = build_module(config("data=digits", "gate=skipnet", "network.depth=8"))
    assert not module.objective.sampled
    assert not module.network.blocks[0].gate.opening.sampled
