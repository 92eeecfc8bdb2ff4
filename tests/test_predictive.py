"""Gates that decide before F: what they see, what they learn from, what they cost."""

import copy

import pytest
import torch
from conftest import config
from torch.utils.flop_counter import FlopCounterMode

from cosinegate import geometry
from cosinegate.build import build_module, build_network
from cosinegate.calibration import turn_for
from cosinegate.choices import Measure
from cosinegate.gates.predictive import Standardise
from cosinegate.geometry import Dots
from cosinegate.lit import LitCosineGate
from cosinegate.run import train

SMALL = ("+experiment=digits_predictive",)
SLOPE = "gate.quantile.credit=slope"
ON_CIFAR = ("gate=predictive", "objective=predictive")


def small(*overrides: str, seed: int = 0):
    """A network on digits whose gates have something to say."""
    torch.manual_seed(seed)
    network = build_network(config(*SMALL, *overrides))
    for block in network.blocks:
        if block.gate is not None:
            torch.nn.init.normal_(block.gate.predictor.w2.weight)
            if block.gate.controller is not None:
                torch.nn.init.normal_(block.gate.controller.w2.weight)
    return network


def images(number: int, rng: torch.Generator) -> torch.Tensor:
    return torch.randn(number, 1, 8, 8, generator=rng).to(memory_format=torch.channels_last)


