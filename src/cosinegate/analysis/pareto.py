"""Draws accuracy against compute over many runs, and writes the points as Markdown and as CSV."""

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

from cosinegate.analysis.frontier import Point, hypervolume, on_frontier
from cosinegate.analysis.quoted import QUOTED, Quoted
from cosinegate.analysis.runs import ABSOLUTE, ALL_NETWORKS, Configuration, Family, Run
from cosinegate.runs.outputs import require_own, save_figure, write_text
from cosinegate.terminal.escape import code, csv_cell, markdown

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

plt.rcParams["svg.hashsalt"] = "cosinegate"  # the same runs, the same file
plt.rcParams["text.parse_math"] = False  # a name with dollars in it is a name
AXES = {
    "counted": "FLOPs counted: mean gate (the paper's figure)",
    "executed": "FLOPs executed / dense network's (measured; compiled, where a run has it)",
    "mflops": "MFLOPs executed an image (measured)",
    "latency": "latency in ms an image (measured)",
}
FORMATS = {"mflops": ("MFLOPs", "{:.2f}"), "latency": ("ms an image", "{:.3f}")}  # columns that a table gets
CHANCE = 0.1  # ten classes
MOST_NAMES = 40  # points of the frontier that a figure has room to name; the tables name all
MARK = "CosineGate pareto"
HEADER = "on_frontier,configuration,identity,experiment,seed,data,"  # of the CSV
TABLE = r"# [^\n]*\n\n[^\n]*\. Best first; ★ is on the frontier of test accuracy and "
MARGIN = 1.1  # the reference lies this far beyond the dense network, or beyond the slowest run


def mark(configurations: list[Configuration], x: str) -> list[Configuration]:
    """Returns the configurations that have the cost, each marked as on or off the frontier of the means."""
    measured = [group for group in configurations if any(run.cost(x) is not None for run in group.runs)]
    for group, flag in zip(measured, on_frontier(points(measured, x)), strict=True):
        group.on_frontier = flag
    return measured


def points(configurations: list[Configuration], x: str) -> list[Point]:
    return [(group.cost(x)[0], group.accuracy()[0]) for group in configurations]


def reference_point(configurations: list[Configuration], x: str) -> Point:
    """Returns the corner (cost, accuracy) that a hypervolume is measured from."""
    dearest = max(group.cost(x)[0] for group in configurations) if x in ABSOLUTE else 1.0
    return MARGIN * dearest, CHANCE


def stem(family: Family, x: str) -> str:
    data, network, epochs, chosen_on = family
    length = "unknown" if epochs is None else epochs
    return f"{data}-{network}-{length}epochs-{'' if chosen_on == 'test' else f'{chosen_on}-'}{x}"


def title(family: Family) -> str:
    data, network, epochs, chosen_on = family
    words = [data, "all networks" if network == ALL_NETWORKS else network]
    words.append("epochs not recorded" if epochs is None else f"{epochs} epochs")
    return ", ".join(words + ([] if chosen_on == "test" else [f"chosen on {chosen_on}"]))


def paths(family: Family, x: str, folder: Path) -> list[Path]:
    """Returns the paths of one family's PNG, SVG, CSV and Markdown files."""
    return [folder / f"{stem(family, x)}.{kind}" for kind in ("png", "svg", "csv", "md")]


def require_own_files(family: Family, x: str, folder: Path) -> None:
    """Raises UserError where a file of another program has one of the names."""
    png, svg, table, text = paths(family, x, folder)
    require_own({table: HEADER, text: TABLE}, {png: MARK, svg: MARK})


def write_pareto(
    family: Family, configurations: list[Configuration], x: str, reference: Point, folder: Path, command: str
) -> list[Path]:
    png, svg, table, text = paths(family, x, folder)
    draw(family, configurations, x, [png, svg])
    write_text(table, as_csv(configurations))
    write_text(text, as_markdown(family, configurations, x, reference, command))
    return [png, svg, table, text]


