"""Escapes names from records, configs and paths, which anybody may have written, for the place they are shown in."""

import re
from typing import Any

FORMULA = ("=", "+", "-", "@")  # what a spreadsheet would compute


def printable(text: str) -> str:
    """Returns one line for a terminal or a figure: control and bidirectional characters are escaped, as in \x1b."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def markdown(text: str) -> str:
    """Returns text for a line or a table cell of Markdown, without markup of its own."""
    return re.sub(r"[\\`|<>&*\[\]]", r"\\\g<0>", printable(text))


def code(text: str) -> str:
    """Returns a code span for a line or a table cell of Markdown."""
    text = printable(text)
    if not re.search(r"[\\`|]", text):
        return f"`{text}`"
    inside = re.sub(r"[^\w ./=,:-]|_", lambda match: f"&#{ord(match[0])};", text)
    return f"<code>{inside}</code>"


def csv_cell(value: Any) -> Any:
    """Returns a value for a CSV file: text that a spreadsheet would take for a formula starts with an apostrophe."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.lstrip().startswith(FORMULA) else text
