"""The paper's Algorithm 1, written from its lines and nothing else: a sample at a time, in float64, no shortcuts.

It shares the residual F_i and the weights with the network under test, and none of the mathematics.
"""

import math

import torch
from torch import Tensor


def gumbel(u: float) -> float:
    return -math.log(-math.log(u))


def dot(u: Tensor, v: Tensor) -> Tensor:
    return sum(u[k] * v[k] for k in range(len(u)))


def norm(u: Tensor) -> Tensor:
    return torch.sqrt(dot(u, u))


def controller(gate, x: Tensor) -> Tensor:
    """c(x) = W2 ReLU(W1 GAP(x)) for one sample x (C, H, W)."""
    pooled = torch.stack([x[c].sum() / x[c].numel() for c in range(len(x))])
    return (gate.controller.w2.weight @ torch.clamp(gate.controller.w1.weight @ pooled, min=0))[0]


def routing_and_loss(network, images, targets, uniforms, temperature, tau_target, t, warmup, lambda_cons, lambda_flops):
    """Lines 3-22. `uniforms` is (N, B, 2): u_0 (identity) and u_1 (residual) for every block and sample."""
    x = network.stem(images)
    cons = torch.zeros((), dtype=x.dtype)
    gates, cirs = [], []
    for i, block in enumerate(network.blocks):
        r = block.residual(x)
        s = block.shortcut(x)
        ys, zs = [], []
        for n in range(len(images)):
            u, v = s[n].reshape(-1), r[n].reshape(-1)
            cir = 1 - dot(u, v) / (norm(u) * norm(v))
            logit = block.gate.gamma * (cir + controller(block.gate, x[n]))
            two = torch.stack([torch.zeros_like(logit), logit])
            noise = torch.tensor([gumbel(float(uniforms[i, n, k])) for k in (0, 1)], dtype=two.dtype)
            z = torch.softmax((two + noise) / temperature, dim=0)[1]
            y = s[n] + z * r[n]
            full = (s[n] + r[n]).reshape(-1)
            gap = full / norm(full) - y.reshape(-1) / norm(y.reshape(-1))
            cons = cons + dot(gap, gap) / len(images)
            ys.append(y)
            zs.append(z)
            cirs.append(cir)
        x = block.activation(torch.stack(ys))
        gates.append(torch.stack(zs))
    logits = network.head(x.mean((2, 3)))
    ce = -torch.stack([torch.log_softmax(logits[n], 0)[targets[n]] for n in range(len(images))]).mean()
    mean_gate = torch.stack(gates).mean()
    flops = min(1.0, t / warmup) * torch.clamp(mean_gate - tau_target, min=0) ** 2
    total = ce + lambda_cons * cons + lambda_flops * flops
    n_blocks, batch = len(gates), len(images)
    return total, ce, cons, flops, torch.stack(gates).T, torch.stack(cirs).reshape(n_blocks, batch).T
