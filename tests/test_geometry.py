import pytest
import torch
import torch.nn.functional as F

from cosinegate import geometry
from cosinegate.geometry import cir, consistency, dot_products


def maps(rng, batch=3, channels=4, size=5, dtype=torch.float64):
    s = torch.randn(batch, channels, size, size, generator=rng, dtype=dtype)
    r = torch.randn(batch, channels, size, size, generator=rng, dtype=dtype)
    return s, r


def slow_consistency(s, r, z, detach_target=False):
    full = F.normalize((s + r).flatten(1), dim=1)
    gated = F.normalize((s + z.view(-1, 1, 1, 1) * r).flatten(1), dim=1)
    return ((full.detach() if detach_target else full) - gated).square().sum(1)


def test_dot_products_are_sums_over_everything_but_the_batch(rng):
    s, r = maps(rng)
    _, _, dots = dot_products(s, r)
    expected = [(s * s).sum((1, 2, 3)), (s * r).sum((1, 2, 3)), (r * r).sum((1, 2, 3)), torch.zeros(3).double()]
    for found, value in zip(dots, expected, strict=True):
        torch.testing.assert_close(found, value)


def test_fused_backward_passes_gradcheck(rng):
    def whole(s, r):
        s, r, dots = dot_products(s, r)
        return s * 2, r * 3, dots.a, dots.b, dots.c

    assert torch.autograd.gradcheck(whole, tuple(x.requires_grad_() for x in maps(rng, size=2)))


def test_skew_sends_the_gradient_of_b_to_one_side_alone(rng):
    s, r = (x.requires_grad_() for x in maps(rng))
    _, _, dots = dot_products(s, r)
    to_s = torch.autograd.grad((dots.b + dots.skew).sum() / 2, (s, r), retain_graph=True)
    to_r = torch.autograd.grad((dots.b - dots.skew).sum() / 2, (s, r))
    torch.testing.assert_close(to_s, (r, torch.zeros_like(r)))
    torch.testing.assert_close(to_r, (torch.zeros_like(s), s))


@pytest.mark.parametrize("detach_target", [False, True])
def test_consistency_and_its_gradient_equal_the_explicit_form(rng, detach_target):
    s, r = maps(rng)
    z = torch.rand(3, generator=rng, dtype=torch.float64)
    weights = torch.rand(3, generator=rng, dtype=torch.float64)
    grads = []
    for fast in (True, False):
        s_, r_, z_ = (x.clone().requires_grad_() for x in (s, r, z))
        if fast:
            _, _, dots = dot_products(s_, r_)
            value = consistency(dots, z_, detach_target)
        else:
            value = slow_consistency(s_, r_, z_, detach_target)
        (value * weights).sum().backward()
        grads.append((value.detach(), s_.grad, r_.grad, z_.grad))
    for fast, slow in zip(*grads, strict=True):
        torch.testing.assert_close(fast, slow)


def test_cir_and_its_gradient_equal_cosine_similarity(rng):
    s, r = (x.requires_grad_() for x in maps(rng))
    fast = cir(dot_products(s, r)[2])
    slow = 1 - F.cosine_similarity(s.flatten(1), r.flatten(1))
    torch.testing.assert_close(fast, slow)
    for a, b in zip(
        torch.autograd.grad(fast.square().sum(), (s, r)),
        torch.autograd.grad(slow.square().sum(), (s, r)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_cir_spans_0_aligned_1_orthogonal_2_opposed():
    s = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]).view(3, 2, 1, 1)
    r = torch.tensor([[3.0, 0.0], [0.0, 0.5], [-2.0, 0.0]]).view(3, 2, 1, 1)
    assert cir(dot_products(s, r)[2]).tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(("s_scale", "r_scale"), [(1, 0), (0, 1), (0, 0), (1, 1e-25), (1e15, 1e15), (1e-15, 1)])
def test_degenerate_maps_give_finite_values_and_gradients(rng, s_scale, r_scale):
    s, r = maps(rng, dtype=torch.float32)
    s, r = (s * s_scale).requires_grad_(), (r * r_scale).requires_grad_()
    z = torch.full((3,), 0.5, requires_grad=True)
    s2, r2, dots = dot_products(s, r)
    value = cir(dots).sum() + consistency(dots, z).sum() + (s2.sum() + r2.sum()) * 0
    value.backward()
    for tensor in (value, s.grad, r.grad, z.grad):
        assert torch.isfinite(tensor).all()
    assert ((cir(dots) >= 0) & (cir(dots) <= 2)).all()
    assert (consistency(dots, z) >= 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_maps_are_summed_in_single_precision(rng, dtype):
    s, r = (30 * x.to(dtype) for x in maps(rng, channels=64, size=16, dtype=torch.float32))
    z = torch.full((3,), 0.9)
    half, single = (dot_products(*pair)[2] for pair in ((s, r), (s.float(), r.float())))
    torch.testing.assert_close(cir(half), cir(single))
    torch.testing.assert_close(consistency(half, z), consistency(single, z))
    s.requires_grad_()
    (grad,) = torch.autograd.grad(cir(dot_products(s, r)[2]).sum(), s)
    assert grad.dtype is dtype
    assert torch.isfinite(grad).all()


def test_zero_residual_has_cir_one_and_no_drift():
    s = torch.ones(2, 3, 2, 2)
    _, _, dots = dot_products(s, torch.zeros_like(s))
    assert cir(dots).tolist() == [1.0, 1.0]
    assert consistency(dots, torch.zeros(2)).tolist() == [0.0, 0.0]


def test_channels_last_equals_contiguous_and_is_not_copied(rng):
    s, r = maps(rng, dtype=torch.float32)
    last = [x.contiguous(memory_format=torch.channels_last) for x in (s, r)]
    assert geometry.rows(*last)[0].data_ptr() == last[0].data_ptr()
    for a, b in zip(dot_products(s, r)[2], dot_products(*last)[2], strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(geometry.global_average_pool(last[0]), s.mean((2, 3)))
    mixed = dot_products(last[0], r)[2]  # a layout that differs between the two must not shuffle the pairs
    torch.testing.assert_close(mixed.b, dot_products(s, r)[2].b)


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
