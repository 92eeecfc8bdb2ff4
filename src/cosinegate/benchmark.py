"""What training costs, as ratios measured in one run: the gate, the framework, the data pipeline, the start.

Times on a shared machine mean little, their ratios more: what is compared takes turns, step by step or run by run,
and medians are taken.
"""

import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as L
import numpy as np
import torch
from omegaconf import DictConfig
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from cosinegate.build import build_module
from cosinegate.config import BenchConfig
from cosinegate.data.module import ImageData
from cosinegate.errors import UserError
from cosinegate.files import write_atomically
from cosinegate.lit import LitCosineGate
from cosinegate.objective import prog
from cosinegate.record import provenance, read_record

TRAIN = Path(__file__).parents[1] / "train.py"


class Figure(NamedTuple):
    """One measured figure and the bar it has to meet."""

    what: str
    value: float
    bar: str
    met: bool
    how: str


class Stamps(L.Callback):
    """Writes when each epoch began: between two of them lies all that an epoch costs, checkpoints included."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with self.path.open("a") as file:
            file.write(f"{time.time()}\n")


class PilImages(Dataset):
    """The training images as torchvision gives them: a PIL image at a time through its transforms."""

    def __init__(self, data: ImageData) -> None:
        images, labels = data.splits["train"]
        self.images, self.labels = images.squeeze(-1).numpy(), labels.numpy()
        crop = [transforms.RandomCrop(data.image_set.shape[0], padding=4), transforms.RandomHorizontalFlip()]
        normalise = transforms.Normalize(list(data.config.mean), list(data.config.std))
        self.transform = transforms.Compose([*crop, transforms.ToTensor(), normalise])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, np.int64]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def bench(asked: BenchConfig, gated: DictConfig, dense: DictConfig) -> list[Figure]:
    """Every figure, for the gated and the dense config of the same network."""
    torch.set_num_threads(asked.threads)
    data = ImageData(gated.data, seed=0)
    data.setup()
    first, dense_seconds = step_ratio(data, gated, dense, asked.steps)
    return [
        first,
        *pipeline(data, dense_seconds, asked.steps),
        *framework_ratio(data, gated, asked),
        start_to_first_step(asked.rounds),
    ]


def step_ratio(data: ImageData, gated: DictConfig, dense: DictConfig, steps: int) -> tuple[Figure, float]:
    """A training step of the gated network against the dense one's, the two taking turns; and the dense seconds."""
    seconds: dict[str, list[float]] = {"gated": [], "dense": []}
    step = {"gated": bare_step(build_module(gated)), "dense": bare_step(build_module(dense))}
    batches = itertools.chain.from_iterable(itertools.repeat(data.train_dataloader()))
    for _ in range(steps + 3):
        images, target = next(batches)
        for name in step:
            seconds[name].append(_seconds(functools.partial(step[name], images, target)))
    gated_s, dense_s = (statistics.median(seconds[name][3:]) for name in ("gated", "dense"))
    how = f"median of {steps} steps in turn: {1e3 * gated_s:.0f} / {1e3 * dense_s:.0f} ms"
    ratio = gated_s / dense_s
    return Figure("gated training step / dense training step", ratio, "<= 1.20", ratio <= 1.20, how), dense_s


def pipeline(data: ImageData, dense_seconds: float, steps: int) -> list[Figure]:
    """The loader's time a batch against a dense step's, and its images/s against PIL transforms in a DataLoader."""
    batches = itertools.chain.from_iterable(itertools.repeat(data.train_dataloader()))
    ours = statistics.median(_seconds(lambda: next(batches)) for _ in range(max(steps, 50)))
    size = data.config.batch_size
    rates = {}
    for workers in (0, 2):
        slow = iter(DataLoader(PilImages(data), size, shuffle=True, num_workers=workers))
        next(slow)
        rates[workers] = size * 20 / _seconds(lambda slow=slow: [next(slow) for _ in range(20)])
    best = max(rates, key=rates.get)
    share, times = ours / dense_seconds, size / ours / rates[best]
    how = f"{size / ours:.0f} / {rates[best]:.0f} (best of 0 and 2 workers: {best})"
    return [
        Figure("data pipeline / dense step", share, "<= 0.03", share <= 0.03, f"{1e3 * ours:.1f} ms a batch of {size}"),
        Figure("images/s / torchvision's PIL transforms in a DataLoader", times, ">= 20", times >= 20, how),
    ]


