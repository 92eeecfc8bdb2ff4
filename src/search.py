"""Search for accuracy at little compute: `python src/search.py +experiment=mnist search.trials=30`."""

from omegaconf import DictConfig

from cosinegate import cli


def task(config: DictConfig) -> None:
    from cosinegate.sweeps.space import search_space

    space = search_space(config)  # a mistake is answered before torch loads
    from cosinegate.sweeps.search import search

    search(config, space)


if __name__ == "__main__":
    cli.run(task, "search")
