"""A figure of a run: accuracy, efficiency, a curve for every gate, and the block x epoch heat map."""

import math
from pathlib import Path

import matplotlib
import numpy as np

from cosinegate.runs.files import replacing
from cosinegate.runs.record import Row

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

plt.rcParams["text.parse_math"] = False  # a name with dollars in it is a name

LABEL = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
SETTLED = 0.02  # routing has settled once the mean gate stays this close to its last value


def phases(rows: dict[int, Row], warmup_epochs: float) -> list[tuple[str, float, float]]:
    """Returns the paper's three phases as (name, left edge, right edge) in epochs, by a rule that fits every run.

    I, exploration: prog(t) is below a half. II, constraint: from there until the warmup is over and the mean gate stays
    within 0.02 of its last value. III, convergence: the rest. A phase that a run does not reach is left out.
    """
    epochs = sorted(epoch for epoch, row in rows.items() if "gates/mean" in row)
    if not epochs:
        return []
    gates = np.array([rows[epoch]["gates/mean"] for epoch in epochs])
    strays = np.flatnonzero(np.abs(gates - gates[-1]) > SETTLED)
    settled = epochs[strays[-1] + 1] if len(strays) else epochs[0]
    second = warmup_epochs / 2 + 1  # epoch e runs with t = e - 1
    third = max(settled, math.ceil(warmup_epochs) + 1)
    last = epochs[-1]
    bounds = [("I exploration", 1.0, second), ("II constraint", second, third), ("III convergence", third, last + 1.0)]
    return [(name, start - 0.5, min(end, last + 1) - 0.5) for name, start, end in bounds if start < min(end, last + 1)]


def draw_curves(rows: dict[int, Row], path: Path, title: str, tau_target: float | None, warmup_epochs: float) -> None:
    """Writes the figure as PNG; without a `tau_target`, and so a penalty, it has no prog(t), target or phases."""
    figure = curves_figure(rows, title, tau_target, warmup_epochs)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=120)
    plt.close(figure)


def curves_figure(rows: dict[int, Row], title: str, tau_target: float | None, warmup_epochs: float) -> Figure:
    """Returns the figure with its four panels."""
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    figure.suptitle(title)
    accuracy, efficiency, curves, heat = axes.flat
    gated = any("gates/relaxed_mean" in row for row in rows.values())
    blocks = sorted({name for row in rows.values() for name in row if name.startswith("gates/block_")})

    _plot(accuracy, rows, "train/acc", "train", 100)
    _plot(accuracy, rows, "val/acc", "validation", 100)
    accuracy.set(title="Accuracy", ylabel="%")
    accuracy.legend()
    _draw_efficiency(efficiency, rows, gated, tau_target)
    _draw_gates(curves, rows, blocks)
    _draw_heat_map(heat, rows, blocks)

    marked = phases(rows, warmup_epochs) if gated and tau_target is not None else []
    for axis in axes.flat:
        _mark_epochs(axis, sorted(rows), marked)
    for axis in (accuracy, efficiency, curves):
        axis.grid(alpha=0.3)
    if marked:
        words = "phases: " + ", ".join(name for name, *_ in marked)
        figure.text(0.995, 0.985, words, ha="right", va="top", fontsize="small")
    return figure


def _draw_efficiency(axis: Axes, rows: dict[int, Row], gated: bool, tau_target: float | None) -> None:
    _plot(axis, rows, "gates/mean", "mean gate, hard (counted FLOPs)")
    _plot(axis, rows, "flops/executed", "executed FLOPs / dense", linestyle="--")
    if gated:
        _plot(axis, rows, "gates/relaxed_mean", "mean gate, relaxed (training)")
    if gated and tau_target is not None:
        _plot(axis, rows, "schedule/prog", "prog(t)", color="0.6", linestyle="-.")
        axis.axhline(tau_target, color="0.3", linestyle=":", label=f"target {tau_target:g}")
    axis.set(title="Efficiency", ylim=(-0.02, 1.2))
    axis.legend(fontsize="small")


def _draw_gates(axis: Axes, rows: dict[int, Row], blocks: list[str]) -> None:
    """Draws a curve for each block."""
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.95, max(len(blocks), 1)))
    for index, name in enumerate(blocks):
        _plot(axis, rows, name, f"{index}", color=colours[index])
    axis.set(title="Fraction of the images that compute each block", ylim=(-0.02, 1.12), xlabel="epoch")
    if blocks:
        axis.legend(title="block", fontsize="x-small", ncols=3)


def _draw_heat_map(axis: Axes, rows: dict[int, Row], blocks: list[str]) -> None:
    epochs = sorted(rows)
    table = np.stack([_series(rows, name) for name in blocks]) if blocks else np.full((1, len(epochs)), np.nan)
    edges = (epochs[0] - 0.5, epochs[-1] + 0.5, len(table) - 0.5, -0.5)
    image = axis.imshow(table, aspect="auto", extent=edges, vmin=0, vmax=1, cmap="cividis", interpolation="nearest")
    axis.set(title="Block x epoch", xlabel="epoch", ylabel="block")
    axis.set_yticks(range(len(table)))
    axis.figure.colorbar(image, ax=axis, label="open fraction")


def _mark_epochs(axis: Axes, epochs: list[int], marked: list[tuple[str, float, float]]) -> None:
    """Puts whole epochs on the axis, and marks where the phases begin."""
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.set_xlim(epochs[0] - 0.5, epochs[-1] + 0.5)
    for name, start, end in marked:
        if start > epochs[0] - 0.5:
            axis.axvline(start, color="0.5", linewidth=0.8, linestyle="--")
        style = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "top", "bbox": LABEL}
        axis.annotate(name.split()[0], ((start + end) / 2, 0.985), fontsize="small", color="0.2", **style)


def _plot(axis: Axes, rows: dict[int, Row], name: str, label: str, scale: float = 1.0, **style: object) -> None:
    marker = "." if len(rows) < 30 else ""
    axis.plot(sorted(rows), scale * _series(rows, name), marker=marker, label=label, **style)


def _series(rows: dict[int, Row], name: str) -> np.ndarray:
    return np.array([rows[epoch].get(name, np.nan) for epoch in sorted(rows)])
