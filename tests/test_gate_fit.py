"""Gates fitted to what skipping costs whole images."""

import copy

import pytest
import torch
from test_skip_cost import batch, slow_cost, trained_a_little

from cosinegate import gate_fit
from cosinegate.choices import Credit
from cosinegate.gate_fit import fit

PLACES = [1, 3]


def costs(network, x, target, credit) -> torch.Tensor:
    """(B, P), an image at a time."""
    with torch.no_grad():
        gates = network(x).routing.gates
    return torch.tensor(
        [[slow_cost(network, place, x[k], gates[k], target[k], credit) for place in PLACES] for k in range(len(x))]
    )


@pytest.mark.parametrize(("credit", "polarity"), [(Credit.cost, "paper"), (Credit.change, "novelty")])
def test_a_fitted_logit_is_what_skipping_costs_and_nothing_else_has_changed(credit, polarity, rng, monkeypatch):
    monkeypatch.setattr(gate_fit, "PASSES", 700)
    network = trained_a_little(rng, f"gate.quantile.credit={credit.name}", f"gate.polarity={polarity}")
    x, target = batch(16, rng)
    before, drawn = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    wanted = costs(network.eval(), x, target, credit)  # slow: at the routes from before the fit
    wanted = torch.asinh(wanted) if credit is Credit.cost else (wanted + 1e-3).log()
    fit(network.train(), PLACES, x, target)
    assert network.training
    assert torch.equal(torch.get_rng_state(), drawn)
    after = network.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    of_controllers = {
        f"blocks.{place}.gate.controller.w{k}.{kind}" for place in PLACES for k in (1, 2) for kind in ("weight", "bias")
    }
    assert of_controllers <= changed
    assert all("budget" in name for name in changed - of_controllers), changed  # the prices that budgets know
    with torch.no_grad():
        logits = network.eval()(x).routing.logits[:, PLACES]
    gamma = network.blocks[1].gate.gamma.abs()
    unexplained = (logits / gamma - wanted).square().mean(0) / wanted.var(0)
    assert unexplained.max() < 0.1  # 16 images are learned by heart
    assert all(parameter.grad is None for parameter in network.parameters())


def test_prices_are_those_of_the_fitted_gates(rng):
    network = trained_a_little(rng, "gate.quantile.credit=change")
    x, target = batch(32, rng)
    fit(network, PLACES, x, target)
    budget = network.blocks[1].gate.opening.budget
    with torch.no_grad():
        logits = network.eval()(x).routing.logits[:, PLACES]
    end = 20 * 64 + 32  # after the images of training
    torch.testing.assert_close(budget.recent[:2, end - 32 : end].T, logits)
