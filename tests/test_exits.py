"""Images that leave the last stage when they are done: what they are taught, who decides, and what they are given."""

import copy
import json
import math
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from conftest import config
from cosinegate.calibration import calibrate
from cosinegate.callbacks.calibrated import Calibrated
from cosinegate.callbacks.prediction import PredictionStatistics
from cosinegate.deploy.folded import folded
from cosinegate.deploy.frontier import forced
from cosinegate.deploy.skipping import SkippingNetwork
from cosinegate.deploy.weights import described, rebuilt, write_weights
from cosinegate.gates.exit import ExitClassifier
from deployed import assert_same
from sklearn.linear_model import LogisticRegression
from test_full_path import softmax
from torch.utils.flop_counter import FlopCounterMode

from cosinegate import gate_fit
from cosinegate.build import build_module
from cosinegate.callbacks.epoch_sums import EpochSums
from cosinegate.deploy.compile import Action, compile_gates
from cosinegate.deploy.onnx_forms import BatchForm, BranchForm, run_onnx, session, write_onnx
from cosinegate.networks import Output, Routing
from cosinegate.networks.flops import block_flops
from cosinegate.objective import Objective

SMALL = ["data=digits", "gate=exit", "objective=predictive", "network.blocks=[1,1,4]", "network.width=4", "threads=1"]
SMALL += ["optimizer.decay_gates=false", "objective.tau_target=0.75", "gate.quantile.fit=64"]
PLACES, SHARES = [3, 4, 5], [0.8, 0.5, 0.3]
SHARED, OWN = "gate.exit_classifier=shared", "gate.exit_classifier=own"
EITHER = pytest.mark.parametrize("form", [pytest.param(SHARED, marks=pytest.mark.slow), OWN])


def network(rng, *overrides: str):
    """Its running moments are those of something, and its gates have thresholds."""
    torch.manual_seed(0)
    made = build_module(config(*SMALL, *overrides)).network.train()
    for _ in range(20):
        made(images(64, rng))
    x = images(256, rng)
    with torch.no_grad():  # a classifier that tells these images apart
        made.head.weight.normal_(std=4)
        made.head.bias.zero_().sub_(at_exit(made.eval(), 6, x).mean(0))
    gate_fit.fit(made.train(), PLACES, x, torch.zeros(256, dtype=torch.long))
    calibrate(made, SHARES, images(512, rng))  # not those that were learned by heart
    return made


def images(number: int, rng) -> torch.Tensor:
    return torch.randn(number, 1, 8, 8, generator=rng)


def statistics(network, place: int, x: torch.Tensor) -> torch.Tensor:
    """Of what the blocks before `place` alone make of the images."""
    y = network.stem(x)
    for block in network.blocks[:place]:
        y = torch.relu(block.shortcut(y) + block.residual(y))
    return torch.cat((y.mean((2, 3)), y.std((2, 3), correction=0), y.amax((2, 3))), dim=1)


def at_exit(network, place: int, x: torch.Tensor) -> torch.Tensor:
    """Scores of the blocks before `place` alone, by the network's classifier or the exit's own."""
    shown = statistics(network, place, x)
    own = network.blocks[place].gate.own if place in PLACES else None
    return network.head(shown[:, : network.head.in_features]) if own is None else slow(own, shown)


def slow(own, shown: torch.Tensor) -> torch.Tensor:
    hidden = shown @ own.w1.weight.T + own.w1.bias
    return torch.where(hidden > 0, hidden, 0.1 * hidden) @ own.w2.weight.T + own.w2.bias


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


def test_a_look_before_an_exit_costs_under_seven_tenths_of_a_percent_of_its_block():
    """Statistics, classifier, policy; ĉ alone, which stands where CIR stands, under a tenth."""
    made = build_module(config("+experiment=predictive_balanced")).network.eval()
    gate, x = made.blocks[5].gate, torch.randn(1, 64, 8, 8)
    residual = block_flops(made, (32, 32, 3))[5].item()
    with torch.no_grad(), FlopCounterMode(display=False) as look:
        gate.decide(gate.look(x, None))
    with torch.no_grad(), FlopCounterMode(display=False) as predictor:
        gate.predictor(torch.randn(1, 193))
    assert 0.005 < look.get_total_flops() / residual < 0.007
    assert 0 < predictor.get_total_flops() / residual < 0.001


def test_training_is_the_dense_networks_and_has_the_scores_of_every_exit(rng):
    made, x = network(rng).train(), images(16, rng)
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


