"""Save the W&B workspace of the project: `python src/dashboard.py`, or `make dashboard`. Needs a W&B account."""

from omegaconf import DictConfig

from cosinegate import cli
from cosinegate.terminal.errors import UserError


def task(config: DictConfig) -> None:
    from cosinegate.callbacks.loggers import has_account, require_answer, wandb_settings

    if not has_account():
        raise UserError(
            "a dashboard lives on W&B's server: log in once with `wandb login`, then `make dashboard` again"
        )
    import wandb

    from cosinegate.report.dashboard import build_workspace

    try:
        require_answer(str(wandb_settings().base_url))
        entity = config.entity or wandb.Api().default_entity
        saved = build_workspace(entity, config.project).save()
    except (wandb.Error, ValueError, OSError) as error:
        raise UserError(f"W&B did not take the workspace: {error}") from error
    print(f"saved  {saved.url}")


if __name__ == "__main__":
    cli.run(task, "dashboard")
