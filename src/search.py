"""Search for accuracy at little compute: `python src/search.py +experiment=mnist search.trials=30`."""

from omegaconf import DictConfig

from cosinegate import cli
from cosinegate.config import validate
from cosinegate.errors import UserError


def task(config: DictConfig) -> None:
    validate(config)
    if cli.current_job() is not None:
        raise UserError("-m: a search chooses its own trials, one after the other; leave -m out")
    from cosinegate.search import search

    search(config)


if __name__ == "__main__":
    cli.run(task, "search")
