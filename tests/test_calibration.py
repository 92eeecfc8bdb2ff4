"""Budgets that are met by construction."""

import math

import pytest
import torch
from conftest import config
from test_predictive import images, small

from cosinegate.build import build_network
from cosinegate.calibration import Budget, Quantile, calibrate, turn_for
from cosinegate.choices import Credit, Sharing
from cosinegate.errors import UserError


def budget(
    tau=0.7, sharing=Sharing.network, credit=Credit.slope, low=0.1, high=0.9, costs=(0.1, 0.2, 0.1), free=0.2
) -> Budget:
    made = Budget(tau, torch.tensor(costs), free, sharing, credit, low, high)
    made.prog = 1.0
    return made


def spent(made: Budget, shares: list[float]) -> float:
    return (made.free + sum(c * s for c, s in zip(made.costs, shares, strict=True))) / (made.free + sum(made.costs))


@pytest.mark.parametrize("sharing", list(Sharing))
@pytest.mark.parametrize("worth", [(0.0, 0.0, 0.0), (1.0, -2.0, 0.5), (50.0, -50.0, 0.0), (300.0, 299.0, -300.0)])
def test_the_shares_spend_the_budget_whatever_the_worth(sharing, worth):
    made = budget(sharing=sharing)
    if made.worth is not None:
        made.worth.data = torch.tensor(worth)
    for tau in (0.5, 0.6, 0.7, 0.85):
        shares = made.shares(tau)
        assert spent(made, shares) == pytest.approx(tau, abs=1e-6)
        if sharing is Sharing.network:
            assert all(0.1 - 1e-9 <= share <= 0.9 + 1e-9 for share in shares)
            pairs = [(i, j) for i in range(3) for j in range(3) if worth[i] > worth[j]]
            assert all(shares[i] >= shares[j] - 1e-9 for i, j in pairs)
        else:
            assert len(set(shares)) == 1


@pytest.mark.parametrize("credit", ["slope", "cost"])
def test_what_the_blocks_are_worth_can_be_said_and_stays(credit):
    overrides = ("+experiment=digits_predictive", "gate.quantile.worth=[3,-3,0]", f"gate.quantile.credit={credit}")
    made = build_network(config(*overrides)).blocks[1].gate.opening.budget
    assert made.worth.tolist() == [3.0, -3.0, 0.0]
    assert not made.worth.requires_grad
    for place in range(3):
        made.remember(place, torch.full((9,), 5.0 * place))  # prices that say otherwise
    first, second, third = made.shares(0.75)
    assert first > third > second


def test_the_budget_is_reached_by_prog():
    made = budget()
    made.worth.data = torch.tensor([2.0, 0.0, -2.0])
    for prog in (0.0, 0.25, 1.0):
        made.prog = prog
        assert spent(made, made.shares()) == pytest.approx(1 - prog * 0.3, abs=1e-6)
    made.prog = 0.0
    assert made.shares() == [1.0, 1.0, 1.0]
    assert spent(made, made.shares(0.7)) == pytest.approx(0.7, abs=1e-6)  # a trained network's, whatever the schedule


def test_shares_go_from_where_they_begin_to_their_own():
    overrides = ("+experiment=digits_predictive", "gate.quantile.begin=[1,0,0.5]", "objective.tau_target=0.8")
    made = build_network(config(*overrides)).blocks[1].gate.opening.budget
    for place, logits in enumerate(torch.randn(3, 50)):
        made.remember(place, logits)
    assert made.shares() == [1.0, 0.0, 0.5]
    made.prog = 0.25
    for now, first, last in zip(made.shares(), (1.0, 0.0, 0.5), made.shares(0.8), strict=True):
        assert now == pytest.approx(0.75 * first + 0.25 * last)
    made.prog = 1.0
    assert made.shares() == pytest.approx(made.shares(0.8))


