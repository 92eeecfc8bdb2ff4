"""What a network learns from its own full path, every gate open."""

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import config

from cosinegate.build import build_module
from cosinegate.lit import LitCosineGate
from cosinegate.networks import Output, Routing
from cosinegate.objective import Objective
from cosinegate.record import read_metrics
from cosinegate.run import train

SMALL = ["data=digits", "network.depth=14", "network.width=4", "threads=1"]


def routed(scores: torch.Tensor, full: torch.Tensor) -> Output:
    return Output(scores, Routing(*[torch.zeros(len(scores), 3, dtype=scores.dtype)] * 6), full)


def softmax(scores: list[float]) -> list[float]:
    total = sum(math.exp(score) for score in scores)
    return [math.exp(score) / total for score in scores]


def slow_full_loss(scores, target, full) -> float:
    total = 0.0
    for own, label, taught_by in zip(scores, target, full, strict=True):
        p, q = softmax(taught_by), softmax(own)
        total += -math.log(p[label]) + sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    return total / len(scores)


def test_it_equals_its_slow_form_and_its_gradient(rng):
    objective = Objective(0.0, 0.0, 0.5, lambda_full=0.3)
    scores, full = torch.randn(2, 5, 4, generator=rng, dtype=torch.float64)
    target = torch.tensor([0, 1, 2, 3, 0])
    losses = objective(routed(scores, full), target)
    expected = slow_full_loss(scores.tolist(), target.tolist(), full.tolist())
    assert losses.full.item() == pytest.approx(expected)
    assert losses.total.item() == pytest.approx((losses.ce.item() + 0.3 * expected) / 1.3)
    assert torch.autograd.gradcheck(lambda own: objective.full_loss(own, target, full), scores.requires_grad_())


def test_the_routed_images_teach_the_full_path_nothing(rng):
    objective = Objective(0.0, 0.0, 0.5, lambda_full=1.0)
    scores, target = torch.randn(5, 4, generator=rng), torch.tensor([0, 1, 2, 3, 0])
    full = torch.randn(5, 4, generator=rng).requires_grad_()
    objective.full_loss(scores, target, full).backward()
    found, full.grad = full.grad, None
    torch.nn.functional.cross_entropy(full, target).backward()
    torch.testing.assert_close(found, full.grad)


@pytest.mark.parametrize("network", [(), ("network.shortcut=projection",), ("network.post_activation=false",)])
@pytest.mark.parametrize("gate", ["cosine", "predictive", "aig", "skipnet", "skipnet_recurrent", "random"])
def test_it_is_the_dense_network_of_the_same_weights_and_leaves_every_moment_as_it_was(gate, network):
    torch.manual_seed(0)
    gated = build_module(config(f"gate={gate}", *SMALL, *network)).network.train()
    dense = build_module(config("gate=none", *SMALL, *network)).network.train()
    dense.load_state_dict({name: value for name, value in gated.state_dict().items() if ".gate." not in name})
    alone, images = copy.deepcopy(gated), torch.randn(16, 1, 8, 8)
    torch.manual_seed(1)  # of the gates' noise
    both = gated(images, full_path=True)
    torch.manual_seed(1)
    torch.testing.assert_close(both.logits, alone(images).logits, rtol=0, atol=0)
    torch.testing.assert_close(both.full, dense(images).logits, rtol=0, atol=0)
    for name, value in gated.state_dict().items():
        assert torch.equal(value, alone.state_dict()[name]), name


@pytest.mark.parametrize("worth", [[60.0, 0.0, 1.0], [0.0, 60.0, 1.0], [1.0, 0.0, 60.0]])
def test_what_both_paths_have_in_common_runs_once_and_learns_from_both(worth):
    torch.manual_seed(0)
    chosen = ["+experiment=digits_predictive", f"gate.quantile.worth={worth}".replace(" ", ""), *SMALL]
    network = build_module(config(*chosen, "gate.quantile.low=0", "gate.quantile.high=1")).network.double().train()
    budget = next(block.gate.opening.budget for block in network.blocks if block.gate)
    budget.prog = 1.0
    ran, images, target = [], torch.randn(16, 1, 8, 8, dtype=torch.float64), torch.arange(16) % 10
    for place, block in enumerate(network.blocks):
        block.residual.register_forward_hook(lambda *_, place=place: ran.append(place))
    output = network(images, full_path=True)
    first = [place for place, block in enumerate(network.blocks) if block.gate][int(worth[0] == 60.0)]
    assert ran == [*range(6), *range(first, 6)]
    (output.logits.log_softmax(1)[:, 3].sum() + F.cross_entropy(output.full, target)).backward()
    found = {name: weight.grad.clone() for name, weight in network.named_parameters() if weight.grad is not None}
    network.zero_grad()
    network(images).logits.log_softmax(1)[:, 3].sum().backward()
    budget.shares = lambda *_: [1.0] * 3  # the full path, as a pass of its own
    F.cross_entropy(network(images).logits, target).backward()
    for name, weight in network.named_parameters():
        if name in found and ".gate." not in name:
            torch.testing.assert_close(found[name], weight.grad, msg=name)


