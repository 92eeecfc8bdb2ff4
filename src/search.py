"""Search for accuracy at little compute: `python src/search.py +experiment=mnist search.trials=30`."""

from omegaconf import DictConfig

from cosinegate import cli
from cosinegate.config.checks import validate


def task(config: DictConfig) -> None:
    validate(config)
    from cosinegate.sweeps.search import search

    search(config)


if __name__ == "__main__":
    cli.run(task, "search")
