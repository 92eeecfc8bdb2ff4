"""Reads text, JSON and YAML that others may have written: as data, never as code, and with bounds on memory.

Nothing is resolved: a `${oc.env:...}` in a checkpoint would fetch a secret of whoever reads it.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

import yaml

from cosinegate.terminal.errors import UserError

LARGEST_TEXT = 4 * 2**20  # bytes of a record, a config or a card: a thousand times what they have
MOST_VALUES, DEEPEST = 20_000, 40
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_text(path: Path, most: int = LARGEST_TEXT) -> str:
    """Returns the text of a file. Raises FileNotFoundError if it is missing, and UserError for anything else."""
    try:
        with open(path, "rb", opener=_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UserError(f"{path} cannot be read: it is not a file")
            content = file.read(most + 1)
        if len(content) > most:
            raise UserError(f"{path} cannot be read: it is larger than {most // 2**20} MiB")
        return content.decode()
    except FileNotFoundError:
        raise
    except IsADirectoryError as error:
        raise UserError(f"{path} cannot be read: it is not a file") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from error


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # of a pipe, a reader would wait for ever for its writer


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from error
    if text.count("{") + text.count("[") > DEEPEST:  # else it cannot be too deep, and JSON is plain by itself
        check_plain(content, path)
    return content


def parse_yaml(text: str, path: Path) -> Any:
    """Returns the content of a YAML text. An alias that stands for millions of values is refused first."""
    try:
        content = yaml.load(text, Loader=LOADER)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from error
    check_plain(content, path)
    return content


def check_plain(content: Any, path: Path, resolved: bool = False) -> None:
    """Raises UserError unless the content is dicts with string keys, lists, strings, numbers and null.

    With `resolved`, interpolations are refused too.
    """
    left, count = [(content, 0)], 0
    while left:
        node, depth = left.pop()
        count += 1
        if count > MOST_VALUES or depth > DEEPEST:  # a value that is there twice counts twice; a circle has no end
            raise UserError(f"{path} cannot be read: it holds more than {MOST_VALUES} values, or too deep a nesting")
        if isinstance(node, dict):
            if not all(isinstance(key, str) for key in node):
                raise UserError(f"{path} cannot be read: it has a key that is not a word")
            left += [(child, depth + 1) for child in node.values()]
        elif isinstance(node, list):
            left += [(child, depth + 1) for child in node]
        elif isinstance(node, str):
            if resolved and "${" in node:
                raise UserError(f"{path} cannot be read: it holds {node[:80]!r}, and nothing is looked up for it")
        elif node is not None and type(node) not in (bool, int, float):
            raise UserError(f"{path} cannot be read: it holds a {type(node).__name__}")


def value_at(content: Any, key: str) -> Any:
    """Returns the value of a dotted key, or None."""
    for part in key.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content


def first_line(error: BaseException) -> str:
    """Returns an error in one line, with the second line where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines()] or [""]
    words = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {words[:240]}"
