"""Measure training speed as ratios into results/bench: `python src/bench.py`. Exit code 1 if a bar is missed."""

import sys
from pathlib import Path

from omegaconf import DictConfig

from cosinegate import cli
from cosinegate.config import require_positive


def task(config: DictConfig) -> None:
    require_positive(config, "threads", "steps", "batches", "val_batches", "rounds")
    from cosinegate.benchmark import bench, require_own_files, write
    from cosinegate.console import say

    require_own_files(Path(config.folder))
    experiment = f"+experiment={config.name}"
    figures = bench(config, cli.compose(experiment), cli.compose(experiment, "gate=none"))
    path = write(figures, Path(config.folder))
    for line in path.read_text().splitlines():
        say(line)
    say(f"written to {path.parent}")
    if not all(figure.met for figure in figures):
        sys.exit("error: a bar was missed")


if __name__ == "__main__":
    cli.run(task, "bench")