@EITHER
def test_an_image_that_leaves_has_the_scores_of_its_exit_and_does_not_come_back(form, rng):
    made, x = network(rng, form).eval(), images(200, rng)
    with torch.no_grad():
        output = made(x)
        scores = torch.stack([at_exit(made, place, x) for place in (*PLACES, 6)])
    opened = output.routing.gates[:, PLACES]
    assert torch.equal(opened, opened.cummin(1).values)
    left = opened.sum(1).long()
    assert len(left.unique()) == 4
    torch.testing.assert_close(output.logits, scores[left, torch.arange(200)], rtol=1e-4, atol=1e-5)
    assert opened.mean(0).tolist() == pytest.approx(SHARES, abs=0.12)


@EITHER
def test_one_policy_looks_before_every_block_and_who_has_left_has_left(form, rng):
    made, x = network(rng, form).eval(), images(200, rng)
    gates = [made.blocks[place].gate for place in PLACES]
    assert len({id(gate.controller) for gate in gates}) == len({id(gate.predictor) for gate in gates}) == 1
    with torch.no_grad():
        routing = made(x).routing
        alone = [gates[0].gamma * gates[0].price(seen(made, place, x)) for place in PLACES]
    stays = torch.ones(200, dtype=torch.bool)
    for place, slow in zip(PLACES, alone, strict=True):
        expected = torch.where(stays, slow, -math.inf)
        torch.testing.assert_close(routing.logits[:, place], expected, rtol=1e-4, atol=1e-4)
        on_threshold = (slow - made.blocks[place].gate.turn).abs() < 1e-4
        assert on_threshold.sum() <= 4
        stays = torch.where(on_threshold, routing.gates[:, place].bool(), stays & (slow > made.blocks[place].gate.turn))
        assert torch.equal(routing.gates[:, place].bool(), stays)
    falling = copy.deepcopy(made)  # an image that has left would pass these, were it asked again
    for place, turn in zip(PLACES, (alone[0].sort().values[99:101].mean().item(), -1e9, -1e9), strict=True):
        falling.blocks[place].gate.opening.threshold.fill_(turn)
    output = falling(x)
    assert output.routing.gates[:, PLACES].sum(0).tolist() == pytest.approx([100, 100, 100], abs=2)
    runtime = SkippingNetwork(folded(falling), micro_batch=16)
    assert_same(runtime(x), runtime.gates, falling, output, atol=1e-3)


def seen(network, place: int, x: torch.Tensor) -> torch.Tensor:
    """Of what a block is given that no image has left before: statistics, and how unlikely the likeliest class is."""
    likely = at_exit(network, place, x).softmax(1).max(1, keepdim=True).values
    return torch.cat((statistics(network, place, x), (1e-4 - likely.log()).log()), dim=1)


@EITHER
def test_training_lets_nobody_go_whatever_the_thresholds(form, rng):
    made, x = network(rng, form).train(), images(16, rng)
    for place in PLACES:
        made.blocks[place].gate.opening.threshold.fill_(math.inf)
    output = made(x)
    assert output.routing.gates.min() == 1
    assert output.routing.logits[:, PLACES].isfinite().all()
    assert made.head.weight.grad is None
    output.routing.logits[:, PLACES].sum().backward()
    assert made.head.weight.grad is None  # what the policy is shown teaches the classifier nothing


@EITHER
def test_the_policy_is_fitted_to_whether_the_class_would_change(form, rng, monkeypatch):
    monkeypatch.setattr(gate_fit, "EXIT_PASSES", 1500)
    monkeypatch.setattr(gate_fit, "LEAST_STEPS", 4)  # too few to know 16 images by heart
    made, x = network(rng, form), images(16, rng)
    made.eval()
    before = copy.deepcopy(made.state_dict())
    gate_fit.fit(made, PLACES, x, torch.zeros(16, dtype=torch.long))
    with torch.no_grad():
        classes = [at_exit(made, place, x).argmax(1) for place in (*PLACES, 6)]
        flips = torch.stack([early != classes[-1] for early in classes[:-1]])
    assert 0.1 < flips.float().mean() < 0.9
    changed = {name for name, value in made.state_dict().items() if not torch.equal(value, before[name])}
    learned = {name for name in changed if "budget" not in name}
    assert any(".gate.controller." in name for name in learned)
    of_own = (".gate.own.", ".gate.standardise.", ".gate.predictor.") if form == OWN else ()
    may = (".gate.controller.", *of_own)
    assert all(any(part in name for part in may) for name in learned)
    logits = torch.stack([made.blocks[3].gate.price(seen(made, place, x)) for place in PLACES])
    assert torch.equal(logits > 0, flips)  # 48 maps are learned by heart


