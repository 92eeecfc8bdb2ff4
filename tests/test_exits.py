"""Images that leave the last stage when they are done: what they are taught, who decides, and what they are given."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import config
from test_full_path import softmax

from cosinegate import gate_fit
from cosinegate.build import build_module
from cosinegate.calibration import calibrate
from cosinegate.deploy.folded import folded
from cosinegate.deploy.skipping import SkippingNetwork
from cosinegate.networks import Output, Routing
from cosinegate.objective import Objective

SMALL = ["data=digits", "gate=exit", "objective=predictive", "network.blocks=[1,1,4]", "network.width=4", "threads=1"]
SMALL += ["optimizer.decay_gates=false", "objective.tau_target=0.75", "gate.quantile.fit=64"]
GRADED = ["gate.quantile.sharing=network", "gate.quantile.worth=[2,0,-2]"]
PLACES = [3, 4, 5]


def network(rng, *overrides: str):
    """Its running moments are those of something, and its gates have thresholds."""
    torch.manual_seed(0)
    made = build_module(config(*SMALL, *overrides)).network.train()
    for _ in range(20):
        made(images(64, rng))
    budget = made.blocks[3].gate.opening.budget
    budget.prog = 1.0
    calibrate(made, budget.shares(), images(256, rng))
    return made


def images(number: int, rng) -> torch.Tensor:
    return torch.randn(number, 1, 8, 8, generator=rng)


def at_exit(network, place: int, x: torch.Tensor) -> torch.Tensor:
    """Scores of the blocks before `place` alone."""
    y = network.stem(x)
    for block in network.blocks[:place]:
        y = torch.relu(block.shortcut(y) + block.residual(y))
    return network.head(y.mean((2, 3)))


def test_the_loss_equals_its_slow_form_and_its_gradient(rng):
    objective = Objective(0.0, 0.0, 0.5, lambda_exit=0.3)
    scores, *exits = torch.randn(3, 5, 4, generator=rng, dtype=torch.float64)
    target, exits = torch.tensor([0, 1, 2, 3, 0]), torch.stack(exits)
    routing = Routing(*[torch.zeros(5, 3, dtype=torch.float64)] * 6)
    losses = objective(Output(scores, routing, exits=exits), target)
    slow = 0.0
    for early in exits.tolist():
        for own, label, taught_by in zip(early, target.tolist(), scores.tolist(), strict=True):
            p, q = softmax(taught_by), softmax(own)
            slow += -math.log(q[label]) + sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert losses.exit.item() == pytest.approx(slow / 10)
    assert losses.total.item() == pytest.approx((losses.ce.item() + 0.3 * slow / 10) / 1.3)
    assert torch.autograd.gradcheck(lambda early: objective.exit_loss(early, target, scores), exits.requires_grad_())
    scores.requires_grad_()
    objective.exit_loss(exits, target, scores).backward()
    assert scores.grad is None  # exits teach the end of the network nothing


def test_training_is_the_dense_networks_and_has_the_scores_of_every_exit(rng):
    made, x = network(rng, *GRADED).train(), images(16, rng)
    dense = build_module(config(*SMALL, "gate=none")).network.train()
    dense.load_state_dict({name: value for name, value in made.state_dict().items() if ".gate." not in name})
    before = copy.deepcopy(made)  # BatchNorm learns from a pass
    output = made(x)
    assert torch.equal(output.routing.gates, torch.ones(16, 6))
    torch.testing.assert_close(output.logits, dense(x).logits)
    assert output.exits.shape == (3, 16, 10)
    for early, place in zip(output.exits, PLACES, strict=True):
        torch.testing.assert_close(early, at_exit(before, place, x))
    assert made.eval()(x).exits is None


def test_an_image_that_leaves_has_the_scores_of_its_exit_and_does_not_come_back(rng):
    made, x = network(rng, *GRADED).eval(), images(200, rng)
    with torch.no_grad():
        output = made(x)
        scores = torch.stack([at_exit(made, place, x) for place in (*PLACES, 6)])
    opened = output.routing.gates[:, PLACES]
    assert torch.equal(opened, opened.cummin(1).values)
    left = opened.sum(1).long()
    assert len(left.unique()) == 4
    torch.testing.assert_close(output.logits, scores[left, torch.arange(200)], rtol=1e-4, atol=1e-5)
    assert opened.mean(0).tolist() == pytest.approx(made.blocks[3].gate.opening.budget.shares(), abs=0.12)


def test_one_policy_looks_before_every_block_and_who_has_left_has_left(rng):
    made, x = network(rng, *GRADED).eval(), images(200, rng)
    gates = [made.blocks[place].gate for place in PLACES]
    assert len({id(gate.controller) for gate in gates}) == len({id(gate.predictor) for gate in gates}) == 1
    with torch.no_grad():
        routing = made(x).routing
        alone = [gates[0].decide((statistics(made, place, x), torch.zeros(200, dtype=torch.bool))) for place in PLACES]
    stays = torch.ones(200, dtype=torch.bool)
    for place, slow in zip(PLACES, alone, strict=True):
        expected = torch.where(stays, slow.logit, -math.inf)
        torch.testing.assert_close(routing.logits[:, place], expected, rtol=1e-4, atol=1e-4)
        stays = stays & (slow.logit > made.blocks[place].gate.turn)
        assert torch.equal(routing.gates[:, place].bool(), stays)
    falling = copy.deepcopy(made)  # an image that has left would pass these, were it asked again
    for place, turn in zip(PLACES, (alone[0].logit.median().item(), -1e9, -1e9), strict=True):
        falling.blocks[place].gate.opening.threshold.fill_(turn)
    opened = falling(x).routing.gates[:, PLACES]
    assert opened.sum(0).tolist() == [100, 100, 100]
    assert torch.equal(SkippingNetwork(folded(falling), micro_batch=16)(x).argmax(1), falling(x).logits.argmax(1))


def test_training_lets_nobody_go_whatever_the_thresholds(rng):
    made, x = network(rng, *GRADED).train(), images(16, rng)
    for place in PLACES:
        made.blocks[place].gate.opening.threshold.fill_(math.inf)
    output = made(x)
    assert output.routing.gates.min() == 1
    assert output.routing.logits[:, PLACES].isfinite().all()


def statistics(network, place: int, x: torch.Tensor) -> torch.Tensor:
    """Of what a block is given that no image has left before."""
    y = network.stem(x)
    for block in network.blocks[:place]:
        y = torch.relu(block.shortcut(y) + block.residual(y))
    return torch.cat((y.mean((2, 3)), y.std((2, 3), correction=0), y.amax((2, 3))), dim=1)


def test_the_policy_is_fitted_to_how_much_leaving_changes_the_prediction(rng, monkeypatch):
    monkeypatch.setattr(gate_fit, "PASSES", 1500)
    made, x = network(rng, *GRADED), images(16, rng)
    made.eval()
    nobody = torch.zeros(16, dtype=torch.bool)
    with torch.no_grad():
        whole = at_exit(made, 6, x).log_softmax(1)
        changes = [
            F.kl_div(at_exit(made, p, x).log_softmax(1), whole, reduction="none", log_target=True) for p in PLACES
        ]
        wanted = torch.stack([(change.sum(1) + 1e-3).log() for change in changes])
    before = copy.deepcopy(made.state_dict())
    gate_fit.fit(made, PLACES, x, torch.zeros(16, dtype=torch.long))
    changed = {name for name, value in made.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all(".gate.controller." in name for name in changed)
    gate = made.blocks[3].gate
    found = torch.stack([gate.decide((statistics(made, p, x), nobody)).logit for p in PLACES]) / gate.gamma.abs()
    assert ((found - wanted).square().mean() / wanted.var()).item() < 0.1  # 48 maps are learned by heart


def test_budgets_move_thresholds_and_leave_the_order(rng):
    made = network(rng, *GRADED)
    budget = made.blocks[3].gate.opening.budget
    for tau in (0.55, 0.7, 0.95):
        shares = budget.shares(tau, bounded=False)
        assert shares == sorted(shares, reverse=True)
        assert (3 + sum(shares)) / 6 == pytest.approx(tau, abs=1e-6)
