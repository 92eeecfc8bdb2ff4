"""The sweeper that Hydra loads. Its work is in `cosinegate.sweeps.jobs`."""

from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


class CosineGateSweeper(Sweeper):
    """A grid and single points, on any launcher. Finished jobs are skipped, and a failed one stops no other."""

    def __init__(self, params: dict[str, Any] | None, points: list[list[str]] | None, dry_run: bool) -> None:
        self.params = OmegaConf.to_container(params) if OmegaConf.is_config(params) else params or {}
        self.points = OmegaConf.to_container(points) if OmegaConf.is_config(points) else points or []
        self.dry_run = dry_run

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.hydra_context = hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        from cosinegate.sweeps.jobs import plan, run  # not before they are needed: Hydra imports every plugin
        from cosinegate.terminal.errors import UserError

        if not isinstance(self.params, dict):
            raise UserError(f"hydra.sweeper.params = {self.params}: must be keys with their values")
        if not isinstance(self.points, list) or not all(isinstance(point, list) for point in self.points):
            raise UserError(f"hydra.sweeper.points = {self.points}: must be a list of lists of overrides")
        loader = self.hydra_context.config_loader
        jobs = plan(loader, self.config, self.params, self.points, arguments)
        run(jobs, self.launcher, self.config.hydra.launcher, self.dry_run)
