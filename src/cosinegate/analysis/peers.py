"""A table and a figure of every gate on one schedule, with the command of each row.

Measured figures and those that the paper quotes have separate columns.
"""

import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import matplotlib
import numpy as np

from cosinegate.analysis.pareto import spread, title
from cosinegate.analysis.quoted import QUOTED, Quoted
from cosinegate.analysis.runs import Configuration, Family, families, find_runs, mark_early
from cosinegate.analysis.tables import chosen_folders
from cosinegate.config.commands import TableConfig
from cosinegate.config.identity import FIGURES, NOT_IDENTITY
from cosinegate.runs.dynamic import routed_percent
from cosinegate.runs.outputs import require_own, save_figure, write_text
from cosinegate.runs.record import Record
from cosinegate.terminal.console import complain, say
from cosinegate.terminal.errors import UserError
from cosinegate.terminal.escape import code, markdown, printable

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

COLUMNS = ("row", "gate", "network", "seeds", "test accuracy", "counted", "executed", "compiled", "dynamic blocks")
COLUMNS += ("distinct paths", "skipped by routing", "latency ratio", "parameters")
COLUMNS += ("paper: accuracy", "paper: counted", "command")
QUOTES = {  # how the paper's names for a row begin, by ours
    "cifar10": {"resnet20": "ResNet-20", "skipnet": "SkipNet"}
    | {name: name for name in ("aggressive", "balanced", "conservative")},
    "mnist": {"mnist": "MNIST", "balanced": "MNIST"},
}
POINTS_ALONE = ("+sweeps=peers", "+sweeps=peers_mnist")  # their jobs are commands of their own
NAMES = {"none": "dense"}
UNKNOWN = "-"
MARK, TITLE = "CosineGate table", "# Every gate on one schedule"
HINT = "python src/train.py -m +sweeps={} trains some"


def table(config: TableConfig, command: str) -> None:
    """Writes the table, and a figure beside it, from the records of the runs."""
    hint = HINT.format(config.sweep or "peers")
    folders = chosen_folders(config, hint, alone=True)
    path = Path(config.path or Path(config.runs_dir) / FIGURES / f"{config.sweep or _name(folders)}.md")
    figure = path.parent / f"{path.stem}.png"
    require_own({path: TITLE}, {figure: MARK})
    skipped: list[str] = []
    runs = find_runs(folders, skipped.append)
    if not runs:
        where = f"the sweep {config.sweep}" if config.sweep else ", ".join(map(str, folders))
        raise UserError(f"no finished run in {where}{''.join(f' ({words})' for words in skipped[:1])}: {hint}")
    for words in skipped:
        complain(words)
    by_family = families(runs, "mflops")
    write_text(path, as_markdown(by_family, command, figure.name))
    draw(by_family, figure)
    for written in (path, figure):
        say(f"written  {written}")


def _name(folders: list[Path]) -> str:
    """Returns the table's file name: that of the one folder of records, or `peers`."""
    return folders[0].resolve().name if len(folders) == 1 else "peers"


def reference(rows: list[Configuration]) -> Configuration | None:
    """Returns the dense network that FLOPs and times are ratios to: the largest that was trained."""
    dense = [row for row in rows if row.is_dense and row.first.flops.dense_per_image is not None]
    return max(dense, key=lambda row: row.first.flops.dense_per_image, default=None)


def ratio(row: Configuration, to: Configuration | None, x: str) -> tuple[float, float | None] | None:
    """Returns the row's cost over the dense network's, or None where either is unknown."""
    if to is None or any(run.cost(x) is None for run in (*row.runs, *to.runs)):
        return None
    base = to.cost(x)[0]
    return row.over_seeds(lambda run: run.cost(x) / base)


def executed(row: Configuration, to: Configuration | None) -> tuple[float, float | None]:
    """Returns executed FLOPs over the reference network's, or over the same network's without gates."""
    return ratio(row, to, "trained_mflops") or row.cost("trained")


def compiled(row: Configuration, to: Configuration | None) -> tuple[float, float | None] | None:
    """Returns the compiled network's FLOPs over the reference's, over the seeds that have them; None if none has."""
    known = [run for run in row.runs if run.cost("compiled") is not None]
    if not known:
        return None
    some = Configuration(known)
    return ratio(some, to, "compiled_mflops") or some.cost("compiled")


def quotes(row: Configuration) -> list[Quoted]:
    data = row.first.data
    begin = QUOTES.get(data, {}).get(row.first.experiment)
    return [quoted for quoted in QUOTED.get(data, []) if begin is not None and quoted.name.startswith(begin)]


