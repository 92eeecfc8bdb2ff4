"""What skipping a block would have cost: measured, and learned by the gates."""

import copy

import pytest
import torch
from conftest import config
from test_predictive import images, small

from cosinegate.build import build_module, build_network
from cosinegate.calibration import RECENT, Budget, Quantile
from cosinegate.choices import Credit, Sharing
from cosinegate.data.module import ImageData
from cosinegate.skip_cost import priced, priced_places, skip_cost


def batch(number: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return images(number, rng), torch.randint(10, (number,), generator=rng)


def trained_a_little(rng: torch.Generator, *overrides: str):
    """A network whose running moments are those of something, at its budget."""
    network = small(*overrides).train()
    network.blocks[1].gate.opening.budget.prog = 1.0
    for _ in range(20):
        network(images(64, rng))
    return network


@torch.no_grad()
def slow_cost(network, place, image, gates, target, credit) -> float:
    """Of one image by itself, from the definition."""
    losses, predictions = [], []
    for opened in (0.0, 1.0):
        x = network.stem(image[None])
        for index, block in enumerate(network.blocks):
            gate = opened if index == place else gates[index].item()
            x = torch.relu(block.shortcut(x) + gate * block.residual(x))
        logits = network.head(x.mean((2, 3)))
        predictions.append(torch.softmax(logits[0].double(), 0))
        losses.append(-predictions[-1][target].log().item())
    without, with_f = predictions
    return losses[0] - losses[1] if credit is Credit.cost else (with_f * (with_f / without).log()).sum().item()


@pytest.mark.parametrize("credit", [Credit.cost, Credit.change])
@pytest.mark.parametrize("place", [1, 3, 5])
def test_the_cost_is_the_loss_without_f_less_the_loss_with_f_or_how_far_they_part(place, credit, rng):
    network = trained_a_little(rng)
    x, target = batch(12, rng)
    gates = torch.randint(2, (12, 6), generator=rng).float()
    gates[:, ::2] = 1.0
    network.eval()
    with torch.no_grad():
        before = network.stem(x)
        for gate, block in zip(gates.T[:place], network.blocks, strict=False):
            before = torch.relu(block.shortcut(before) + gate.view(-1, 1, 1, 1) * block.residual(before))
    found = skip_cost(network.train(), place, before.clone(), gates, target, credit)
    assert network.training
    network.eval()
    wanted = [slow_cost(network, place, *rows, credit) for rows in zip(x, gates, target, strict=True)]
    torch.testing.assert_close(found.double(), torch.tensor(wanted, dtype=torch.double), rtol=1e-4, atol=1e-5)
    assert found.abs().max() > 0.01
    assert (found < 0).any() == (credit is Credit.cost)


def test_a_block_that_no_image_opens_is_not_run_in_training(rng):
    overrides = ("gate.quantile.begin=[1,0,1]", "gate.quantile.low=0.0")
    network, other = small(*overrides).train(), small(*overrides).train()
    assert [block.gate.opening.is_closed for block in network.blocks if block.gate] == [False, True, False]
    ran = []
    network.blocks[3].residual.register_forward_hook(lambda *_: ran.append(1))
    other.blocks[3].gate.opening.budget.begin = [1.0, 1e-6, 1.0]  # opens none of 16 images, and runs
    x, target = batch(16, rng)
    outputs = [n(x) for n in (network, other)]
    assert ran == []
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    assert torch.equal(outputs[0].routing.gates, outputs[1].routing.gates)
    assert outputs[0].routing.exact[:, 3].isnan().all()
    for _ in range(20):
        priced(network, [1, 3, 5], x, target)[1].backward()
    taught = [bool(network.blocks[place].gate.controller.w2.weight.grad.any()) for place in (1, 3, 5)]
    assert taught == [True, False, True]  # it is not drawn either


def test_measuring_changes_neither_the_pass_nor_what_batches_leave_behind(rng):
    network = trained_a_little(rng)
    other = copy.deepcopy(network)
    x, target = batch(64, rng)
    output, error = priced(network, priced_places(network), x, target)
    plain = other(x)
    assert torch.equal(output.logits, plain.logits)
    assert torch.equal(output.routing.gates, plain.routing.gates)
    for name, value in other.state_dict().items():
        assert torch.equal(value, network.state_dict()[name]), name
    assert error.item() > 0


def test_only_the_gate_that_was_drawn_learns_from_the_error(rng):
    network = trained_a_little(rng)
    x, target = batch(64, rng)
    _, error = priced(network, [3], x, target)
    error.backward()
    for name, parameter in network.named_parameters():
        touched = parameter.grad is not None and parameter.grad.any()
        assert touched == name.startswith("blocks.3.gate.controller"), name


def test_gates_that_are_not_drawn_have_a_gradient_of_zero(rng):
    """Several processes want one for every parameter, and momentum goes on alike in one process and in several."""
    network = trained_a_little(rng)
    x, target = batch(64, rng)
    _, error = priced(network, [1, 3, 5], x, target)
    error.backward()
    gradients = [network.blocks[place].gate.controller.w2.weight.grad for place in (1, 3, 5)]
    assert sum(bool(gradient.any()) for gradient in gradients) == 1


@pytest.mark.parametrize("credit", [Credit.cost, Credit.change])
def test_the_error_is_of_the_logit_by_gamma(credit, rng):
    network = trained_a_little(rng, f"gate.quantile.credit={credit.name}")
    x, target = batch(64, rng)
    kept = []
    hook = network.blocks[3].register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    output, error = priced(network, [3, 3], x, target)
    hook.remove()
    cost = skip_cost(network, 3, kept[0].detach(), output.routing.gates.detach(), target, credit)
    price = output.routing.logits[:, 3] / network.blocks[3].gate.gamma
    learned = torch.asinh(cost) if credit is Credit.cost else torch.log(cost + 0.001)
    off = (price - learned)[::2].abs()
    one = torch.where(off < 1, off.square() / 2, off - 0.5).mean()
    # a cost is averaged over both blocks, of which one was drawn
    torch.testing.assert_close(error, one / 2 if credit is Credit.cost else one)


def test_other_gates_are_not_priced():
    assert priced_places(build_network(config("+experiment=digits_predictive"))) == [1, 3, 5]
    for overrides in (("+experiment=digits_predictive", "gate.quantile.credit=slope"), ("+experiment=digits",)):
        assert priced_places(build_network(config(*overrides))) == []


@pytest.mark.slow
def test_gates_learn_which_images_a_block_can_be_skipped_for(rng):
    """Gates alone are trained, on a network that was: what they say of images they never saw is worth something."""
    made = config("+experiment=digits_predictive", "data.validation=holdout", "objective.start_epoch=100")
    torch.manual_seed(0)
    module, data = build_module(made), ImageData(made.data, 0)
    data.setup()
    network, (x, y) = module.network.train(), data.whole_images("train", 1200)
    of_gates = [p for block in network.blocks if block.gate is not None for p in block.gate.parameters()]
    for parameters, lr, steps in ((network.parameters(), 0.05, 40), (of_gates, 0.05, 120)):
        sgd = torch.optim.SGD(parameters, lr, momentum=0.9)
        for _ in range(steps):
            some = torch.randint(len(x), (64,), generator=rng)
            output, error = priced(network, [1, 3, 5], x[some], y[some])
            sgd.zero_grad()
            module.objective(output, y[some], error).total.backward()
            sgd.step()
    x, y = data.whole_images("val", 300)
    learned = []
    for place in (1, 3, 5):
        kept = []
        hook = network.blocks[place].register_forward_pre_hook(lambda _, inputs, kept=kept: kept.append(inputs[0]))
        with torch.no_grad():
            output = network.eval()(x)
        hook.remove()
        cost = skip_cost(network, place, kept[0], output.routing.gates, y)
        closed = output.routing.logits[:, place].argsort()[:100]
        learned.append((cost[closed].mean() / cost.mean()).item())
    assert sum(learned) / 3 < 0.6  # 1: a third drawn by chance


def prices(sharing=Sharing.network, costs=(0.1, 0.1, 0.1), low=0.1, high=0.9) -> Budget:
    made = Budget(0.7, torch.tensor(costs), 0.2, sharing, Credit.cost, low, high)
    made.prog = 1.0
    return made


def spent(made: Budget, shares: list[float]) -> float:
    return (made.free + sum(c * s for c, s in zip(made.costs, shares, strict=True))) / (made.free + sum(made.costs))


@pytest.mark.parametrize("shift", [(0.0, 0.0, 0.0), (0.5, 0.0, -0.5), (9.0, 0.0, -9.0)])
@pytest.mark.parametrize("decimals", [7, 0])  # 0: many equal prices
@pytest.mark.parametrize("costs", [(0.1, 0.1, 0.1), (0.1, 0.2, 0.15)])
def test_one_price_spends_the_budget(shift, decimals, costs, rng):
    made = prices(costs=costs)
    for place in range(3):
        made.remember(place, (torch.randn(500, generator=rng) + shift[place]).round(decimals=decimals))
    for tau in (0.5, 0.6, 0.7, 0.85):
        shares = made.shares(tau)
        assert spent(made, shares) == pytest.approx(tau, abs=1e-6)
        assert all(0.1 - 1e-6 <= share <= 0.9 + 1e-6 for share in shares)
    for prog in (0.0, 0.3):
        made.prog = prog
        assert spent(made, made.shares()) == pytest.approx(1 - prog * 0.3, abs=1e-6)


def test_what_is_opened_is_what_costs_most_to_skip(rng):
    made = prices(low=0.0, high=1.0)
    logits = torch.randn(3, 400, generator=rng) + torch.tensor([[0.3], [0.0], [-0.4]])
    for place in range(3):
        made.remember(place, logits[place])
    number = round(400 * 3 * made.gated_share(0.7))
    dearest = logits.flatten().argsort(descending=True)[:number]
    wanted = [((dearest // 400) == place).sum().item() / 400 for place in range(3)]
    assert made.shares() == pytest.approx(wanted, abs=0.005)


def test_a_block_of_twice_the_flops_must_be_worth_twice_as_much(rng):
    made = prices(costs=(0.1, 0.2, 0.1))
    logits = torch.rand(400, generator=rng) + 0.5
    for place in range(3):
        made.remember(place, logits)
    first, dear, last = made.shares()
    assert first == last > dear


def test_the_last_images_are_remembered():
    made = prices()
    assert made.shares() == pytest.approx([made.gated_share(0.7)] * 3)  # nothing is known yet
    for start in range(0, RECENT + 300, 100):
        for place in range(3):
            made.remember(place, torch.arange(start, start + 100.0))
    assert made.recent.min() == made.seen[0] - RECENT == 352
    assert made.recent.max() == (RECENT + 300 - 1) // 100 * 100 + 99
    assert made.seen.tolist() == [len(range(0, RECENT + 300, 100)) * 100] * 3


@pytest.mark.parametrize("sharing", list(Sharing))
def test_training_opens_the_share_and_gives_no_slope(sharing, rng):
    opening = Quantile(prices(sharing), 0, temperature=0.5)
    logit = torch.randn(200, generator=rng).requires_grad_()
    opened = opening(logit)
    assert opened.gate.sum().item() == pytest.approx(200 * opening.budget.gated_share(0.7), abs=1)
    assert not opened.gate.requires_grad
    assert logit[opened.gate == 1].min() > logit[opened.gate == 0].max()


def test_after_training_prices_alone_decide(rng):
    made = prices()  # in training between .1 and .9
    for place, shift in enumerate((9.0, 0.0, -9.0)):
        made.remember(place, torch.randn(400, generator=rng) + shift)
    tau = made.free / (made.free + sum(made.costs)) + 1.5 * made.costs[0] / (made.free + sum(made.costs))
    assert made.shares(tau, bounded=False) == pytest.approx([1.0, 0.5, 0.0], abs=0.01)
    assert made.shares(tau) == pytest.approx([0.9, 0.5, 0.1], abs=0.01)


def test_logarithms_of_changes_are_shared_out_as_the_changes_would_be(rng):
    changes, costs = (
        torch.rand(3, 400, generator=rng) + torch.tensor([[0.3], [0.0], [0.1]]),
        torch.tensor((0.1, 0.2, 0.15)),
    )
    made = [Budget(0.7, costs, 0.2, Sharing.network, credit, 0.0, 1.0) for credit in (Credit.cost, Credit.change)]
    for place in range(3):
        made[0].remember(place, changes[place])
        made[1].remember(place, changes[place].log())
    assert made[0].shares(0.6) == pytest.approx(made[1].shares(0.6), abs=1e-3)
