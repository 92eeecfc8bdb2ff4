"""One checkpoint, a whole frontier: `python src/calibrate.py run=runs/predictive_balanced/<run>`."""

from omegaconf import DictConfig

from cosinegate import cli
from cosinegate.config import require


def task(config: DictConfig) -> None:
    require(config)
    from cosinegate.deploy.frontier import frontier, show

    show(frontier(config))


if __name__ == "__main__":
    cli.run(task, "calibrate")
