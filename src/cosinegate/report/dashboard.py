"""The W&B workspace, defined in code: accuracy, gates, geometry, compute and sweep."""

import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws

EPOCH = "epoch"


def build_workspace(entity: str, project: str) -> ws.Workspace:
    """Returns the workspace that `make dashboard` saves."""
    sections = [_accuracy(), _gates(), _geometry(), _compute(), _sweep()]
    return ws.Workspace(entity=entity, project=project, name="CosineGate", sections=sections)


def _accuracy() -> ws.Section:
    return ws.Section(
        name="Accuracy",
        is_open=True,
        panels=[
            _curves("accuracy", "train/acc", "val/acc"),
            _curves("loss", "train/loss", "val/loss"),
            _curves("loss terms, raw", "train/loss_ce", "train/loss_cons", "train/loss_flops"),
            _curves("loss terms, weighted", "train/loss_ce", "train/weighted_cons", "train/weighted_flops"),
            _curves("learning rate", "schedule/lr"),
        ],
    )


def _gates() -> ws.Section:
    return ws.Section(
        name="Gates",
        is_open=True,
        panels=[
            _curves("mean gate against the target", "gates/mean", "gates/relaxed_mean", "gates/target"),
            _curves("skipped, %", "gates/skip_percent"),
            wr.LinePlot(title="open fraction, a curve a block", x=EPOCH, metric_regex=r"gates/block_\d+"),
            _curves("dynamic blocks and paths", "gates/dynamic_blocks", "gates/paths"),
            _curves("prog(t) and temperature", "schedule/prog", "schedule/temperature"),
            wr.MediaBrowser(title="heat maps", media_keys=["media/block_x_epoch", "media/class_x_block"]),
            wr.WeavePanelSummaryTable(table_name="routes/examples"),
        ],
    )


def _geometry() -> ws.Section:
    return ws.Section(
        name="Geometry",
        panels=[
            wr.LinePlot(title="mean CIR, a curve a block", x=EPOCH, metric_regex=r"cir/block_\d+"),
            wr.MediaBrowser(title="CIR histograms", media_keys=[f"media/cir_block_{b:02d}" for b in range(9)]),
        ],
    )


def _compute() -> ws.Section:
    return ws.Section(
        name="Compute",
        panels=[
            _curves("FLOPs: executed against counted", "flops/executed", "flops/counted"),
            _curves("images/s", "speed/images_per_second"),
        ],
    )


def _sweep() -> ws.Section:
    return ws.Section(
        name="Sweep",
        panels=[
            wr.ScatterPlot(title="accuracy against the mean gate", x=_summary("gates/mean"), y=_summary("val/acc.max")),
            wr.ScatterPlot(
                title="accuracy against executed FLOPs", x=_summary("flops/executed"), y=_summary("val/acc.max")
            ),
            wr.ParallelCoordinatesPlot(
                title="what was varied and what came of it",
                columns=[
                    wr.ParallelCoordinatesPlotColumn(wr.Config("objective.lambda_flops")),
                    wr.ParallelCoordinatesPlotColumn(wr.Config("objective.tau_target")),
                    wr.ParallelCoordinatesPlotColumn(wr.Config("gate.gamma.init")),
                    wr.ParallelCoordinatesPlotColumn(_summary("gates/mean")),
                    wr.ParallelCoordinatesPlotColumn(_summary("val/acc.max")),
                ],
            ),
        ],
    )


def _curves(title: str, *names: str) -> wr.LinePlot:
    return wr.LinePlot(title=title, x=EPOCH, y=list(names))


def _summary(name: str) -> wr.SummaryMetric:
    return wr.SummaryMetric(name)
