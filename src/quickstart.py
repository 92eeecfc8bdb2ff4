"""Train, compile, export and time a network: `python src/quickstart.py +experiment=quickstart`.

It takes the same overrides as src/train.py.
"""

import sys

from omegaconf import DictConfig

from cosinegate import cli
from cosinegate.config.identity import run_folder
from cosinegate.terminal.errors import UserError

TIMED = ("batches=[1,64]", "rounds=5", "torch_compile=false", "threads=1")


def task(config: DictConfig) -> None:
    from cosinegate.deploy import benchmark, benchmark_table, export
    from cosinegate.terminal import console
    from cosinegate.train import train

    where = f"run={run_folder(config)}"
    if train(config).gate == "none":
        return console.say("a dense network has no gates, so there is nothing to compile")
    card = export.export(cli.compose(where, "threads=1", config_name="export"))
    export.show(card)
    timed = benchmark.benchmark(cli.compose(where, *TIMED, config_name="benchmark"))
    benchmark_table.show(timed)
    console.say("")
    console.say(benchmark_table.in_short(timed, card))


if __name__ == "__main__":
    if any(word in ("-m", "--multirun") or word.startswith("+sweeps=") for word in sys.argv):
        cli.end(UserError("-m, +sweeps: a multirun is for src/train.py, not for quickstart.py"))
    cli.run(task, "train")