def draw(family: Family, configurations: list[Configuration], x: str, files: list[Path]) -> None:
    """Draws every run, the mean of its seeds with its spread, and the frontier; the paper's points apart, as quoted."""
    data, network, *_ = family
    figure, axis = plt.subplots(figsize=(9, 6.5), layout="constrained")
    axis.margins(x=0.12, y=0.08)
    dense = [group for group in configurations if group.is_dense]
    _draw_runs(axis, [group for group in configurations if not group.is_dense], x, "C0", "o")
    _draw_runs(axis, dense, x, "black", "s")
    handles = [
        plt.Line2D([], [], color="C0", marker="o", label="gated: mean ± std over seeds"),
        plt.Line2D([], [], color="C0", marker="o", linestyle="", markersize=4, alpha=0.35, label="every run"),
        plt.Line2D([], [], color="C1", label="frontier of the means"),
        *(_elsewhere(axis, configurations) if x == "executed" else []),
    ]
    if dense:
        label = "dense" if network == ALL_NETWORKS else f"dense {network.partition('-')[0]}"
        handles.append(plt.Line2D([], [], color="black", marker="s", label=label))
    quoted = QUOTED.get(data, []) if x == "counted" else []
    if quoted:
        axis.plot([q.counted for q in quoted], [100 * q.accuracy for q in quoted], "D", color="grey", fillstyle="none")
        label = "quoted from the paper (ResNet-20), not measured"
        handles.append(plt.Line2D([], [], color="grey", marker="D", fillstyle="none", linestyle="", label=label))
    _draw_frontier(axis, configurations, x, quoted)
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=3)
    runs = sum(len(group.runs) for group in configurations)
    executed = [run.cost("trained") for group in configurations for run in group.runs]
    axis.set(xlabel=AXES[x], ylabel="test accuracy, hard gates (%)")
    axis.set_title(
        f"{title(family)}: {len(configurations)} configurations, {runs} runs\n"
        f"FLOPs executed as trained: {min(executed):.3f} to {max(executed):.3f} of the same network's without gates"
    )
    axis.grid(alpha=0.3)
    for path in files:
        save_figure(figure, path, MARK, dpi=150)
    plt.close(figure)


def _draw_runs(axis: Axes, configurations: list[Configuration], x: str, colour: str, marker: str) -> None:
    """Draws a small point for each run, and a large one with its spread for each configuration."""
    if not configurations:
        return
    runs = [run for group in configurations for run in group.runs if run.cost(x) is not None]
    axis.scatter([run.cost(x) for run in runs], [100 * run.accuracy for run in runs], 14, colour, alpha=0.35)
    costs, accuracies = [group.cost(x) for group in configurations], [group.accuracy() for group in configurations]
    axis.errorbar(
        [mean for mean, _ in costs],
        [100 * mean for mean, _ in accuracies],
        xerr=[math.nan if std is None else std for _, std in costs],
        yerr=[math.nan if std is None else 100 * std for _, std in accuracies],
        fmt=marker,
        color=colour,
        ecolor=(colour, 0.5),
        capsize=3,
        elinewidth=1,
    )


