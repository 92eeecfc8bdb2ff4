"""Draws the run's curves when it ends."""

from pathlib import Path

import lightning.pytorch as L

from cosinegate.callbacks.loggers import MetricsCSV
from cosinegate.plots.curves import draw_curves


class Curves(L.Callback):
    """A callback that draws figures/curves.png: accuracy, efficiency, gate curves and the block x epoch heat map."""

    def __init__(self, run_dir: str) -> None:
        self.path = Path(run_dir) / "figures" / "curves.png"

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        rows = next(logger.rows for logger in trainer.loggers if isinstance(logger, MetricsCSV))
        if trainer.is_global_zero and rows:
            config = pl_module.hparams
            title = f"{config.name} on {config.data['name']}, seed {config.seed}"
            objective = config.objective
            target = objective["tau_target"] if objective["lambda_flops"] else None
            draw_curves(rows, self.path, title, target, objective["warmup_epochs"])
