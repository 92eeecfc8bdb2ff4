"""Train a network: `python src/train.py +experiment=conservative`. Any key of `conf/` can be overridden."""

from omegaconf import DictConfig

from cosinegate import cli


def task(config: DictConfig) -> float:
    from cosinegate.train import train

    return train(config, cli.current_job()).accuracy.best


if __name__ == "__main__":
    cli.run(task, "train")
