"""One HTML file about one run or several: `python src/report.py runs=[runs/mnist/<run>]`, or `make report RUN=...`."""

from omegaconf import DictConfig

from cosinegate import cli


def task(config: DictConfig) -> None:
    from cosinegate.report.page import report

    report(config)


if __name__ == "__main__":
    cli.run(task, "report")
