"""Gates fitted to what skipping costs whole images."""

import copy
from pathlib import Path

import pytest
import torch
from conftest import config
from test_skip_cost import batch, slow_cost, trained_a_little

from cosinegate import gate_fit
from cosinegate.callbacks import calibrated
from cosinegate.choices import Credit
from cosinegate.gate_fit import fit
from cosinegate.record import read_metrics
from cosinegate.run import train

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


def controllers(network) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items() if "gate.controller" in name}


@pytest.mark.parametrize(("start_epoch", "fits"), [(1, 2), (1.5, 2), (2, 1)])
def test_gates_are_first_fitted_before_they_skip_and_steps_leave_them_alone(start_epoch, fits, tmp_path, monkeypatch):
    seen = []

    def watched(network, places, images, target):
        before, predictors = controllers(network), network.blocks[1].gate.predictor.w1.weight.clone()
        fit(network, places, images, target)
        seen.append((before, controllers(network), predictors, places, len(images)))

    monkeypatch.setattr(calibrated, "fit", watched)
    monkeypatch.setattr(gate_fit, "PASSES", 5)
    schedule = [f"objective.start_epoch={start_epoch}", "objective.warmup_epochs=0", "objective.per_step=true"]
    short = ["trainer.max_epochs=2", "trainer.limit_train_batches=4", "threads=1", f"runs_dir={tmp_path}"]
    learns = ["gate.quantile.fit=96", "gate.quantile.credit=change", "gate.quantile.begin=[0.5,0.0,1.0]"]
    chosen = config("+experiment=digits_predictive", *schedule, *short, *learns)
    train(chosen)
    assert [(places, images) for *_, places, images in seen] == [([1, 3, 5], 96)] * fits  # also what opens only later
    (before, fitted, predictors, *_), later = seen[0], seen[1:]
    assert all(value.eq(0).all() for name, value in before.items() if "w2" in name)  # as they were drawn
    assert all(not torch.equal(fitted[name], before[name]) for name in before)
    for again, _, learned, *_ in later:
        assert all(torch.equal(again[name], fitted[name]) for name in fitted)
        assert not torch.equal(learned, predictors)  # while those of CIR learn from every step
    rows = read_metrics(Path(chosen.run_dir))
    assert rows[1]["gates/relaxed_mean"] == pytest.approx(4.5 / 6)  # by chance in training,
    assert rows[1]["gates/mean"] == pytest.approx(5 / 6)  # while evaluation computes what is not closed
