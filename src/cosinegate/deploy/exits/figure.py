"""Draws accuracy over executed FLOPs of a network with exits, by budget."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from cosinegate.runs.outputs import save_figure

MARK = "CosineGate exits"
plt.rcParams["text.parse_math"] = False  # a name with dollars in it is a name


def draw_frontier(frontier: dict[str, Any], path: Path) -> None:
    """Draws a frontier, as `measure_frontier` returns it."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    points = sorted(frontier["points"], key=lambda point: point["executed"])
    executed, accuracy = [p["executed"] for p in points], [100 * p["accuracy"] for p in points]
    axes.plot(executed, accuracy, "o-", color="tab:blue", label="with exits, by budget")
    own = frontier["own"]
    axes.plot([own["executed"]], [100 * own["accuracy"]], "s", color="black", label="the network without exits")
    for point, x, y in zip(points, executed, accuracy, strict=True):
        axes.annotate(
            f"{point['budget']:g}", (x, y), textcoords="offset points", xytext=(0, -12), ha="center", fontsize=8
        )
    axes.set(xlabel="FLOPs executed (dense network = 1)", ylabel="test accuracy (%)")
    axes.set_title(f"{frontier['name']}: early exits after blocks {frontier['after']}", fontsize=10)
    axes.legend(fontsize=8, loc="lower right")
    axes.grid(alpha=0.3)
    axes.margins(0.12)
    save_figure(figure, path, MARK, dpi=150)
    plt.close(figure)
