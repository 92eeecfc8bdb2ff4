"""Accuracy against compute over all runs, into runs/figures: `python src/pareto.py`, or `make pareto`."""

import sys

from omegaconf import DictConfig

from cosinegate import cli


def task(config: DictConfig) -> None:
    from cosinegate.analysis.tables import pareto

    pareto(config, " ".join(sys.argv))


if __name__ == "__main__":
    cli.run(task, "pareto")