def slow_statistics(x: torch.Tensor) -> torch.Tensor:
    rows = []
    for sample in x.double():
        pixels = [channel.flatten() for channel in sample]
        mean = [sum(p) / len(p) for p in pixels]
        std = [torch.sqrt(sum((p - m) ** 2) / len(p)) for p, m in zip(pixels, mean, strict=True)]
        rows.append(torch.stack([*mean, *std, *(max(p) for p in pixels)]))
    return torch.stack(rows)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_statistics_are_mean_deviation_and_maximum(layout, rng):
    x = torch.randn(3, 4, 5, 6, generator=rng).to(memory_format=layout)
    found = geometry.pooled_statistics(x)
    torch.testing.assert_close(found.double(), slow_statistics(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(geometry.pooled_statistics(torch.full((1, 2, 3, 3), 0.1))[0, 2:4], torch.zeros(2))


def dots_of(s: torch.Tensor, r: torch.Tensor) -> Dots:
    return geometry.dot_products(s, r)[2]


@pytest.mark.parametrize("measure", list(Measure))
def test_a_measure_equals_its_definition_and_its_gradient(measure, rng):
    s, r = (torch.randn(3, 2, 3, 3, generator=rng, dtype=torch.float64).requires_grad_() for _ in range(2))
    found = geometry.measured(measure, dots_of(s, r))
    for n in range(3):
        u, v = s[n].flatten(), r[n].flatten()
        by_hand = {
            Measure.cir: 1 - torch.nn.functional.cosine_similarity(u, v, dim=0),
            Measure.turn: 1 - torch.nn.functional.cosine_similarity(u, u + v, dim=0),
            Measure.norm_ratio: v.norm() / u.norm(),
        }[measure]
        torch.testing.assert_close(found[n], by_hand)
    assert torch.autograd.gradcheck(lambda s, r: geometry.measured(measure, dots_of(s, r)), (s, r))


@pytest.mark.parametrize("measure", list(Measure))
@pytest.mark.parametrize("zero", ["s", "r", "both"])
def test_a_zero_map_has_a_finite_measure_and_gradient(measure, zero, rng):
    s, r = (torch.randn(2, 2, 3, 3, generator=rng) for _ in range(2))
    s, r = (s * 0 if zero in ("s", "both") else s).requires_grad_(), (r * 0 if zero != "s" else r).requires_grad_()
    value = geometry.measured(measure, dots_of(s, r))
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(s.grad).all()
    assert torch.isfinite(r.grad).all()


def test_the_decision_in_training_does_not_look_at_f(rng):
    """A residual of another network: other CIR, other exact decision, the same logit."""
    network = small().train()
    block = network.blocks[1]
    block.gate.opening.budget.prog = 1.0
    x = images(16, rng)
    seen = geometry.pooled_statistics(network.stem(x))
    first, second = (
        block.gate(seen, Dots(*(torch.rand(16, generator=rng) + 0.1 for _ in range(3)), torch.zeros(16)))
        for _ in range(2)
    )
    torch.testing.assert_close(first.logit, second.logit, rtol=0, atol=0)
    assert not torch.allclose(first.exact, second.exact)
    block.gate.by_exact = True  # before the switch-over epoch it does
    third = block.gate(seen, Dots(*(torch.rand(16, generator=rng) + 0.1 for _ in range(3)), torch.zeros(16)))
    assert not torch.allclose(first.logit, third.logit)
    offset = block.gate.controller(block.gate.standardise.eval()(seen))
    turn = turn_for(third.logit, block.gate.opening.budget.shares()[0])
    by_predicted, by_exact = (block.gate.gamma * (value + offset) > turn for value in (third.cir, third.exact))
    assert torch.equal(third.agrees.bool(), by_predicted == by_exact)
    assert 0 < third.agrees.mean() < 1


def test_the_predictor_learns_from_exact_cir_and_teaches_nothing_else(rng):
    chosen = config(*SMALL)
    module = build_module(chosen)
    module.network.train()
    output = module.network(images(32, rng))
    losses = module.objective(output, torch.zeros(32, dtype=torch.long))
    gated = [i for i, block in enumerate(module.network.blocks) if block.gate is not None]
    error = (output.routing.cir[:, gated] - output.routing.exact[:, gated]).square().mean()
    torch.testing.assert_close(losses.predict, error)
    losses.predict.backward()
    with_gradient = {name for name, p in module.network.named_parameters() if p.grad is not None and p.grad.any()}
    assert with_gradient
    assert all(".gate.predictor." in name for name in with_gradient), with_gradient
    assert torch.isnan(output.routing.exact[:, [i for i in range(6) if i not in gated]]).all()


def test_no_gradient_leaves_the_gate(rng):
    """Of the gate's inputs: with the gates' values held, the stem learns the same with and without gates that learn."""
    network = small(SLOPE).double().train()
    for block in network.blocks:
        if block.gate is not None:
            block.gate.opening.budget.prog = 1.0
    x = images(16, rng).double()

    def stem_gradient(frozen: bool) -> torch.Tensor:
        one = copy.deepcopy(network)
        for block in one.blocks:
            if frozen and block.gate is not None:
                block.gate.requires_grad_(False)
        one(x).logits.square().mean().backward()
        return one.stem[0].weight.grad

    torch.testing.assert_close(stem_gradient(True), stem_gradient(False))


def test_the_gate_costs_under_half_a_percent_of_its_block():
    network = build_network(config(*ON_CIFAR)).eval()
    x, seen = network.stem(torch.randn(2, 3, 32, 32)), None
    for block in network.blocks:
        seen = block.look(x, seen)
        if block.gate is not None:
            with torch.no_grad(), FlopCounterMode(display=False) as gate:
                block.gate.decide(seen)
            with torch.no_grad(), FlopCounterMode(display=False) as look:
                geometry.pooled_statistics(x)
            with torch.no_grad(), FlopCounterMode(display=False) as residual:
                block.residual(x)
            cost = gate.get_total_flops() + look.get_total_flops() / 2  # one look decides for both blocks of a stage
            assert look.get_total_flops() > 0
            assert 0 < cost < 0.005 * residual.get_total_flops()
        x, _ = block(x, seen)


def test_equal_logits_do_not_make_the_gradient_explode(rng):
    network = small(SLOPE).train()
    for block in network.blocks:
        if block.gate is not None:
            block.gate.opening.budget.prog = 1.0
            torch.nn.init.zeros_(block.gate.predictor.w2.weight)
            torch.nn.init.zeros_(block.gate.controller.w2.weight)
    network(images(32, rng)).logits.square().mean().backward()
    assert max(block.gate.controller.w2.weight.grad.abs().max() for block in network.blocks if block.gate) < 100


@pytest.mark.parametrize(
    "overrides",
    [
        ("trainer=debug",),
        ("trainer.precision=bf16-true", "trainer.max_epochs=1", "gate.quantile.fit=100", "objective.lambda_full=1"),
    ],
)
def test_it_trains_with_the_debug_trainer_and_in_other_precisions(overrides, tmp_path):
    pressed = ("objective.start_epoch=0", "objective.warmup_epochs=0", "trainer.limit_train_batches=3", "threads=1")
    assert train(config(*SMALL, *overrides, *pressed, f"runs_dir={tmp_path}")).status == "finished"


def test_the_best_epoch_is_one_at_the_budget(tmp_path, monkeypatch, capsys):
    """Accuracy falls from epoch to epoch: the best of all would be one whose gates still compute more."""
    monkeypatch.setattr(LitCosineGate, "_log_accuracy", falling_accuracy)
    late = ("trainer.max_epochs=4", "objective.start_epoch=1", "objective.warmup_epochs=1", "data.validation=holdout")
    record = train(config(*SMALL, *late, "trainer.limit_train_batches=3", "threads=1", f"runs_dir={tmp_path}"))
    assert record.accuracy.best_epoch == 3  # prog is 0, 0, 1, 1
    assert record.mean_gate < 0.9
    never = ("trainer.limit_train_batches=2", "objective.start_epoch=9", "threads=1")
    capsys.readouterr()
    early = train(config(*SMALL, *late, *never, f"runs_dir={tmp_path}"))
    assert early.accuracy.test_of == "last"
    said = "start_epoch = 9 and trainer.max_epochs = 4: this run ends before its gates are asked for their budget"
    assert said in " ".join(capsys.readouterr().out.split())


def falling_accuracy(self, stage, output, target):
    self.log(f"{stage}/acc", 1.0 - 0.1 * self.current_epoch, on_step=False, on_epoch=True, batch_size=len(target))


def masked(network, x):
    """The slow form: F for every sample, multiplied by 0 or 1; a sample at a time."""
    scores, routes = [], []
    for sample in x.split(1):
        y, seen, route = network.stem(sample), None, []
        for block in network.blocks:
            seen = geometry.pooled_statistics(y) if block.looks else seen
            z = 1.0 if block.gate is None else block.gate.decide(seen).gate.item()
            y = block.activation(block.shortcut(y) + z * block.residual(y))
            route.append(z)
        scores.append(network.head(y.mean((2, 3))))
        routes.append(route)
    return torch.cat(scores), torch.tensor(routes)


def thresholds_at_half(network, rng) -> None:
    from cosinegate.calibration import calibrate

    calibrate(network, [0.5] * sum(block.gate is not None for block in network.blocks), images(64, rng))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("gate.first_blocks=true",),
        ("gate.predictor.look=stage", "network.depth=20"),
        ("gate.predictor.look=stage", "gate.first_blocks=true"),
        ("network.shortcut=projection", "gate.first_blocks=true"),
        ("network.post_activation=false", "gate.first_blocks=true"),
        ("gate.controller.enabled=false",),
    ],
)
def test_evaluation_skips_f_and_gives_what_masking_gives(overrides, rng):
    network = small(*overrides).eval()
    thresholds_at_half(network, rng)
    network.double()  # no decision is left to rounding
    x = images(40, rng).double()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        output = network(x)
    with torch.no_grad():
        scores, routes = masked(network, x)
        with FlopCounterMode(display=False) as everything:
            copy.deepcopy(network).train()(x)
    torch.testing.assert_close(output.logits, scores, rtol=1e-5, atol=1e-5)
    assert torch.equal(output.routing.gates, routes)
    gated = [i for i, block in enumerate(network.blocks) if block.gate is not None]
    assert ((routes[:, gated].mean(0) > 0.1) & (routes[:, gated].mean(0) < 0.9)).all()
    assert counter.get_total_flops() < 0.9 * everything.get_total_flops()


