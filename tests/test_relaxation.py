import math

import pytest
import torch

from cosinegate.config.choices import Annealing
from cosinegate.relaxation import Relaxation, anneal, gumbel_difference, relax, threshold_gate


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_relaxed_gate_is_the_residual_class_of_the_two_class_softmax(rng, temperature):
    logit = torch.randn(50, generator=rng, dtype=torch.float64)
    gumbel = -torch.log(-torch.log(torch.rand(50, 2, generator=rng, dtype=torch.float64)))
    two = torch.stack((torch.zeros_like(logit), logit), dim=1)
    slow = torch.softmax((two + gumbel) / temperature, dim=1)[:, 1]
    torch.testing.assert_close(relax(logit, gumbel[:, 1] - gumbel[:, 0], temperature, hard=False), slow)


def test_noise_is_distributed_as_the_difference_of_two_gumbels():
    torch.manual_seed(3)
    n = 200_000
    noise = gumbel_difference(torch.empty(n)).sort().values
    expected = torch.logit((torch.arange(n) + 0.5) / n)  # quantiles of the logistic distribution
    inner = slice(n // 100, -n // 100)
    assert (noise[inner] - expected[inner]).abs().max() < 0.1
    assert torch.isfinite(noise).all()
    gumbels = -torch.log(-torch.log(torch.rand(n, 2).clamp_min(1e-9)))
    difference = (gumbels[:, 1] - gumbels[:, 0]).sort().values
    assert (difference[inner] - expected[inner]).abs().max() < 0.1


def test_straight_through_has_hard_values_and_the_relaxed_gradient(rng):
    logit = torch.randn(20, generator=rng).requires_grad_()
    noise = torch.randn(20, generator=rng)
    hard, soft = relax(logit, noise, 0.7, hard=True), relax(logit, noise, 0.7, hard=False)
    assert set(hard.tolist()) == {0.0, 1.0}
    assert torch.equal(hard.detach(), (soft > 0.5).float())
    weights = torch.randn(20, generator=rng)
    (a,) = torch.autograd.grad((hard * weights).sum(), logit)
    (b,) = torch.autograd.grad((soft * weights).sum(), logit)
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("threshold", [0.1, 0.45, 0.5, 0.9])
def test_threshold_opens_strictly_above_delta(threshold):
    edge = math.log(threshold / (1 - threshold))
    logit = torch.tensor([edge - 1e-3, edge + 1e-3, -50.0, 50.0])
    assert threshold_gate(logit, threshold).tolist() == [0.0, 1.0, 0.0, 1.0]
    assert threshold_gate(torch.zeros(1), 0.5).item() == 0.0  # σ(0) is δ, not above it


def test_evaluation_uses_neither_noise_nor_temperature():
    relaxation = Relaxation(temperature=1.0, hard=False, threshold=0.45).eval()
    logit = torch.linspace(-2, 2, 9)
    before = torch.get_rng_state()
    first = relaxation(logit)
    relaxation.temperature = 0.01
    assert torch.equal(first, relaxation(logit))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, (torch.sigmoid(logit) > 0.45).float())


def test_training_without_noise_is_the_sigmoid():
    relaxation = Relaxation(temperature=2.0, hard=False, threshold=0.45)
    relaxation.noisy = False
    logit = torch.linspace(-2, 2, 9)
    torch.testing.assert_close(relaxation(logit), torch.sigmoid(logit / 2))


@pytest.mark.parametrize(
    ("annealing", "half"),
    [(Annealing.none, 2.0), (Annealing.linear, 1.25), (Annealing.exponential, 1.0), (Annealing.cosine, 1.25)],
)
def test_annealing_goes_from_start_to_end(annealing, half):
    assert anneal(annealing, 2.0, 0.5, 0.0) == pytest.approx(2.0)
    assert anneal(annealing, 2.0, 0.5, 0.5) == pytest.approx(half)
    assert anneal(annealing, 2.0, 0.5, 1.0) == pytest.approx(2.0 if annealing is Annealing.none else 0.5)
