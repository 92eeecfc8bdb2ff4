"""python examples/own_model.py: a residual network of one's own, gated, trained, compiled, given exits and exported.

It trains on the 8x8 digits inside scikit-learn, so it needs no download and takes half a minute on one core.
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import cosinegate


class Block(nn.Module):
    """x + F(x) of tokens (B, N, C)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


@cosinegate.parts(Block)
def block_parts(block: Block) -> list[cosinegate.Part]:  # what F is; s is the identity
    return [cosinegate.Part([block.norm, block.mlp], channels_last=True)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, 32, 2, stride=2)
        self.blocks = nn.Sequential(*(Block(32) for _ in range(5)))
        self.head = nn.Linear(16 * 32, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images).flatten(2).transpose(1, 2)  # (B, 16, 32)
        return self.head(self.blocks(tokens).flatten(1))


def accuracy(scores: Tensor, labels: Tensor) -> str:
    return f"{(scores.argmax(1) == labels).float().mean():.2%}"


torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], torch.tensor(digits.target)
train, held_out, test = slice(0, 1100), slice(1100, 1400), slice(1400, None)
loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=50, shuffle=True)

net = cosinegate.add_gates(Model(), gate="cosine", polarity="novelty", gamma=2.5, example=images[:2])
loss = cosinegate.CosineGateLoss(lambda_flops=30, lambda_cons=0.01, tau_target=0.5, warmup_epochs=5)
sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for epoch in range(int(sys.argv[1]) if len(sys.argv) > 1 else 20):
    for x, y in loader:
        sgd.zero_grad()
        loss(net(x), y, epoch=epoch).total.backward()
        sgd.step()

with torch.no_grad():
    out = net.eval()(images[test])
    print(f"trained:  {accuracy(out.logits, labels[test])}, mean gate {out.routing.gates.mean():.2f}")
    small, changes = cosinegate.compile_gates(net, images[held_out], dynamic="round")
    for change in changes.blocks:
        print(f"  {change}")
    print(
        f"compiled: {accuracy(small(images[test]), labels[test])}, {changes.computed} of {len(changes.blocks)} blocks"
    )
early = cosinegate.add_exits(small, loader, budget=0.9, after=[0])
with torch.no_grad():
    out = early(images[test])
    left = out.routing.gates[:, -1].mean()
    print(f"exits:    {accuracy(out.logits, labels[test])}, {left:.0%} of the images go on after block 0")
path = Path("own_model.onnx")
batch = ({0: torch.export.Dim("batch", min=1)},)
torch.onnx.export(small, (images[:3],), path, dynamo=True, dynamic_shapes=batch, verbose=False)
print(f"written to {path}")
