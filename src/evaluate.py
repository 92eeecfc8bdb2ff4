"""Evaluate a run with hard gates: `python src/evaluate.py run=runs/mnist/<run>`; `json=true` for machines."""

import json

from omegaconf import DictConfig

from cosinegate import cli


def task(config: DictConfig) -> None:
    from cosinegate.evaluate import evaluate, show

    result = evaluate(config)
    if config.json:
        print(json.dumps(result[0], indent=2))
    else:
        show(*result)


if __name__ == "__main__":
    cli.run(task, "evaluate")