def test_a_closed_block_can_begin_closed(rng):
    opening = Quantile(Budget(0.7, torch.ones(2), 0.5, Sharing.block, Credit.cost, 0.1, 0.9, None, [0.0, 1.0]), 0, 0.5)
    assert not opening(torch.randn(64, generator=rng)).gate.any()


def test_gates_that_wait_to_be_fitted_open_by_chance_in_training_and_by_their_logits_after():
    costs, begin = torch.ones(2), [0.75, 1.0]
    made = Budget(0.7, costs, 0.5, Sharing.block, Credit.change, 0.1, 0.9, None, begin, fitted=True)
    opening = Quantile(made, 0, 0.5)
    logit = torch.arange(400.0)
    torch.manual_seed(0)
    first, second = opening(logit).gate, opening(logit).gate
    torch.manual_seed(0)
    assert torch.equal(opening(logit).gate, first)  # a resumed step draws what it would have drawn
    assert not torch.equal(first, second)
    for gate in (first, second):
        assert gate.sum() == 300
        assert 0.6 < gate[:200].mean() < 0.9  # whatever the logit
    made.prog = 1.0
    assert torch.equal(opening(logit).gate, (logit >= 400 - round(400 * made.shares()[0])).float())
    made.prog, made.fitted = 0.0, False
    assert torch.equal(opening(logit).gate, (logit >= 100).float())  # gates that learn by steps


def test_training_opens_the_share_of_every_batch_and_evaluation_each_sample_by_itself(rng):
    made = budget(sharing=Sharing.block)
    opening = Quantile(made, 1, temperature=0.5)
    logit = torch.randn(200, generator=rng) * 7 + 3
    share = made.shares()[1]
    opened = opening(logit)
    assert opened.gate.sum().item() == pytest.approx(200 * share, abs=1)
    assert set(opened.gate.tolist()) == {0.0, 1.0}
    assert logit[opened.gate == 1].min() > opened.turn > logit[opened.gate == 0].max() - 1e-6
    assert opening(torch.ones(200)).gate.sum() == opened.gate.sum()  # of equal logits as many
    opening.eval()
    opening.threshold.fill_(3.0)
    assert torch.equal(opening(logit).gate, (logit > 3).float())
    assert torch.equal(torch.cat([opening(part).gate for part in logit.split(7)]), opening(logit).gate)
    assert opening(logit[:0]).gate.shape == (0,)


def test_the_gradient_is_straight_through_and_the_worth_is_what_opening_is_worth(rng):
    made = budget()
    opening = Quantile(made, 0, temperature=0.5)
    logit = torch.randn(64, generator=rng).requires_grad_()
    gain = torch.randn(64, generator=rng)  # dL/dz
    opened = opening(logit)
    (opened.gate * gain).mean().backward()
    scale = 0.5 * logit.detach().std(correction=0)
    soft = torch.sigmoid((logit.detach() - opened.turn) / scale)
    torch.testing.assert_close(logit.grad, gain / 64 * soft * (1 - soft) / scale)
    near = soft * (1 - soft) / (soft * (1 - soft)).mean()  # weights of the samples at the threshold
    share = made.shares()[0]
    rate = (share - 0.1) * (0.9 - share) / 0.8
    torch.testing.assert_close(made.worth.grad[0], (gain * near).mean() * rate)
    assert not made.worth.grad[1:].any()


def test_a_block_that_helps_takes_share_from_one_that_does_not(rng):
    made = budget(costs=(0.3, 0.3), free=0.4)
    openings = [Quantile(made, place, temperature=0.5) for place in range(2)]
    sgd = torch.optim.SGD(made.parameters(), lr=1.0)
    for _ in range(60):
        sgd.zero_grad()
        gates = [opening(torch.randn(64, generator=rng)).gate for opening in openings]
        (-(1.0 * gates[0]).mean() - (0.1 * gates[1]).mean()).backward()
        sgd.step()
    helpful, other = made.shares()
    assert helpful > 0.6 > other
    assert spent(made, [helpful, other]) == pytest.approx(0.7, abs=1e-6)


