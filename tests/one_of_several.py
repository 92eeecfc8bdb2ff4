"""One of several processes that train a few steps with every gate: `one_of_several.py <rank> <world size> <folder>`.

Writes the losses of its steps; the mean over the processes is the loss of the global batch.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cosinegate import cli
from cosinegate.callbacks.schedule import ShareOut
from cosinegate.hardware.processes import Share
from cosinegate.hardware.sync_batchnorm import SyncBatchNormOnCPU
from cosinegate.training.build import build_module

CASES = {
    "cosine": "cosinegate",
    "cosine_novelty": "flops",
    "cir_only": "cosinegate",
    "controller_only": "two_sided",
    "aig": "per_block",
    "skipnet": "two_sided",
    "constant": "two_sided",
    "random": "plain",
}
IMAGES = 11  # the first of two processes has one more


def losses(gate: str, rank: int, world: int) -> list[float]:
    small = ["data=digits", "network.depth=8", "network.width=4"]
    module = build_module(cli.compose(f"gate={gate}", f"objective={CASES[gate]}", *small)).double().train()
    forward = module.network
    if world > 1:
        forward = DistributedDataParallel(SyncBatchNormOnCPU().apply(module.network))
    half = (IMAGES + 1) // 2
    share = Share(IMAGES, 0, IMAGES, 1) if world == 1 else Share(IMAGES, half * rank, IMAGES if rank else half, world)
    loader = SimpleNamespace(share=lambda step: share)
    optimizer = torch.optim.SGD([p for p in module.network.parameters() if p.requires_grad], lr=0.1)
    found = []
    for step in range(3):
        torch.manual_seed(step)
        images, target = torch.randn(IMAGES, 1, 8, 8).double(), torch.randint(10, (IMAGES,))
        ShareOut().on_train_batch_start(SimpleNamespace(world_size=world, train_dataloader=loader), module, None, step)
        mine = slice(share.start, share.stop)
        loss = module.objective(forward(images[mine]), target[mine], epoch=0).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


if __name__ == "__main__":
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    found = {gate: losses(gate, rank, world) for gate in CASES}
    (folder / f"{rank}of{world}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