def command_of(row: Configuration) -> str:
    """Returns the command that trains the row on any machine."""
    record, seeds = row.first, sorted(run.record.seed for run in row.runs)
    overrides = record.overrides
    if overrides is None or any(_key(word) == "sweeps" and word not in POINTS_ALONE for word in overrides):
        words = [UNKNOWN] if record.command is None else record.command.split()
        return " ".join(["python", *(word for word in words if not _is_machines(word))])
    kept = [word for word in overrides if word not in POINTS_ALONE and _key(word) != "seed" and not _is_machines(word)]
    several = ["-m"] if len(seeds) > 1 else []
    return shlex.join(["python", "src/train.py", *several, *kept, f"seed={','.join(map(str, seeds))}"])


def _key(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


def _is_machines(word: str) -> bool:
    """Returns whether an override only says where a run is kept or how it is shown."""
    return _key(word).startswith("hydra") or _key(word) in set(NOT_IDENTITY) - {"name", "seed"}


def cells(row: Configuration, to: Configuration | None) -> dict[str, str]:
    """Returns the row's cells by column."""
    record, latency = row.first, (1.0, None) if row is to else _time_ratio(row)
    dynamic, _ = row.over_seeds(lambda run: run.record.dynamic_blocks)
    paths, _ = row.over_seeds(lambda run: run.record.paths)
    small = compiled(row, to)
    said = [(q.name.partition(", ")[2], q) for q in quotes(row)]
    values: dict[str, Any] = {
        "row": f"{record.experiment}{mark_early(record)}",
        "gate": _gate(record),
        "network": row.runs[0].family[1],
        "seeds": len(row.runs),
        "test accuracy": spread(row.accuracy(), lambda v: f"{100 * v:.2f}%"),
        "counted": spread(row.cost("counted"), lambda v: f"{v:.3f}"),
        "executed": spread(executed(row, to), lambda v: f"{v:.3f}"),
        "compiled": UNKNOWN if small is None else spread(small, lambda v: f"{v:.3f}"),
        "dynamic blocks": f"{dynamic:.3g} of {len(record.blocks_open)}",
        "distinct paths": f"{paths:.3g}",
        "skipped by routing": spread(
            row.over_seeds(lambda run: routed_percent(run.record.blocks_open)), lambda v: f"{v:.1f}%"
        ),
        "latency ratio": UNKNOWN if latency is None else spread(latency, lambda v: f"{v:.2f}"),
        "parameters": UNKNOWN if record.parameters is None else f"{record.parameters:,}",
        "paper: accuracy": "; ".join(f"{100 * q.accuracy:.1f}% {when}".strip() for when, q in said) or UNKNOWN,
        "paper: counted": "; ".join(f"{q.counted:.3f}" for _, q in said) or UNKNOWN,
    }
    return {name: markdown(str(value)) for name, value in values.items()} | {"command": code(command_of(row))}


def _gate(record: Record) -> str:
    if record.gate != "cosine":
        return NAMES.get(record.gate, record.gate)
    return "predictive" if record.signal == "predicted" else f"cosine, {record.polarity or UNKNOWN}"


def _time_ratio(row: Configuration) -> tuple[float, float | None] | None:
    """Returns the time ratio to the dense network that was timed in the same minutes."""
    timed = [run for run in row.runs if run.record.latency and run.record.latency.time_ratio is not None]
    return Configuration(timed).over_seeds(lambda run: run.record.latency.time_ratio) if timed else None


def as_markdown(by_family: dict[Family, list[Configuration]], command: str, figure: str) -> str:
    """Returns a table for each data set, schedule and kind of validation."""
    lines = [TITLE, "", code(f"python {command}"), "", f"![accuracy against FLOPs]({quote(figure)})", ""]
    for family, rows in by_family.items():
        to = reference(rows)
        with_a_row = {quoted.name for row in rows for quoted in quotes(row)}
        apart = [quoted for quoted in QUOTED.get(family[0], []) if quoted.name not in with_a_row]
        base = "the same network without gates"
        if to:
            base = markdown(f"{to.first.experiment} ({to.runs[0].family[1]})")
        lines += [f"## {markdown(title(family))}", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        lines += [f"| {' | '.join(cells(row, to).values())} |" for row in rows]
        lines += [
            "",
            "Measured: test accuracy with hard gates, mean ± standard deviation where there are seeds, best first; "
            "counted is the mean gate over the row's own blocks, as the paper counts; executed is the FLOPs that ran, "
            f"gates included, over those of {base}; compiled is the same of the network without the blocks that its "
            "gates closed for all images; latency ratio is the time of one image over the dense network's on the same "
            "engine in the same minutes, of the compiled network where the row has one, as `src/benchmark.py` measures "
            "it (each row in minutes of its own: a few hundredths between rows say nothing); random gates have no ONNX "
            "form. A block is dynamic that 5 to 95% of the images compute; what such blocks skip, in percent of all "
            "blocks' work as the paper counts it, is skipped by routing, the rest of 1 - counted by blocks that are "
            "closed for all.",
            "",
            "Quoted, not measured: the columns `paper:` are the paper's own figures, of ResNet-20 on its schedule.",
        ]
        lines += [f"Quoted without a row here: {_words(apart)}." for _ in apart[:1]]
        lines += [""]
    return "\n".join(lines)


def _words(quoted: list[Quoted]) -> str:
    return "; ".join(f"{q.name}, {100 * q.accuracy:.1f}% at {q.counted:.3f}" for q in quoted)


def draw(by_family: dict[Family, list[Configuration]], path: Path) -> None:
    """Draws accuracy against executed FLOPs, compiled where a row has them; hollow points are counted FLOPs."""
    figure, axes = plt.subplots(
        1, len(by_family), figsize=(10 * len(by_family), 7), layout="constrained", squeeze=False
    )
    for axis, (family, rows) in zip(axes[0], by_family.items(), strict=True):
        _draw_family(axis, rows)
        axis.set(title=title(family), xlabel="FLOPs / dense network's", ylabel="test accuracy, hard gates (%)")
    handles = [
        plt.Line2D([], [], color="C0", marker="o", linestyle="", label="executed (compiled, where it was)"),
        plt.Line2D([], [], color="C0", marker="o", fillstyle="none", linestyle="", label="counted (mean gate)"),
        plt.Line2D([], [], color="black", marker="s", linestyle="", label="dense"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    figure.draw_without_rendering()  # from now on points have their places
    for axis, rows in zip(axes[0], by_family.values(), strict=True):
        name_points(axis, _places(rows), [(row.cost("counted")[0], 100 * row.accuracy()[0]) for row in rows])
    save_figure(figure, path, MARK, dpi=130)
    plt.close(figure)


def _places(rows: list[Configuration]) -> list[tuple[str, float, float]]:
    """Returns the name, cost and accuracy in percent of every row's point."""
    to = reference(rows)
    costs = [(compiled(row, to) or executed(row, to))[0] for row in rows]
    return [
        (printable(row.first.experiment), cost, 100 * row.accuracy()[0]) for row, cost in zip(rows, costs, strict=True)
    ]


def _draw_family(axis: Axes, rows: list[Configuration]) -> None:
    for row, (_, cost, accuracy) in zip(rows, _places(rows), strict=True):
        error, counted = row.accuracy()[1], row.cost("counted")[0]
        colour = "black" if row.is_dense else "C0"
        if not row.is_dense:
            axis.plot([counted, cost], [accuracy] * 2, color=colour, alpha=0.25, linewidth=1)
            axis.plot(counted, accuracy, "o", color=colour, fillstyle="none", alpha=0.5)
        bar = None if error is None else 100 * error
        axis.errorbar(cost, accuracy, yerr=bar, fmt="s" if row.is_dense else "o", color=colour, capsize=3)
    axis.margins(x=0.15)
    axis.grid(alpha=0.3)


def name_points(
    axis: Axes, places: list[tuple[str, float, float]], others: Sequence[tuple[float, float]] = ()
) -> list[Annotation]:
    """Places each name near its point so that it covers no point, `others` included, and no other name."""
    renderer = axis.figure.canvas.get_renderer()
    points = axis.transData.transform([*(place[1:] for place in places), *others])
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in points]
    line = {"arrowstyle": "-", "linewidth": 0.5, "alpha": 0.5, "shrinkA": 0, "shrinkB": 3}
    words = {"textcoords": "offset points", "va": "center", "fontsize": 8, "arrowprops": line}
    labels = []
    for name, x, y in sorted(places, key=lambda place: (-place[2], place[1])):
        label = axis.annotate(name, (x, y), xytext=(0, 0), **words)
        for up, side in itertools.product(sorted(range(-396, 397, 6), key=abs), ("left", "right")):
            label.set(position=(9 if side == "left" else -9, up), ha=side)
            label.update_positions(renderer)
            box = Text.get_window_extent(label, renderer)  # of the words without the line
            if (
                not any(map(box.overlaps, taken))
                and np.all(axis.bbox.min < box.min)
                and np.all(box.max < axis.bbox.max)
            ):
                break
        taken.append(box)
        labels.append(label)
    return labels