def _draw_frontier(axis: Axes, configurations: list[Configuration], x: str, quoted: list[Quoted]) -> None:
    """Draws the frontier as steps, and names its configurations and the quoted points."""
    best = [group for group in configurations if group.on_frontier]
    steps = sorted(points(best, x))
    axis.step(
        [cost for cost, _ in steps], [100 * accuracy for _, accuracy in steps], where="post", color="C1", zorder=1
    )
    named = best[:: -(-len(best) // MOST_NAMES)] if best else []  # of a longer frontier every second, third, ...
    words = [(group.cost(x)[0], group.accuracy()[0], group.label, "black") for group in named]
    _annotate(axis, words + [(q.counted, q.accuracy, q.name, "grey") for q in quoted])


def _elsewhere(axis: Axes, configurations: list[Configuration]) -> list[plt.Line2D]:
    """Draws gated points at their counted FLOPs (hollow), and as trained (crosses) where compiling moved them."""
    hollow = {"marker": "o", "color": "C0", "fillstyle": "none", "linestyle": "", "label": "counted (the paper's)"}
    crossed = {"marker": "x", "color": "C0", "linestyle": "", "label": "executed as trained"}
    gated = [group for group in configurations if not group.is_dense]
    moved = [group for group in gated if _is_compiled(group)]
    drawn = [(gated, "counted", hollow)] * bool(gated) + [(moved, "trained", crossed)] * bool(moved)
    for some, x, style in drawn:
        axis.plot([group.cost(x)[0] for group in some], [100 * group.accuracy()[0] for group in some], **style)
    costs = [[group.cost(x)[0] for x in ("counted", "executed", "trained")] for group in gated]
    heights, ends = [100 * group.accuracy()[0] for group in gated], (list(map(min, costs)), list(map(max, costs)))
    axis.hlines(heights, *ends, color="C0", linewidth=0.6, alpha=0.5)
    return [plt.Line2D([], [], **style) for _, _, style in drawn]


def _annotate(axis: Axes, words: list[tuple[float, float, str, str]]) -> None:
    """Writes the names of points (x, accuracy, name, colour) beside them; points at one place share a label."""
    axis.autoscale_view()
    left, right = axis.get_xlim()
    places: dict[tuple[float, float, str], list[str]] = {}
    for x, accuracy, name, colour in words:
        places.setdefault((x, accuracy, colour), []).append(name)
    for (x, accuracy, colour), names in places.items():
        on_the_right = x > left + 0.6 * (right - left)
        side = {"ha": "right", "xytext": (-7, 4)} if on_the_right else {"ha": "left", "xytext": (7, -11)}
        axis.annotate(
            " | ".join(names), (x, 100 * accuracy), textcoords="offset points", fontsize=8, color=colour, **side
        )


def as_csv(configurations: list[Configuration]) -> str:
    """Returns a CSV table with a row for each run."""
    rows = [_row(group, run) for group in configurations for run in group.runs]
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows({name: csv_cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _row(group: Configuration, run: Run) -> dict[str, Any]:
    record = run.record
    return {
        "on_frontier": group.on_frontier,
        "configuration": group.label,
        "identity": record.identity,
        "experiment": record.experiment,
        "seed": record.seed,
        "data": record.data,
        "epochs": record.epochs.done,
        "planned_epochs": record.epochs.planned,
        "test_accuracy": run.accuracy,
        "peak_accuracy": record.accuracy.best,
        "selected_on": record.selected_on,
        "counted": run.cost("counted"),
        "executed": run.cost("trained"),
        "compiled": run.cost("compiled"),
        "latency_ms": run.cost("latency"),
        "dynamic_blocks": record.dynamic_blocks,
        "paths": record.paths,
        "folder": run.folder.as_posix(),
    }


def as_markdown(family: Family, configurations: list[Configuration], x: str, reference: Point, command: str) -> str:
    """Returns a Markdown table with a row for each configuration, the paper's figures apart, and the command."""
    quoted = QUOTED.get(family[0], [])
    area = hypervolume(points(configurations, x), reference)
    lines = [
        f"# {markdown(title(family))}",
        "",
        f"{code(f'python {command}')}. Best first; ★ is on the frontier of test accuracy and {x}.",
        "Test accuracy with hard gates, mean ± standard deviation over seeds.",
        f"Hypervolume {area:.4f}, up to the reference ({x} {reference[0]:.3g}, accuracy {reference[1]:.3g}).",
        "",
        f"| {' | '.join(columns(x))} |",
        "|---" * len(columns(x)) + "|",
    ]
    lines += [f"| {' | '.join(map(markdown, row))} |" for row in rows(configurations, x)]
    if quoted:
        lines += [
            "",
            "Quoted from the paper (ResNet-20), not measured:",
            "",
            "| | accuracy | counted |",
            "|---|---|---|",
        ]
        lines += [f"| {q.name} | {100 * q.accuracy:.1f}% | {q.counted:.3f} |" for q in quoted]
    return "\n".join(lines) + "\n"


def columns(x: str) -> list[str]:
    measured = [FORMATS[x][0]] if x in FORMATS else []
    names = ["", "configuration", "seeds", "test accuracy", "counted", "executed", "compiled", *measured]
    return [*names, "dynamic blocks", "paths", "chosen on"]


def rows(configurations: list[Configuration], x: str) -> list[list[str]]:
    """Returns the cells of each configuration's row as text."""
    return [
        [
            "★" if group.on_frontier else "",
            group.label,
            str(len(group.runs)),
            spread(group.accuracy(), lambda v: f"{100 * v:.2f}%"),
            spread(group.cost("counted"), lambda v: f"{v:.3f}"),
            spread(group.cost("trained"), lambda v: f"{v:.3f}"),
            spread(group.cost("compiled"), lambda v: f"{v:.3f}") if _is_compiled(group) else "",
            *([spread(group.cost(x), FORMATS[x][1].format)] if x in FORMATS else []),
            f"{group.over_seeds(lambda run: run.record.dynamic_blocks)[0]:.3g} of {len(group.first.blocks_open)}",
            f"{group.over_seeds(lambda run: run.record.paths)[0]:.3g}",
            group.first.selected_on,
        ]
        for group in configurations
    ]


def _is_compiled(group: Configuration) -> bool:
    return any(run.cost("compiled") is not None for run in group.runs)


def spread(figure: tuple[float, float | None], words: Callable[[float], str]) -> str:
    mean, std = figure
    return words(mean) if std is None else f"{words(mean)} ± {words(std)}"
