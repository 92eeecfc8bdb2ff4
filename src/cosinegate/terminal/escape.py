"""Names from records, configs and paths, which anybody may have written, made safe for the place they are shown in."""

import re
from typing import Any

FORMULA = ("=", "+", "-", "@")  # what a spreadsheet would compute


def printable(text: str) -> str:
    """One line for a terminal or a figure: control and bidirectional characters become escapes such as \\x1b."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def markdown(text: str) -> str:
    """Text for a line or a table cell of Markdown, which then has no markup of its own."""
    return re.sub(r"[\\`|<>&*\[\]]", r"\\\g<0>", printable(text))


def code(text: str) -> str:
    """A code span for a line or a table cell of Markdown."""
    text = printable(text)
    if not re.search(r"[\\`|]", text):
        return f"`{text}`"
    inside = re.sub(r"[^\w ./=,:-]|_", lambda match: f"&#{ord(match[0])};", text)
    return f"<code>{inside}</code>"


def csv_cell(value: Any) -> Any:
    """A value for a CSV file: a word that a spreadsheet would take for a formula gets an apostrophe in front."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.lstrip().startswith(FORMULA) else text
