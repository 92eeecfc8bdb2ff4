"""Lines and tables in the terminal: plain text if it is no terminal, without colour if NO_COLOR is set."""

import sys

from lightning_utilities.core.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cosinegate.terminal.escape import printable
from cosinegate.terminal.secrets import masked

BARS = "·▁▂▃▄▅▆▇█"


def say(words: str) -> None:
    """Prints a line, on the first of several processes only."""
    if is_first_process():
        Console(highlight=False, soft_wrap=True).print(printable(masked(words)), markup=False, emoji=False)


def complain(words: str) -> None:
    """Prints a line to stderr."""
    print(printable(masked(words)), file=sys.stderr)


def cell(words: str) -> Text:
    """Returns text for a cell of a table, without markup or control characters."""
    return Text(printable(words))


def show_table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Prints a table with text in the first column and figures in the others."""
    table = Table(title=cell(title), title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*map(cell, row))
    terminal = Console()
    widest = terminal.measure(table, options=terminal.options.update(width=500)).maximum
    Console(width=max(terminal.width, widest)).print(table)  # rather wrapped by the terminal than cut off


def bars(fractions: list[float]) -> str:
    """Returns a letter for each block: how many of the images compute it."""
    return "".join(BARS[round(fraction * (len(BARS) - 1))] for fraction in fractions)


def is_first_process() -> bool:
    return getattr(rank_zero_only, "rank", 0) == 0  # lightning sets it where it is loaded


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}%"
