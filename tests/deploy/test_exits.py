"""Early exits: fitted to a frozen network, which stays as it is; a budget moves their threshold and no weight."""

import copy
import itertools

import pytest
import torch
from conftest import config
from deployed import (
    CLOSED,
    LAST_STAGE,
    OPEN,
    assert_same,
    chosen,
    classifying,
    cosine,
    digits,
    eager,
    images,
    labels,
    network_of,
    steps_of,
    with_exits,
)
from same_routes import near_exit

from cosinegate.deploy.exits import EarlyExitNetwork
from cosinegate.deploy.exits.budget import exit_logits, mean_cost, path_costs, set_budget
from cosinegate.deploy.exits.fit import default_exits, fit_exits, new_exits
from cosinegate.networks.compile import compile_gates
from cosinegate.networks.flops import dense_flops, forward_flops
from cosinegate.terminal.errors import UserError

AFTER = [2, 3]


def test_the_batch_that_shrinks_gives_what_images_one_by_one_give():
    network, x = with_exits(), digits("test")
    together, near = eager(network, x), near_exit(network, x)
    assert len(together.routing.gates.unique(dim=0)) == 3
    alone = [eager(network, image[None]) for image in x]
    scores = torch.cat([output.logits for output in alone])
    assert_same(scores, torch.cat([output.routing.gates for output in alone]), network, together, near=near)


def test_an_image_has_the_scores_of_the_first_exit_that_is_sure():
    network, x = with_exits(), digits("test")
    with torch.no_grad():
        steps = steps_of(network.network, x)
        answers = [network.exit_after(index)(steps[index].y) for index in AFTER]
        scores = torch.stack([scores for scores, _ in answers] + [network.network.classify(steps[-1].y)])
        stays = torch.stack([logit > network.threshold for _, logit in answers], dim=1).cummin(1).values  # (B, E)
    exited = stays.sum(1)
    assert exited.unique().tolist() == [0, 1, 2]
    expected = torch.stack([stays[:, 0] | True] * 3 + [stays[:, 0], stays[:, 1]], dim=1)
    output = eager(network, x)
    on_threshold = near_exit(network, x).any(1)
    assert torch.equal(output.routing.gates.bool()[~on_threshold], expected[~on_threshold])
    picked = scores[exited, torch.arange(len(x))]
    torch.testing.assert_close(output.logits[~on_threshold], picked[~on_threshold], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("threshold", "blocks"), [(-torch.inf, 5), (torch.inf, 3)])
def test_the_ends_of_the_threshold_keep_every_image_or_none(threshold, blocks):
    network, x = with_exits(), digits("test")
    network.threshold.fill_(threshold)
    output = eager(network, x)
    assert (output.routing.gates.sum(1) == blocks).all()
    if blocks == 5:
        assert torch.equal(output.logits, eager(network.network, x).logits)
    costs = path_costs(network, x[:1])
    assert forward_flops(network, x) == pytest.approx(
        len(x) * (costs[-1] if blocks == 5 else costs[0]).item() * dense_flops(network.network, (8, 8, 1))
    )


def test_exits_are_off_in_training():
    network, x = with_exits().train(), images(20)
    network.threshold.fill_(torch.inf)
    plain = copy.deepcopy(network.network)
    assert torch.equal(network(x).logits, plain(x).logits)


def test_fitting_moves_no_weight_of_the_network_and_is_the_same_every_time():
    network, x, y = classifying(network_of(config(*LAST_STAGE))), digits("train")[:300], labels("train")[:300]
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    first = fit_exits(network.train(), AFTER, x, y)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)  # whatever was drawn before
        state = torch.get_rng_state()
        second = fit_exits(network.eval(), AFTER, x, y)
        assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    for index in AFTER:
        for name, tensor in first[index].state_dict().items():
            assert torch.equal(tensor, second[index].state_dict()[name])
        assert not any(parameter.requires_grad for parameter in first[index].parameters())