@pytest.mark.parametrize("turn", [-torch.inf, torch.inf])
def test_all_open_and_all_closed_are_legal_batches(turn, rng):
    network = small().eval()
    for block in network.blocks:
        if block.gate is not None:
            block.gate.opening.threshold.fill_(turn)
    x = images(5, rng)
    with torch.no_grad():
        output = network(x)
        torch.testing.assert_close(output.logits, masked(network, x)[0], rtol=1e-5, atol=1e-5)
    gated = [i for i, block in enumerate(network.blocks) if block.gate is not None]
    assert (output.routing.gates[:, gated] == (turn < 0)).all()


def test_training_logs_how_well_it_predicts(tmp_path):
    record = train(
        config(*SMALL, f"runs_dir={tmp_path}", "threads=1", "trainer.max_epochs=2", "objective.start_epoch=0")
    )
    (folder,) = (tmp_path / "digits_predictive").glob("*-s*")
    header, *rows = (folder / "metrics.csv").read_text().splitlines()
    last = dict(zip(header.split(","), rows[-1].split(","), strict=True))
    for name in ("predict/r2", "predict/agreement", "predict/r2_block_01", "predict/agreement_block_05"):
        assert float(last[name]) < 1
    assert 0.5 <= float(last["predict/agreement"]) <= 1
    assert "predict/r2_block_00" not in last
    assert "cir/block_00" not in last
    assert "cir/block_01" in last
    assert (record.signal, record.calibration) == ("predicted", "quantile")
    assert record.flops.executed < 0.9


def test_statistics_are_standardised_by_the_moments_of_the_batches_so_far(rng):
    standardise = Standardise(5).train()
    batches = [torch.randn(size, 5, generator=rng) * 7 + 3 for size in (40, 1, 30)]
    for batch in batches[:1]:
        torch.testing.assert_close(standardise(batch), (batch - batch.mean(0)) / batch.std(0, correction=0))
    for batch in batches[1:]:
        standardise(batch)
    mean = sum(batch.mean(0) for batch in batches) / 3  # every batch alike while there are few
    deviation = (sum(batch.square().mean(0) for batch in batches) / 3 - mean.square()).sqrt()
    standardise.eval()
    for _ in range(2):  # evaluation changes nothing
        torch.testing.assert_close(standardise(batches[0]), (batches[0] - mean) / deviation)


def test_steep_gradients_do_not_kill_a_gate(rng):
    """Dead hidden units give all images one logit: a batch is routed by its order, and a threshold parts nothing."""
    torch.manual_seed(0)
    module = build_module(config(*SMALL, "network.depth=20", SLOPE)).train()
    gates = [block.gate for block in module.network.blocks if block.gate is not None]
    gates[0].opening.budget.prog = 1.0
    x = images(64, rng)
    sgd = torch.optim.SGD({p for gate in gates for p in gate.parameters()}, lr=1.0, momentum=0.9)
    for _ in range(30):
        sgd.zero_grad()
        module.objective(module.network(x), torch.arange(64) % 10).total.backward()
        sgd.step()
    logits = module.network(x).routing.logits[:, [i for i, b in enumerate(module.network.blocks) if b.gate is not None]]
    assert [len(torch.unique(logit)) for logit in logits.T] == [64] * len(gates)
