"""Measure training speed as ratios into results/bench: `python src/bench.py`. Exit code 1 if a bar is missed."""

import sys
from pathlib import Path

from omegaconf import DictConfig

from cosinegate import cli


def task(config: DictConfig) -> None:
    from cosinegate.benchmark import bench, write
    from cosinegate.console import say

    figures = bench(config, cli.compose("+experiment=conservative"), cli.compose("+experiment=resnet20"))
    path = write(figures, Path(config.folder))
    say(path.read_text())
    say(f"written to {path.parent}")
    if not all(figure.met for figure in figures):
        sys.exit("error: a bar was missed")


if __name__ == "__main__":
    cli.run(task, "bench")