def test_classifiers_are_fitted_to_the_labels_and_policies_to_whether_the_answer_changes():
    network, x, y = with_exits(), digits("train"), labels("train")
    unfitted = EarlyExitNetwork(network.network, new_exits(network.network, AFTER, x[:1])).eval()
    whole = eager(network.network, x).logits.argmax(1)
    with torch.no_grad():
        steps = steps_of(network.network, x)
        for index in AFTER:
            scores, logit = network.exit_after(index)(steps[index].y)
            drawn, _ = unfitted.exit_after(index)(steps[index].y)
            assert (scores.argmax(1) == y).float().mean() > 0.8 > (drawn.argmax(1) == y).float().mean() + 0.5
            changes = scores.argmax(1) != whole
            assert 0 < changes.float().mean() < 0.5
            ranks = logit.argsort().argsort().float()  # where the answer changes, the logit is higher
            area = (ranks[changes].mean() - (changes.sum() - 1) / 2) / (~changes).sum()
            assert area > 0.8


@pytest.mark.parametrize("budget", [0.65, 0.8, 0.95])
def test_a_budget_is_met_on_the_images_it_was_set_by(budget):
    network, x = with_exits(), digits("train")[:500]
    found = set_budget(network, budget, x)
    costs = path_costs(network, x[:1])
    step = (costs[-1] - costs[0]).item() / len(x)
    assert budget - step - 1e-9 <= found <= budget
    logits = exit_logits(network, x)
    assert found == mean_cost(logits, costs, network.threshold.item())
    own = dense_flops(network.network, (8, 8, 1))
    on_threshold = near_exit(network, x).any(1).sum().item()
    assert forward_flops(network, x) / len(x) / own == pytest.approx(found, abs=(on_threshold + 1e-6) * step)


def test_a_larger_budget_lets_no_image_exit_earlier():
    routes = [eager(with_exits(budget), digits("test")).routing.gates for budget in (0.65, 0.8, 0.95)]
    assert all((less <= more).all() for less, more in itertools.pairwise(routes))
    assert routes[0].sum() < routes[1].sum() < routes[2].sum()


def test_a_budget_out_of_range_is_one_line():
    network = with_exits()
    for budget in (0.3, 1.2):
        with pytest.raises(UserError, match=rf"budget = {budget}: must lie from 0\.\d+ .* to 1\.\d+"):
            set_budget(network, budget, images(50))


@torch.no_grad()
def taking(network: EarlyExitNetwork, place: int) -> EarlyExitNetwork:
    """A copy without gates in which every image takes the exit of that place among its exits, or none."""
    forced = copy.deepcopy(network)
    forced.threshold.fill_(0.0)
    for number, index in enumerate(network.after):
        last = forced.exit_after(index).policy[2]
        last.weight.zero_()
        last.bias.fill_(-1.0 if number == place else 1.0)
    for block in forced.blocks:
        block.gate = None
    return forced


@pytest.mark.parametrize("gate", ["none", "cosine", "aig"])
def test_path_costs_are_the_flops_of_real_passes(gate):
    """Where gates are left, as if all of them were open."""
    network = network_of(config(*LAST_STAGE) if gate == "none" else chosen(gate))
    early = EarlyExitNetwork(network, new_exits(network, [1, 3], images(1))).eval()
    costs, own = path_costs(early, images(1)), dense_flops(network, (8, 8, 1))
    real = [forward_flops(taking(early, place), images(3)) / (3 * own) for place in range(3)]
    assert costs.tolist() == pytest.approx(real)
    assert real[0] < real[1] < 1 < real[2]


def test_exits_stand_where_blocks_run_that_others_follow():
    """On a compiled network too: behind a block that was removed, an exit would see nothing new."""
    compiled, _ = compile_gates(classifying(cosine([OPEN, OPEN, OPEN, OPEN, CLOSED, OPEN])), images())
    assert default_exits(compiled, images(1)) == []  # block 4 is removed, and nothing follows block 5
    assert default_exits(network_of(config(*LAST_STAGE)), images(1)) == [2, 3]
    for after in ([4], [5], [6], [-1], []):
        with pytest.raises(UserError, match=r"must be blocks that run .* of \[0, 1, 2, 3\]"):
            new_exits(compiled, after, images(1))
    early = EarlyExitNetwork(compiled, fit_exits(compiled, [1, 3], digits("train"), labels("train"))).eval()
    set_budget(early, 0.8, digits("train"))
    output = eager(early, digits("test"))
    assert early.after == [1, 3]
    assert not output.routing.gates[:, 4].any()
    assert output.routing.gates.sum(1).unique().tolist() == [2, 4, 5]
    assert (output.logits.argmax(1) == labels("test")).float().mean() > 0.4
