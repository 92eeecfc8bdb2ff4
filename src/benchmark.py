"""Time a run's deployed forms against the dense network: `python src/benchmark.py run=runs/<experiment>/<run>`."""

from omegaconf import DictConfig

from cosinegate import cli


def task(config: DictConfig) -> None:
    from cosinegate.deploy.benchmark import benchmark
    from cosinegate.deploy.benchmark_table import show

    show(benchmark(config))


if __name__ == "__main__":
    cli.run(task, "benchmark")
