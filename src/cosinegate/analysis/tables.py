"""Reads run folders, writes the frontier's files, and prints tables of runs."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from cosinegate.analysis import pareto as plots
from cosinegate.analysis.runs import ABSOLUTE, Configuration, Family, Run, families, find_runs, run_folders
from cosinegate.config.identity import FIGURES
from cosinegate.runs.manifest import manifest_path, read_manifest
from cosinegate.runs.record import read_record
from cosinegate.terminal.console import cell, complain, say
from cosinegate.terminal.errors import UserError

LONGEST_TABLE = 200  # rows in a terminal; the files have all of them
HINT = "make pareto SWEEP=quick trains some in minutes"


def pareto(config: DictConfig, command: str) -> None:
    """Reads the runs, and writes and prints a figure and a table for each family of runs that can be compared."""
    x = config.x.name
    folders = chosen_folders(config)
    skipped: list[str] = []
    runs = find_runs(folders, skipped.append)
    if config.sweep and len(runs) < len(folders):
        say(f"{len(runs)} of the sweep's {len(folders)} runs are finished")
    if not runs:
        where = f"the sweep {config.sweep}" if config.sweep else ", ".join(map(str, folders))
        why = f" ({'; '.join(skipped[:3])}{'; ...' if skipped[3:] else ''})" if skipped else ""
        raise UserError(f"no finished run in {where}{why}: {HINT}")
    for line in skipped:
        complain(line)
    by_family, folder = families(runs, x), Path(config.output or Path(config.runs_dir) / FIGURES)
    for family in by_family:
        plots.require_own_files(family, x, folder)
    written = []
    for family, configurations in by_family.items():
        measured = plots.mark(configurations, x)
        if len(measured) < len(configurations):
            say(f"{plots.title(family)}: {len(configurations) - len(measured)} configurations have no {x}")
        if not measured:
            continue
        reference = tuple(config.reference) if config.reference is not None else plots.reference_point(measured, x)
        show(family, measured, x)
        area = plots.hypervolume(plots.points(measured, x), reference)
        say(f"hypervolume {area:.4f}, up to the reference ({x} {reference[0]:.3g}, accuracy {reference[1]:.3g})")
        written += plots.write_pareto(family, measured, x, reference, folder, command)
    if not written:
        raise UserError(f"x = {x}: no run has it measured")
    for path in written:
        say(f"written  {path}")


def show(family: Family, configurations: list[Configuration], x: str) -> None:
    """Prints the table of one family, best first."""
    table = Table(title=cell(plots.title(family)), title_justify="left", caption_justify="left")
    table.caption = "★ on the frontier" if x in ABSOLUTE else f"★ nothing else is more accurate at no more {x} FLOPs"
    for name in plots.columns(x):
        table.add_column(
            name, justify="left" if name in ("", "configuration", "chosen on") else "right", overflow="fold"
        )
    for row in plots.rows(configurations[:LONGEST_TABLE], x):
        table.add_row(*map(cell, row))
    if len(configurations) > LONGEST_TABLE:
        table.caption = f"and {len(configurations) - LONGEST_TABLE} more; {table.caption}"
    Console(width=max(Console().width, 132)).print(table)


def show_runs(runs: list[Run]) -> None:
    """Prints the tables that end a sweep or a search."""
    for family, configurations in families(runs, "counted").items():
        show(family, plots.mark(configurations, "counted"), "counted")


def chosen_folders(config: DictConfig, hint: str = HINT, alone: bool = False) -> list[Path]:
    """Returns the folders that `runs` names, or those of a sweep's runs; `hint` tells how to train some.

    With `alone`, runs that were started by themselves with sweep=<name> are included.
    """
    if config.sweep is None:
        names = [config.runs] if isinstance(config.runs, str) else config.runs
        missing = [name for name in names if not Path(name).is_dir()]
        if missing:
            raise UserError(f"runs = {missing[0]}: no such folder" + (f": {hint}" if len(names) == 1 else ""))
        return [Path(name) for name in names]
    root = Path(config.runs_dir)
    path = manifest_path(config.sweep, config.runs_dir)
    others = list(_asked_for(root, config.sweep)) if alone else []
    try:
        folders = [root / run for run in read_manifest(path)]
    except FileNotFoundError as error:
        if others:
            return others
        raise UserError(f"sweep = {config.sweep}: not started yet ({path} would list it): {hint}") from error
    return folders + [folder for folder in others if folder not in folders]


def _asked_for(root: Path, sweep: str) -> Iterator[Path]:
    """Yields the folders of runs whose record names the sweep."""
    for folder in run_folders([root]):
        with contextlib.suppress(UserError):
            if getattr(read_record(folder), "sweep", None) == sweep:
                yield folder
