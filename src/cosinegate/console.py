"""What a person sees in the terminal. Plain text where there is no terminal, no colour where NO_COLOR asks for none."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_utilities.core.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cosinegate.dynamic import routed_percent
from cosinegate.escape import printable
from cosinegate.record import Record, ended_early, require
from cosinegate.secret import masked

if TYPE_CHECKING:
    from cosinegate.routing import RoutingSummary


BARS = "·▁▂▃▄▅▆▇█"


SHOWN = ("experiment", "data", "seed", "selected_on", "gate", "blocks_open", "dynamic_blocks", "paths", "tau_target")
SHOWN += ("accuracy.test", "accuracy.last", "accuracy.best", "accuracy.last_epoch", "accuracy.best_epoch")
SHOWN += ("mean_gate", "skip_percent", "flops.counted", "flops.executed", "images_per_second", "seconds")


def say(words: str) -> None:
    """A line, from the first of several processes alone."""
    if _is_first_process():
        Console(highlight=False, soft_wrap=True).print(printable(masked(words)), markup=False, emoji=False)


def complain(words: str) -> None:
    """A line on stderr."""
    print(printable(masked(words)), file=sys.stderr)


def cell(words: str) -> Text:
    """Words of a table as they are: without markup, and without what a terminal would obey."""
    return Text(printable(words))


def show_record(record: Record, folder: Path) -> None:
    """The table that ends a training run."""
    if not _is_first_process():
        return
    require(record, folder / "record.json", *SHOWN)
    accuracy, flops = record.accuracy, record.flops
    table = Table(title=cell(f"{record.experiment} on {record.data}, seed {record.seed}"), title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("how", overflow="fold")
    chosen = "the test set" if record.selected_on == "test" else "held-out training images"
    rows = [
        ("test accuracy", percent(accuracy.test), f"hard gates, {accuracy.test_of} epoch"),
        ("last accuracy", percent(accuracy.last), f"epoch {accuracy.last_epoch}"),
        ("peak accuracy", percent(accuracy.best), f"epoch {accuracy.best_epoch}, chosen on {chosen}"),
        ("mean gate", f"{record.mean_gate:.3f}", f"target {record.tau_target:g}"),
        ("skip", f"{record.skip_percent:.1f}%", "1 - mean gate"),
        ("FLOPs counted", f"{flops.counted:.3f}", "the paper's figure: the mean gate"),
        ("FLOPs executed", f"{flops.executed:.3f}", "measured, whole network / dense network"),
        (
            "dynamic blocks",
            f"{record.dynamic_blocks} of {len(record.blocks_open)}",
            f"open for 5-95% of the images; {routed_percent(record.blocks_open):.1f} of the "
            f"{record.skip_percent:.1f}% are skipped there",
        ),
        ("distinct paths", str(record.paths), "sets of open blocks"),
        ("images/s", f"{record.images_per_second:.0f}", f"training; {record.seconds:.0f} s in all"),
    ]
    if early := ended_early(record):
        done, why = early.split(", ", 1)
        rows.insert(0, ("ended early", done, why))
    if record.gate == "none":
        rows = [
            row
            for row in rows
            if row[0] not in ("mean gate", "skip", "FLOPs counted", "dynamic blocks", "distinct paths")
        ]
    for row in rows:
        table.add_row(*map(cell, row))
    if record.cut and record.cut.as_dict():
        limits = ", ".join(f"trainer.{key}={value}" for key, value in record.cut.as_dict().items())
        table.add_row("cut", "yes", cell(f"{limits}: nothing to compare with a whole run"))
    if compiled := record.compiled:  # an earlier version's record has none
        words = f"FLOPs; blocks {compiled.blocks} of {len(record.blocks_open)}, same answers on "
        words += f"{compiled.same_class:,} of {compiled.images:,} images"
        table.add_row("compiled", f"{compiled.executed:.3f}", words)
    if record.gate != "none":
        table.add_row("open by block", bars(record.blocks_open), "first to last; full: every image computes it")
    Console().print(table)
    figure = folder / "figures" / "curves.png"
    if figure.exists():
        say(f"figure  {figure}")
    say(f"record  {folder / 'record.json'}")
    for path in sorted(folder.glob("*-profile*.txt")):
        say(f"profile {path}")


def show_finished(record: Record, folder: Path) -> Record:
    """What a command that asks for a finished run prints; returns the record."""
    say(f"this run is finished; nothing was done. To train it again, change seed or move {folder} away")
    show_record(record, folder)
    return record


def show_routing(summary: "RoutingSummary", classes: tuple[str, ...]) -> None:
    """Class x block: the share of a class's images that compute each block."""
    table = Table(title="share of images that compute each block", title_justify="left")
    table.add_column("class")
    table.add_column("accuracy", justify="right")
    for block in range(summary.open.numel()):
        table.add_column(f"{block}", justify="right")
    for index, name in enumerate(classes):
        right = summary.correct[index] / summary.count[index].clamp_min(1)
        table.add_row(name, percent(right.item()), *(f"{share:.2f}" for share in summary.open_by_class[index].tolist()))
    table.add_section()
    right = summary.correct.sum() / summary.count.sum()
    table.add_row("all", percent(right.item()), *(f"{share:.2f}" for share in summary.open.tolist()))
    if summary.cir is not None:
        table.add_row("CIR", "", *("" if value != value else f"{value:.2f}" for value in summary.cir.tolist()))
    widest = 28 + 7 * summary.open.numel()
    Console(width=max(Console().width, widest)).print(table)  # rather wrapped by the terminal than cut off


def show_table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Words in the first column, figures in the others."""
    table = Table(title=cell(title), title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    for row in rows:
        table.add_row(*map(cell, row))
    terminal = Console()
    widest = terminal.measure(table, options=terminal.options.update(width=500)).maximum
    Console(width=max(terminal.width, widest)).print(table)  # rather wrapped by the terminal than cut off


def bars(shares: list[float]) -> str:
    """A letter a block: how many of the images compute it."""
    return "".join(BARS[round(share * (len(BARS) - 1))] for share in shares)


def _is_first_process() -> bool:
    return getattr(rank_zero_only, "rank", 0) == 0  # lightning sets it where it is loaded


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def percent(share: float) -> str:
    return f"{100 * share:.2f}%"
