"""Measure training speed as ratios: `python src/training_speed.py`. Exit code 1 if a bar is missed."""

import sys
from pathlib import Path

from omegaconf import DictConfig

from cosinegate import cli


def task(config: DictConfig) -> None:
    from cosinegate.analysis.training_speed import bench, require_own_files, write
    from cosinegate.terminal.console import say

    require_own_files(Path(config.output))
    experiment = f"+experiment={config.name}"
    figures = bench(config, cli.compose(experiment), cli.compose("+experiment=resnet20"))
    path = write(figures, Path(config.output))
    for line in path.read_text().splitlines():
        say(line)
    say(f"written to {path.parent}")
    if not all(figure.met for figure in figures):
        sys.exit("error: a bar was missed")


if __name__ == "__main__":
    cli.run(task, "training_speed")
