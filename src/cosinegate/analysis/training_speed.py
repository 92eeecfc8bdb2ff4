"""Measures what training costs, as ratios: the gate, the framework, the data pipeline, the start.

The speed of a shared machine drifts. So what is compared runs in turns, step by step or run by run, and medians are
taken.
"""

import copy
import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
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

from cosinegate.config.commands import TrainingSpeedConfig
from cosinegate.config.schema import OptimizerConfig
from cosinegate.data.module import ImageData
from cosinegate.hardware.memory import keep_freed_memory
from cosinegate.lit import LitCosineGate
from cosinegate.networks import ResNet
from cosinegate.objective import CosineGateLoss
from cosinegate.runs.outputs import require_own, write_text
from cosinegate.runs.record import Record, provenance, read_record
from cosinegate.terminal.errors import UserError
from cosinegate.training.build import build_module

TRAIN = Path(__file__).parents[2] / "train.py"


class Figure(NamedTuple):
    """A measured figure and the bar that it has to meet."""

    what: str
    value: float
    bar: str
    met: bool
    how: str


class Rival(L.Callback):
    """A callback that runs, after each batch of train.py, a batch of the same kind in a bare PyTorch loop.

    The time of an epoch without the rival's batches is train.py's own: loading, steps, validation, logging, record and
    checkpoints.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_fit_start(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        self.network = copy.deepcopy(pl_module.network)
        objective, data = copy.deepcopy(pl_module.objective), trainer.datamodule
        self.step = bare_step(self.network, objective, pl_module.optimizer_config)
        self.training, self.validation = (_endless(data.train_dataloader()), _endless(data.val_dataloader()))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        now = time.perf_counter()
        if trainer.current_epoch > 0:
            with self.path.open("a") as file:
                file.write(f"{now - self.begin - self.seconds} {self.seconds}\n")
        self.begin, self.seconds = now, 0.0

    def on_train_batch_end(self, *hook: Any) -> None:
        self.network.train()
        self.seconds += _seconds(lambda: self.step(*next(self.training)))

    def on_validation_batch_end(self, *hook: Any) -> None:
        self.network.eval()
        self.seconds += _seconds(lambda: bare_correct(self.network, *next(self.validation)))


RIVAL = f"{__name__}.{Rival.__name__}"


class PilImages(Dataset):
    """The training images through torchvision's transforms, one PIL image at a time."""

    def __init__(self, data: ImageData) -> None:
        images, labels = data.splits["train"]
        self.images, self.labels = images.squeeze(-1).numpy(), labels.numpy()
        crop = [transforms.RandomCrop(data.image_set.shape[0], padding=data.config.crop_padding)]
        crop += [transforms.RandomHorizontalFlip()] if data.config.flip else []
        normalise = transforms.Normalize(list(data.config.mean), list(data.config.std))
        self.transform = transforms.Compose([*crop, transforms.ToTensor(), normalise])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, np.int64]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def bench(options: TrainingSpeedConfig, gated: DictConfig, dense: DictConfig) -> list[Figure]:
    """Returns every figure, for the gated and the dense config of the same network."""
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as train.py does: what is compared differs in the network or the framework alone
    data = ImageData(gated.data, seed=0)
    data.setup()
    first, dense_seconds = step_ratio(data, gated, dense, options.steps)
    return [
        first,
        *pipeline(data, dense_seconds, options.steps),
        *framework_ratio(gated, options),
        start_to_first_step(options.rounds),
        side_by_side(gated, options),
    ]


def step_ratio(data: ImageData, gated: DictConfig, dense: DictConfig, steps: int) -> tuple[Figure, float]:
    """Returns the time of a gated training step over a dense one's, taken in turns, and the dense step's seconds."""
    seconds: dict[str, list[float]] = {"gated": [], "dense": []}
    modules = {"gated": build_module(gated), "dense": build_module(dense)}
    step = {name: bare_step(module.network, module.objective, gated.optimizer) for name, module in modules.items()}
    batches = _endless(data.train_dataloader())
    for _ in range(steps + 3):
        images, target = next(batches)
        for name in step:
            seconds[name].append(_seconds(functools.partial(step[name], images, target)))
    gated_s, dense_s = (statistics.median(seconds[name][3:]) for name in ("gated", "dense"))
    how = f"median of {steps} steps in turn: {1e3 * gated_s:.0f} / {1e3 * dense_s:.0f} ms"
    ratio = gated_s / dense_s
    return Figure("gated training step / dense training step", ratio, "<= 1.20", ratio <= 1.20, how), dense_s


def pipeline(data: ImageData, dense_seconds: float, steps: int) -> list[Figure]:
    """Returns the loader's time for a batch over a dense step's, and its images/s over those of PIL transforms."""
    batches = _endless(data.train_dataloader())
    ours = statistics.median(_seconds(lambda: next(batches)) for _ in range(max(steps, 50)))
    size = data.config.batch_size
    rates = {}
    for workers in (0, 2):
        slow = _endless(DataLoader(PilImages(data), size, shuffle=True, num_workers=workers))
        next(slow)
        rates[workers] = size * 80 / _seconds(lambda slow=slow: [next(slow) for _ in range(80)])
    best = max(rates, key=rates.get)
    share, times = ours / dense_seconds, size / ours / rates[best]
    how = f"{size / ours:.0f} / {rates[best]:.0f} (best of 0 and 2 workers: {best})"
    return [
        Figure("data pipeline / dense step", share, "<= 0.03", share <= 0.03, f"{1e3 * ours:.1f} ms a batch of {size}"),
        Figure("images/s / torchvision's PIL transforms in a DataLoader", times, ">= 20", times >= 20, how),
    ]