def test_it_is_a_torchvision_networks_too():
    torch.manual_seed(0)
    gated = build_module(config("gate=aig", "network=resnet18", "data=digits")).network.train()
    alone, images = copy.deepcopy(gated), torch.randn(4, 1, 8, 8)
    torch.manual_seed(1)
    assert gated(images, full_path=True).full.shape == (4, 10)
    torch.manual_seed(1)
    alone(images)
    for name, value in gated.state_dict().items():
        assert torch.equal(value, alone.state_dict()[name]), name


def test_images_that_skip_a_block_teach_it_through_the_full_path():
    torch.manual_seed(0)
    module = build_module(config("+experiment=digits_predictive", *SMALL, "objective.lambda_full=1")).train()
    budget = next(block.gate.opening.budget for block in module.network.blocks if block.gate)
    budget.shares = lambda *_: [0.001] * len(budget.costs)  # none of sixteen: as good as closed, but not for good
    module.objective.prog, batch = 1.0, (torch.randn(16, 1, 8, 8), torch.arange(16) % 10)
    for lambda_full, taught in ((0.0, False), (1.0, True)):
        module.objective.lambda_full = lambda_full
        module.zero_grad()
        output = module.network(batch[0], module.objective.asks_full_path)
        module.objective(output, batch[1]).total.backward()
        for block in module.network.blocks:
            if block.gate is not None:
                assert (block.residual[0].weight.grad.abs().sum() > 0) == taught


@pytest.mark.parametrize("pattern", [[1, 0, 1, 1, 1, 1]])
def test_a_block_that_is_never_open_is_not_on_it(pattern):
    network = build_module(config("gate=fixed", *SMALL, f"gate.pattern={pattern}".replace(" ", ""))).network.train()
    network(torch.randn(16, 1, 8, 8), full_path=True).full.sum().backward()
    assert [bool(block.residual[0].weight.grad.any()) for block in network.blocks] == [bool(part) for part in pattern]


def test_it_is_asked_from_the_step_on_in_which_gates_may_close(tmp_path, monkeypatch):
    asked, step = [], LitCosineGate.training_step

    def watched(self, batch, batch_idx):
        found = step(self, batch, batch_idx)
        asked.append((self.objective.prog > 0, found["losses"].full.item() > 0))
        return found

    monkeypatch.setattr(LitCosineGate, "training_step", watched)
    late = ["+experiment=digits_predictive", "objective.start_epoch=1", "objective.lambda_full=0.5"]
    late += ["objective.warmup_epochs=1", "objective.per_step=true", "trainer.max_epochs=3", *SMALL]
    late += [f"trainer.limit_{stage}_batches=3" for stage in ("train", "val", "test")]
    chosen = config(*late, f"runs_dir={tmp_path}")
    train(chosen)
    assert asked == [(False, False)] * 4 + [(True, True)] * 5  # in the first step of a ramp nothing is asked yet
    rows = read_metrics(Path(chosen.run_dir))
    assert rows[1]["train/loss_full"] == 0
    terms = {name: rows[3][f"train/loss_{name}"] for name in ("ce", "predict", "price", "full")}
    whole = (terms["ce"] + 0.5 * terms["full"]) / 1.5 + terms["predict"] + terms["price"]
    assert rows[3]["train/loss"] == pytest.approx(whole, rel=1e-5)


def test_a_block_that_is_closed_for_every_image_is_closed_on_it_too():
    closed = ["+experiment=mnist_predictive", "data=digits", "network.width=4", "gate.quantile.low=0"]
    closed += [
        "network.blocks=[2,2,5]",
        "gate.quantile.high=1",
        "gate.quantile.begin=[1,0.5,0,0.5,0.5,0]",
        "gate.quantile.worth=[60,0,-60,0,0,-60]",
    ]
    network = build_module(config(*closed)).network.train()
    shut = [place for place, block in enumerate(network.blocks) if block.is_closed]
    assert shut == [5, 8]
    ran = []
    for place, block in enumerate(network.blocks):
        block.residual.register_forward_hook(lambda *_, place=place: ran.append(place))
    network(torch.randn(4, 1, 8, 8), full_path=True)
    once = [place for place in range(9) if place not in shut]
    assert ran == once + [place for place in once if place >= 3]