def framework_ratio(data: ImageData, gated: DictConfig, asked: BenchConfig) -> list[Figure]:
    """An epoch through train.py, from its start to the next one's, against the same work in a bare PyTorch loop."""
    ours, bare, memory = [], [], []
    limits = [f"trainer.limit_train_batches={asked.batches}", f"trainer.limit_val_batches={asked.val_batches}"]
    limits += ["trainer.max_epochs=2", "trainer.limit_test_batches=1", f"threads={asked.threads}"]
    limits += ["+callbacks.stamps._target_=cosinegate.benchmark.Stamps", f"data.root={gated.data.root}"]
    for seed in range(asked.rounds):
        with tempfile.TemporaryDirectory() as runs:
            stamps = Path(runs) / "stamps"
            own = [f"+callbacks.stamps.path={stamps}", f"seed={seed}"]
            record = _train(runs, f"+experiment={gated.name}", *limits, *own)
            first, second = map(float, stamps.read_text().split())
            ours.append(second - first)
            memory.append(record["peak_memory_mib"])
        bare.append(bare_epoch_seconds(data, gated, asked.batches, asked.val_batches))
    ratio = statistics.median(ours) / statistics.median(bare)
    how = f"{asked.batches} training and {asked.val_batches} validation batches, median of {asked.rounds} in turn: "
    how += f"{statistics.median(ours):.1f} / {statistics.median(bare):.1f} s"
    peak = max(memory) / 1024
    return [
        Figure("epoch through train.py / bare PyTorch loop", ratio, "<= 1.05", ratio <= 1.05, how),
        Figure(f"peak memory of training on {data.image_set.name}, GiB", peak, "< 3", peak < 3, "the runs above"),
    ]


def start_to_first_step(rounds: int) -> Figure:
    """From the start of the process to the end of the first step, imports and data loading included."""
    waits = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as runs:
            begin = time.time()
            waits.append(_train(runs, "+experiment=digits", "trainer.max_epochs=1")["first_step_at"] - begin)
    wait = statistics.median(waits)
    return Figure("start to first step of +experiment=digits, s", wait, "<= 15", wait <= 15, f"median of {rounds}")


def bare_step(module: LitCosineGate) -> Callable[[Tensor, Tensor], None]:
    """A training step without any framework: forward, objective, backward, SGD."""
    network, objective, config = module.network.train(), module.objective, module.optimizer_config
    objective.prog = prog(1, 0)
    sgd = torch.optim.SGD(network.parameters(), config.lr, config.momentum, weight_decay=config.weight_decay)

    def step(images: Tensor, target: Tensor) -> None:
        sgd.zero_grad()
        objective(network(images), target).total.backward()
        sgd.step()

    return step


def bare_epoch_seconds(data: ImageData, config: DictConfig, batches: int, val_batches: int) -> float:
    """Training and validation batches in plain loops; what is built before the first batch is not counted."""
    module = build_module(config)
    step, network = bare_step(module), module.network
    training, validation = data.train_dataloader(), data.val_dataloader()
    begin = time.perf_counter()
    for images, target in itertools.islice(training, batches):
        step(images, target)
    network.eval()
    right = 0
    with torch.inference_mode():
        for images, target in itertools.islice(validation, val_batches):
            right += (network(images).logits.argmax(1) == target).sum().item()
    return time.perf_counter() - begin


def write(figures: list[Figure], folder: Path) -> Path:
    """training.md and training.json; gives the path of the former."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = provenance() | {"threads": torch.get_num_threads()}
    content: dict[str, Any] = facts | {"figures": [figure._asdict() for figure in figures]}
    write_atomically(folder / "training.json", json.dumps(content, indent=2) + "\n")
    lines = [
        "# Training speed",
        "",
        f"`make bench`, {facts['threads']} threads, torch {facts['versions']['torch']}.",
        "",
    ]
    lines += ["| what | measured | bar | met | how |", "|---|---|---|---|---|"]
    lines += [f"| {f.what} | {f.value:.3f} | {f.bar} | {'yes' if f.met else 'no'} | {f.how} |" for f in figures]
    path = folder / "training.md"
    write_atomically(path, "\n".join(lines) + "\n")
    return path


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _train(runs: str, *overrides: str) -> dict[str, Any]:
    """Runs train.py in a process of its own; gives the run's record."""
    command = [sys.executable, str(TRAIN), *overrides, f"runs_dir={runs}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    (path,) = Path(runs).glob("*/*/record.json")
    return read_record(path.parent)