def framework_ratio(gated: DictConfig, options: TrainingSpeedConfig) -> list[Figure]:
    """Returns the time of an epoch through train.py over a bare PyTorch loop's on the same batches."""
    limits = [f"trainer.limit_train_batches={options.batches}", f"trainer.limit_val_batches={options.val_batches}"]
    limits += [f"trainer.max_epochs={options.rounds + 1}", "trainer.limit_test_batches=1", f"threads={options.threads}"]
    with tempfile.TemporaryDirectory() as runs:
        path = Path(runs) / "rival"
        rival = [f"+callbacks.rival._target_={RIVAL}", f"+callbacks.rival.path={path}"]
        record = _train(runs, f"+experiment={gated.name}", *limits, *rival, f"data.root={gated.data.root}")
        epochs = [tuple(map(float, line.split())) for line in path.read_text().splitlines()]
    ours, bare = (sum(seconds) for seconds in zip(*epochs, strict=True))
    ratio = ours / bare
    how = (
        f"{options.rounds} epochs of {options.batches} training and {options.val_batches} validation batches in turn: "
    )
    how += f"{ours:.1f} / {bare:.1f} s"
    peak = record.peak_memory_mib / 1024
    return [
        Figure("epoch through train.py / bare PyTorch loop", ratio, "<= 1.05", ratio <= 1.05, how),
        Figure(
            f"peak memory of training on {gated.data.name.name}, GiB",
            peak,
            "< 3",
            peak < 3,
            "at most: with the bare loop and its data in one process",
        ),
    ]


def start_to_first_step(rounds: int) -> Figure:
    """Returns the time from the start of the process to the end of the first step, imports and data included."""
    waits = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as runs:
            begin = time.time()
            waits.append(_train(runs, "+experiment=digits", "trainer.max_epochs=1").first_step_at - begin)
    wait = statistics.median(waits)
    return Figure("start to first step of +experiment=digits, s", wait, "<= 15", wait <= 15, f"median of {rounds}")


def side_by_side(gated: DictConfig, options: TrainingSpeedConfig) -> Figure:
    """Returns the time of two jobs side by side, with the cores divided among them, over one after the other."""
    limits = [f"trainer.limit_train_batches={options.batches}", "trainer.max_epochs=1", "trainer.limit_val_batches=1"]
    job = ["-m", f"+experiment={gated.name}", "seed=0,1", *limits, "trainer.limit_test_batches=1"]
    rates: dict[str, list[float]] = {"basic": [], "joblib": []}
    for launcher in [*rates] * max(1, options.rounds // 2):
        with tempfile.TemporaryDirectory() as runs:
            own = [f"threads={options.threads}"]
            if launcher == "joblib":
                own = [f"threads={max(1, options.threads // 2)}", "hydra.launcher.n_jobs=2"]
            own += [f"hydra/launcher={launcher}", f"data.root={gated.data.root}"]
            records = _train_all(runs, *job, *own)
            rates[launcher].append(sum(record.images_per_second for record in records))
    together, alone = statistics.median(rates["joblib"]), statistics.median(rates["basic"]) / 2
    how = f"{together:.0f} images/s of two jobs, {alone:.0f} of one, in turn"
    ratio = alone / together
    return Figure("two jobs with joblib / one after the other", ratio, "<= 1.00", ratio <= 1.0, how)


def bare_step(network: ResNet, objective: CosineGateLoss, config: OptimizerConfig) -> Callable[[Tensor, Tensor], None]:
    """Returns a training step without any framework: forward, objective, backward, SGD."""
    sgd = torch.optim.SGD(network.parameters(), config.lr, config.momentum, weight_decay=config.weight_decay)

    def step(images: Tensor, target: Tensor) -> None:
        sgd.zero_grad()
        objective(network(images), target, epoch=0).total.backward()
        sgd.step()

    return step


def bare_correct(network: ResNet, images: Tensor, target: Tensor) -> int:
    with torch.inference_mode():
        return (network(images).logits.argmax(1) == target).sum().item()


def _endless(loader: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def require_own_files(folder: Path) -> None:
    """Raises UserError where a file of another program has one of the names."""
    own = {"training.json": r'\{\s*"versions": \{.*"figures": \[', "training.md": "# Training speed\n\n`make bench`"}
    require_own({folder / name: pattern for name, pattern in own.items()})


def write(figures: list[Figure], folder: Path) -> Path:
    """Writes training.md and training.json, and returns the path of training.md."""
    facts = provenance() | {"threads": torch.get_num_threads()}
    content: dict[str, Any] = facts | {"figures": [figure._asdict() for figure in figures]}
    write_text(folder / "training.json", json.dumps(content, indent=2) + "\n")
    lines = [
        "# Training speed",
        "",
        f"`make bench`, {facts['threads']} threads, torch {facts['versions']['torch']}.",
        "",
    ]
    lines += ["| what | measured | bar | met | how |", "|---|---|---|---|---|"]
    lines += [f"| {f.what} | {f.value:.3f} | {f.bar} | {'yes' if f.met else 'no'} | {f.how} |" for f in figures]
    path = folder / "training.md"
    write_text(path, "\n".join(lines) + "\n")
    return path


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _train(runs: str, *overrides: str) -> Record:
    """Runs train.py in its own process and returns the run's record."""
    (record,) = _train_all(runs, *overrides)
    return record


def _train_all(runs: str, *overrides: str) -> list[Record]:
    command = [sys.executable, str(TRAIN), *overrides, f"runs_dir={runs}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return [read_record(path.parent) for path in Path(runs).glob("*/*-s*/record.json")]
