"""The geometry of a residual block: three dot products for each sample, and what follows from them.

With s the identity path and r = F(x) the residual, the gate and the consistency term need only a = <s,s>, b = <s,r>, c
= <r,r>. No feature map is normalised, flattened into another layout or copied.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

TINY = 1e-12  # a squared norm at or below this counts as zero: its direction is undefined and gets no gradient


class Dots(NamedTuple):
    """The three dot products of a batch, each (B,) or, for several blocks, (B, N)."""

    a: Tensor  # <s,s>
    b: Tensor  # <s,r>
    c: Tensor  # <r,r>
    skew: Tensor  # always 0, with gradient r to s and -s to r: (b + skew) / 2 reaches s alone, (b - skew) / 2 r alone


LIBRARY = torch.library.Library("cosinegate", "DEF")
LIBRARY.define("three_dots(Tensor s, Tensor r) -> Tensor")
LIBRARY.define("statistics(Tensor x) -> Tensor")


@torch.library.impl(LIBRARY, "three_dots", "CompositeExplicitAutograd")
def three_dots(s: Tensor, r: Tensor) -> Tensor:
    """Returns (3, B): <s,s>, <s,r>, <r,r> of two (B, D) matrices. A custom operator, so that FLOP counters see it."""
    if s.dtype in (torch.float16, torch.bfloat16):  # thousands of terms: half precision would overflow or lose them
        s, r = s.float(), r.float()
    aa = torch.linalg.vector_norm(s, dim=1).square()
    cc = torch.linalg.vector_norm(r, dim=1).square()
    return torch.stack((aa, (s * r).sum(1), cc))


@register_flop_formula(torch.ops.cosinegate.three_dots)
def _three_dots_flops(s_shape: torch.Size, r_shape: torch.Size, *args, **kwargs) -> int:
    batch, size = s_shape
    return 3 * 2 * batch * size  # a multiplication and an addition each, as the counter counts convolutions


class _DotProducts(torch.autograd.Function):
    """Passes s and r through and adds their dot products, so that one backward pass sees every gradient at once:

    grad_s = grad_s' + 2·ga·s + gb·r and grad_r = grad_r' + gb·s + 2·gc·r.
    """

    @staticmethod
    def forward(ctx: Any, s: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(s, r)
        a, b, c = torch.ops.cosinegate.three_dots(*rows(s, r)).unbind()
        return s.view_as(s), r.view_as(r), a, b, c, torch.zeros_like(b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        grad_s, grad_r, ga, gb, gc, gk = grads
        s, r = ctx.saved_tensors
        shape = (-1,) + (1,) * (s.dim() - 1)
        ga, gb_s, gb_r, gc = (g.view(shape).to(s.dtype) for g in (2 * ga, gb + gk, gb - gk, 2 * gc))
        grad_s = torch.addcmul(grad_s, s, ga).addcmul_(r, gb_s)
        grad_r = torch.addcmul(grad_r, r, gc).addcmul_(s, gb_r)
        return grad_s, grad_r


def rows(*maps: Tensor) -> list[Tensor]:
    """Returns each (B, ...) as (B, D), all in one order; without a copy if all are channels_last."""
    if all(x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) for x in maps):
        maps = tuple(x.permute(0, 2, 3, 1) for x in maps)
    return [x.flatten(1) for x in maps]


def global_average_pool(x: Tensor) -> Tensor:
    """Returns the mean (B, C) of (B, C, H, W), computed so that its gradient is a view instead of a map."""
    if torch.compiler.is_compiling():
        return x.mean((2, 3))
    return x.permute(0, 2, 3, 1).flatten(1, 2).sum(1) / (x.shape[2] * x.shape[3])


def dot_products(s: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Dots]:
    """Returns s, r and their dot products. Use the returned s and r: their gradients join in one fused backward."""
    if torch.compiler.is_compiling():  # an exporter or a compiler takes plain operators alone
        flat_s, flat_r = rows(s, r)
        a, b, c = three_dots(flat_s, flat_r).unbind()
        skew = torch.zeros_like(b)
        if torch.is_grad_enabled() and b.requires_grad:
            skew = (flat_s * flat_r.detach() - flat_s.detach() * flat_r).sum(1)
        return s, r, Dots(a, b, c, skew)
    s, r, *dots = _DotProducts.apply(s, r)
    return s, r, Dots(*dots)


def pooled_statistics(x: Tensor) -> Tensor:
    """Returns each channel's mean, standard deviation and maximum, (B, C, H, W) -> (B, 3C), without gradients."""
    if torch.compiler.is_compiling():  # in as few operators as can be: for one image each takes as long as any other
        mean = x.mean((2, 3), keepdim=True)
        std = torch.linalg.vector_norm(x - mean, dim=(2, 3)) / math.sqrt(x.shape[2] * x.shape[3])
        return torch.cat((mean.flatten(1), std, x.amax((2, 3))), dim=1)
    return torch.ops.cosinegate.statistics(x.detach())