def test_everything_is_open_and_nothing_is_learned_before_the_start():
    made = budget()
    made.prog = 0.0
    logit = torch.randn(8).requires_grad_()
    opened = Quantile(made, 0, 0.5)(logit)
    assert opened.gate.tolist() == [1.0] * 8
    assert opened.turn == -math.inf
    opened.gate.sum().backward()
    assert not logit.grad.any()
    assert not made.worth.grad.any()


@pytest.mark.parametrize("look", ["block", "stage"])
def test_calibration_meets_the_share_of_every_block(look, rng):
    network = small(f"gate.predictor.look={look}", "network.depth=20").train()
    x, wanted = images(200, rng), [0.2, 0.4, 0.5, 0.6, 0.8, 1.0]
    reached = calibrate(network, wanted, x)
    assert network.training
    assert reached == pytest.approx(wanted, abs=1e-6)
    with torch.no_grad():
        opened = network.eval()(x).routing.gates.mean(0)
    assert opened[[1, 2, 4, 5, 7, 8]].tolist() == pytest.approx(wanted, abs=0.011)  # batches of another size round


def test_gates_that_look_at_f_can_be_calibrated_too(rng):
    torch.manual_seed(0)
    network = build_network(config("+experiment=digits_predictive", "gate.signal=exact", "gate.quantile.credit=slope"))
    reached = calibrate(network, [0.3, 0.6, 0.9], images(100, rng))
    assert reached == pytest.approx([0.3, 0.6, 0.9], abs=1e-6)


def test_thresholds_at_the_ends_and_with_ties():
    logits = torch.tensor([3.0, 1.0, 2.0, 0.0])
    assert [(logits > turn_for(logits, share)).sum().item() for share in (0, 0.25, 0.5, 0.75, 1)] == [0, 1, 2, 3, 4]
    assert (torch.ones(4) > turn_for(torch.ones(4), 0.5)).sum() in (0, 4)  # equal logits go together


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("objective.tau_target=0.4",), "must lie from"),
        (("objective.tau_target=0.99",), "must lie from"),
        (("network.depth=8",), "no block is left"),
        (("gate.quantile.worth=[1,2]",), "must be 3 numbers"),
        (("gate.quantile.worth=[1,2,3]", "gate.quantile.sharing=block"), "must be 3 numbers"),
        (("gate.quantile.begin=[1,0]",), "must be 3 shares from 0 to 1"),
        (("gate.quantile.begin=[1,0,1.5]",), "must be 3 shares from 0 to 1"),
        (("gate.quantile.fit=100", "gate.quantile.credit=slope"), "needs gate.quantile.credit=cost or change"),
        (("gate.quantile.fit=100", "gate.controller.enabled=false"), "gate.controller.enabled=true"),
        (("gate.quantile.fit=100", "optimizer.decay_gates=true"), "needs optimizer.decay_gates=false"),
        (("gate.quantile.credit=cost", "gate.signal=exact"), "needs gate.signal=predicted"),
        (("gate.quantile.sharing=block", "objective.tau_target=0.4"), "must lie from 0.500 to 1.000"),
    ],
)
def test_a_budget_that_cannot_be_met_is_one_line(overrides, words):
    with pytest.raises(UserError, match=words):
        build_network(config("+experiment=digits_predictive", *overrides))


def test_a_block_that_training_never_opened_stays_closed_at_any_budget():
    made = Budget(0.7, torch.ones(3), 1.0, Sharing.network, Credit.change, 0.0, 0.9, [4.0, -60.0, 4.0], [1.0, 0.0, 1.0])
    assert made.never_opened() == [False, True, False]
    for budget in (0.75, 0.6, 0.3):
        shares = made.shares(budget, bounded=False)
        assert shares[1] == 0
        assert shares[0] == shares[2] == pytest.approx((4 * budget - 1) / 2, abs=1e-6)
    made.begin = [1.0, 1.0, 1.0]  # it was open at first
    assert not any(made.never_opened())
    assert made.shares(1.0, bounded=False)[1] == pytest.approx(1)
