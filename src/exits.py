"""Give a trained network early exits: `python src/exits.py run=runs/resnet20/<run> budgets=[0.9]`."""

from omegaconf import DictConfig

from cosinegate import cli


def task(config: DictConfig) -> None:
    from cosinegate.deploy.exits.command import exits, show

    show(exits(config))


if __name__ == "__main__":
    cli.run(task, "exits")