@torch.library.impl(LIBRARY, "statistics", "CompositeExplicitAutograd")
def statistics(x: Tensor) -> Tensor:
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    lines = x.permute(0, 2, 3, 1)  # in channels_last memory order, where a reduction over H runs over whole lines
    pixels = x.shape[2] * x.shape[3]
    mean = lines.sum(1).sum(1) / pixels
    std = (lines.square().sum(1).sum(1) / pixels - mean.square()).clamp_min(0).sqrt()
    return torch.cat((mean, std, lines.amax(1).amax(1)), dim=1)


@register_flop_formula(torch.ops.cosinegate.statistics)
def _statistics_flops(x_shape: torch.Size, *args, **kwargs) -> int:
    return 4 * x_shape.numel()  # a sum, a square and its sum, a comparison


def cosine(inner: Tensor, square_u: Tensor, square_v: Tensor) -> Tensor:
    """Returns <u,v> / (|u| |v|); 0, without a gradient, where u or v is zero; nan where either is."""
    defined = ~((square_u <= TINY) | (square_v <= TINY))
    one = torch.ones_like(square_u)
    norms = torch.where(defined, square_u, one).sqrt() * torch.where(defined, square_v, one).sqrt()
    ratio = torch.where(norms.isinf(), torch.nan, inner / norms)  # squares that overflowed say nothing
    return torch.where(defined, ratio, torch.zeros_like(inner)).clamp(-1.0, 1.0)


def cir(dots: Dots) -> Tensor:
    """The Cosine Incompatibility Ratio 1 - cos(s, r) in [0, 2] (Eq. 7), (B,); 1 where s or r is zero."""
    return 1.0 - cosine(dots.b, dots.a, dots.c)


def consistency(dots: Dots, z: Tensor, detach_target: bool = False) -> Tensor:
    """|Norm(s + r) - Norm(s + z·r)|² (Eq. 20) in closed form, of z's shape. Norm of a zero vector is the zero vector.

    With `detach_target` the full path s + r is a constant: the gradient reaches s and r through the gated path alone.
    """
    a, b, c, skew = dots
    full = a + 2 * b + c  # |s + r|²
    gated = a + 2 * z * b + z * z * c  # |s + z·r|²
    inner = a + (1 + z) * b + z * c  # <s + r, s + z·r>
    if detach_target:
        full = full.detach()
        inner = a.detach() + (1 + z) * b.detach() + z * c.detach()  # the value, and the gradient to z
        # zero in value; their gradients are those of <t, s + z·r> for the constant t = s + r: t to s and z·t to r
        to_s = 0.5 * (a - a.detach() + b - b.detach() + skew)
        to_r = 0.5 * (c - c.detach() + b - b.detach() - skew)
        inner = inner + to_s + z.detach() * to_r
    unit = (full > TINY).to(z.dtype) + (gated > TINY).to(z.dtype)  # |Norm(.)|² of both
    return (unit - 2 * cosine(inner, full, gated)).clamp_min(0.0)
