"""A table of every gate, into runs/figures: `python src/table.py`, or `make table`."""

import shlex
import sys

from omegaconf import DictConfig

from cosinegate import cli


def task(config: DictConfig) -> None:
    from cosinegate.analysis.peers import table

    table(config, shlex.join(sys.argv))


if __name__ == "__main__":
    cli.run(task, "table")
