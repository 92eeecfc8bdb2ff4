"""Compile a run and export it, ONNX, int8 and safetensors: `python src/export.py run=runs/conservative/<run>`."""

from omegaconf import DictConfig

from cosinegate import cli


def task(config: DictConfig) -> None:
    from cosinegate.deploy.export import export, show

    show(export(config))


if __name__ == "__main__":
    cli.run(task, "export")
