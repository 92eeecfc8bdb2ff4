"""Media for W&B: heat maps, CIR histograms and example images with their routes."""

from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
import matplotlib.pyplot as plt
import numpy as np

from cosinegate.callbacks.loggers import CarefulWandb, MetricsCSV
from cosinegate.callbacks.route_collector import RouteCollector
from cosinegate.callbacks.routes import Routes
from cosinegate.lit import LitCosineGate
from cosinegate.plots.heat_maps import block_by_epoch, class_by_block

if TYPE_CHECKING:
    import wandb

BY_EPOCH = ("train/*", "val/*", "gates/*", "cir/*", "flops/*", "schedule/*", "speed/*")
EXAMPLES = 16  # of the images that took the fewest blocks, and as many of those that took the most


class WandbMedia(L.Callback):
    """A callback that logs media to W&B, and does nothing without a W&B logger."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        for logger in _loggers(trainer):
            with logger.trying():
                run = logger.experiment
                run.define_metric("epoch")
                for names in BY_EPOCH:
                    run.define_metric(names, step_metric="epoch")
                run.define_metric("val/acc", step_metric="epoch", summary="max")
                run.define_metric("val/loss", step_metric="epoch", summary="min")

    def on_test_end(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        for logger in _loggers(trainer):
            with logger.trying():
                logger.experiment.log(self._media(trainer) | {"epoch": trainer.max_epochs - 1})

    def _media(self, trainer: L.Trainer) -> dict[str, Any]:
        import wandb  # takes seconds to load

        routes = next(c.routes for c in trainer.callbacks if isinstance(c, RouteCollector))
        image_set = trainer.datamodule.image_set
        images = trainer.datamodule.splits["test"][0].cpu().numpy()
        media = {"routes/examples": examples(routes, images, image_set.classes)}
        if routes.cir is None:
            return media
        rows = next(logger.rows for logger in trainer.loggers if isinstance(logger, MetricsCSV))
        figures = {
            "media/block_x_epoch": block_by_epoch(rows),
            "media/class_x_block": class_by_block(routes.by_class(len(image_set.classes)), image_set.classes),
        }
        media |= {name: wandb.Image(figure) for name, figure in figures.items()}
        for figure in figures.values():
            plt.close(figure)
        return media | {
            f"media/cir_block_{b:02d}": wandb.Histogram(routes.cir[:, b], num_bins=64) for b in routes.gated
        }


def examples(routes: Routes, images: np.ndarray, classes: tuple[str, ...]) -> "wandb.Table":
    """Returns a table of the images that took the fewest and the most blocks, with their routes."""
    import wandb

    table = wandb.Table(columns=["image", "class", "predicted", "blocks", "route"])
    for row in np.concatenate(routes.extremes(min(EXAMPLES, len(routes.index) // 2))):
        pixels = images[routes.index[row]]  # (H, W, C)
        route = "".join("■" if is_open else "□" for is_open in routes.open[row])
        words = classes[routes.label[row]], classes[routes.predicted[row]]
        table.add_data(
            wandb.Image(pixels.squeeze(-1) if pixels.shape[2] == 1 else pixels),
            *words,
            int(routes.computed[row]),
            route,
        )
    return table


def _loggers(trainer: L.Trainer) -> list[CarefulWandb]:
    if not trainer.is_global_zero:
        return []
    return [logger for logger in trainer.loggers if isinstance(logger, CarefulWandb) and not logger.failed]