def test_classifiers_of_their_own_are_fitted_to_the_classes_and_the_whole_network(rng):
    """Better than sklearn's linear one is by the same error; the policy then sees their doubt as it is now."""
    made, x = network(rng, OWN).eval(), images(128, rng)
    target = torch.randint(10, (128,), generator=rng)
    gate_fit.fit(made, PLACES, x, target)
    with torch.no_grad():  # both errors are one, but for a constant: to half the class and half what the network says
        taught = (at_exit(made, 6, x).softmax(1) + torch.nn.functional.one_hot(target, 10)) / 2
    least = -taught.xlogy(taught).sum(1).mean().item()
    for place in (PLACES[0], PLACES[-1]):
        with torch.no_grad():
            shown, scores = statistics(made, place, x), at_exit(made, place, x)
        shown = (shown - shown.mean(0)) / shown.std(0).clamp_min(1e-3)
        rows = shown.repeat_interleave(10, 0), torch.arange(10).repeat(128), taught.flatten()
        linear = LogisticRegression(C=1e4, max_iter=500).fit(*(part.numpy() for part in rows))
        linear = torch.from_numpy(linear.predict_log_proba(shown.numpy()))
        found, linear = (-(taught * logs).sum(1).mean().item() for logs in (scores.log_softmax(1), linear))
        assert least < found < linear
    doubts = made.blocks[3].gate.standardise(torch.cat([seen(made, place, x) for place in PLACES]))[:, -1]
    assert (doubts.mean().item(), doubts.std().item()) == pytest.approx((0, 1), abs=0.01)


def test_the_predictor_is_fitted_to_the_exact_cir_and_what_is_logged_is_what_evaluation_decides_by(rng):
    """R² and agreement, against the slow form: over whole images, by the thresholds of evaluation."""
    made, x = network(rng, OWN).eval(), images(256, rng)
    gate_fit.fit(made, PLACES, x, torch.randint(10, (256,), generator=rng))
    calibrate(made, SHARES, x)
    logged, callback = {}, PredictionStatistics(EpochSums())
    callback.places = PLACES
    plain = L.pytorch.plugins.Precision()
    data = SimpleNamespace(whole_images=lambda split, number: (x[:number], None))
    module = SimpleNamespace(network=made.train(), log_dict=lambda values, **_: logged.update(values))
    callback.on_train_epoch_end(SimpleNamespace(datamodule=data, precision_plugin=plain), module)
    assert made.training
    made.eval()
    agreement = []
    for place in PLACES:
        gate, y = made.blocks[place].gate, made.stem(x)
        for block in made.blocks[:place]:
            y = torch.relu(block.shortcut(y) + block.residual(y))
        residual = made.blocks[place].residual(y).flatten(1)
        exact = 1 - torch.nn.functional.cosine_similarity(y.flatten(1), residual)
        shown = gate.standardise(seen(made, place, x))
        predicted, offset = gate.predictor(shown), gate.controller(shown)
        r2 = 1 - (exact - predicted).square().sum() / (exact - exact.mean()).square().sum()
        assert logged[f"predict/r2_block_{place:02d}"].item() == pytest.approx(r2.item(), abs=1e-3)
        assert r2 > 0.5
        same = [gate.gamma * (value + offset) > gate.turn for value in (predicted, exact)]
        agreement.append((same[0] == same[1]).float().mean().item())
        assert logged[f"predict/agreement_block_{place:02d}"].item() == pytest.approx(agreement[-1], abs=0.01)
    assert min(agreement) < 1


def test_classifiers_learn_of_mirrored_images_where_training_mirrors(rng):
    data, x, target = SimpleNamespace(config=SimpleNamespace(flip=True)), images(8, rng), torch.arange(8)
    fits, own, shared = Calibrated(6, 0), *(network(rng, form).blocks[3].gate for form in (OWN, SHARED))
    shown, classes = fits._fitted(x, target, data, own)
    assert torch.equal(shown, torch.cat((x[:6], x[:6, :, :, range(7, -1, -1)])))
    assert classes.tolist() == [*range(6), *range(6)]
    assert torch.equal(fits._fitted(x, target, data, shared)[0], x[:6])
    data.config.flip = False  # a mirrored digit is none
    assert torch.equal(fits._fitted(x, target, data, own)[0], x[:6])


def test_one_price_parts_the_images_at_every_exit(rng):
    """The shares are those that a single threshold, the same at every exit, gives the images that were fitted to."""
    made, x = network(rng).eval(), images(256, rng)
    gate = made.blocks[3].gate
    budget = gate.opening.budget
    budget.seen.zero_()
    gate_fit.fit(made, PLACES, x, torch.zeros(256, dtype=torch.long))
    with torch.no_grad():
        logits = [gate.price(seen(made, place, x)) for place in PLACES]
    for tau in (0.6, 0.75, 0.9):
        shares = budget.shares(tau, bounded=False)
        turn = sorted(torch.stack(logits).flatten().tolist())
        slow = []
        for price in turn:
            stays, open_ = torch.ones(256, dtype=torch.bool), []
            for logit in logits:
                stays = stays & (logit > price)
                open_.append(stays.float().mean().item())
            slow.append(open_)
        nearest = min(slow, key=lambda found: abs(sum(found) - sum(shares)))
        assert shares == pytest.approx(nearest, abs=0.02)


def test_gates_that_are_given_let_an_image_leave_where_the_first_is_closed(rng):
    made, x = network(rng, OWN).eval(), images(200, rng)
    plain = folded(made)
    runtime = SkippingNetwork(plain)
    scores = runtime(x)
    torch.testing.assert_close(forced(plain, x, runtime.gates), scores, rtol=1e-4, atol=1e-3)
    given = torch.ones(200, 6, dtype=torch.bool)
    given[:, 4:] = False  # all leave at the second exit
    torch.testing.assert_close(forced(plain, x, given), at_exit(made, 4, x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shares", [SHARES, [0.6, 0.4, 0.0]], ids=["live", "nobody passes the last"])
def test_a_card_rebuilds_exits_and_an_end_with_classifiers_of_their_own(shares, rng, tmp_path):
    made, x = network(rng, OWN).eval(), images(200, rng)
    calibrate(made, shares, x)
    plain = folded(compile_gates(made, x)[0])
    assert isinstance(plain.head, ExitClassifier) == (shares[-1] == 0)
    write_weights(plain, tmp_path / "weights.safetensors")
    again = rebuilt(json.loads(json.dumps(described(plain))), tmp_path / "weights.safetensors")
    assert torch.equal(SkippingNetwork(again)(x), SkippingNetwork(plain)(x))
    torch.testing.assert_close(SkippingNetwork(again)(x), made(x).logits, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("form", "shares", "tolerance"),
    [
        pytest.param(OWN, [0.5, 0.5, 0.3], 0, marks=pytest.mark.slow),
        pytest.param(OWN, [0.6, 0.4, 0.0], 0, marks=pytest.mark.slow),
        pytest.param(OWN, [0.6, 0.03, 0.0], 0.05, marks=pytest.mark.slow),
        pytest.param(SHARED, [0.5, 0.5, 0.3], 0, marks=pytest.mark.slow),
        pytest.param(OWN, [0.97, 0.5, 0.3], 0.05, marks=pytest.mark.slow),
        pytest.param(OWN, [1, 1, 0.4], 0, marks=pytest.mark.slow),
    ],
)
def test_exits_that_let_nobody_go_are_no_way_back_for_those_that_have_left(form, shares, tolerance, rng, tmp_path):
    """A threshold of minus infinity, and a gate that is removed as good as open: all forms take the same routes."""
    made, x = network(rng, form).eval(), images(200, rng)
    calibrate(made, shares, x)
    compiled, changes = compile_gates(made, x, tolerance=tolerance)
    plain, gone = folded(compiled), changes.places(Action.removed, Action.always)
    assert gone == {0.5: [], 0.97: [3], 1: [3, 4], 0.6: [4, 5] if tolerance else [5]}[shares[0]]
    with torch.no_grad():
        scores = plain(x)
        torch.testing.assert_close(compiled(x).logits, scores, rtol=1e-4, atol=1e-3)
        if tolerance == 0:
            torch.testing.assert_close(scores, made(x).logits, rtol=1e-4, atol=1e-3)
    runtime = SkippingNetwork(plain, micro_batch=16)
    torch.testing.assert_close(runtime(x), scores, rtol=1e-4, atol=1e-3)
    left = [place for place in PLACES if place not in gone]
    for form, batch in ((BranchForm, 1), (BatchForm, 200)):
        write_onnx(form(plain), tmp_path / "form.onnx", (1, 8, 8), one_image=batch == 1)
        found, gates = run_onnx(session(tmp_path / "form.onnx", 1), x.numpy(), batch)
        same = (torch.from_numpy(gates) == runtime.gates[:, left]).all(1)
        assert same.sum() >= 196  # of 200: a logit may lie on its threshold
        torch.testing.assert_close(torch.from_numpy(found)[same], scores[same], rtol=1e-4, atol=1e-3)


def test_budgets_move_thresholds_and_leave_the_order(rng):
    made = network(rng)
    budget = made.blocks[3].gate.opening.budget
    for tau in (0.55, 0.7, 0.95):
        shares = budget.shares(tau, bounded=False)
        assert shares == sorted(shares, reverse=True)
        assert (3 + sum(shares)) / 6 == pytest.approx(tau, abs=1e-6)
