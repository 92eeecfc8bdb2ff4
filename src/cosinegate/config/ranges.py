"""Ranges of config values: a test, and the words that end "must be ..."."""

import re
from collections.abc import Callable
from dataclasses import field
from typing import Any, NamedTuple

from omegaconf import ListConfig

LARGEST = 1e30  # of a number that float32 holds, with room to compute with it
MOST_IMAGES = 10**9
MOST_THREADS = 1024


class Range(NamedTuple):
    is_allowed: Callable[[Any], bool]
    words: str


def field_of(default: Any, **metadata: Any) -> Any:
    """Returns a dataclass field with any default, lists included."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def allowed(default: Any, is_allowed: Callable[[Any], bool], words: str) -> Any:
    """Returns a field with its default and its range."""
    return field_of(default, range=Range(is_allowed, words))


def at_least(least: float, default: Any) -> Any:
    return allowed(default, lambda v: v >= least, f"at least {least:g}")


def within(least: float, most: float, default: Any, unit: str = "") -> Any:
    return allowed(default, lambda v: least <= v <= most, f"from {least:g} to {most:g}{unit}")


def above(bound: float, default: Any) -> Any:
    return allowed(default, lambda v: v > bound, f"above {bound:g}")


def or_null(range: Range) -> Range:
    """Returns a range that allows null too."""
    return Range(lambda v: v is None or range.is_allowed(v), f"null or {range.words}")


def each(range: Range) -> Range:
    """Returns the range of a list that is not empty and whose values are in `range`."""
    return Range(lambda v: len(v) > 0 and all(map(range.is_allowed, v)), f"a list of numbers, each {range.words}")


def count(least: int = 1, most: int = MOST_IMAGES) -> Range:
    """Returns a range of whole numbers."""
    return Range(lambda v: least <= v <= most, f"at least {least} and at most {most}")


def is_number(value: Any) -> bool:
    """Returns whether a value is a finite number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_plain_name(value: str) -> bool:
    """Returns whether a string can name a file or a folder, on any disk and in one line.

    Names that start with a dot are reserved: `.sweeps`, `.lock`.
    """
    shown = value.isprintable() and value.strip() == value and not value.startswith(".")
    return value != "" and shown and "/" not in value and len(value.encode()) <= 150


def is_batches(value: Any) -> bool:
    """Returns whether a value is null, a number of batches, or a fraction."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return value is None or (whole and value <= MOST_IMAGES) or (isinstance(value, float) and 0 < value <= 1)


def is_devices(value: Any) -> bool:
    """Returns whether a value can be trainer.devices. 0 and values below -1 are refused by lightning itself."""
    if isinstance(value, ListConfig | list):
        return 0 < len(value) <= 256 and all(isinstance(v, int) and 0 <= v <= 256 for v in value)
    whole = isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, str) or (whole and abs(value) <= 256)


def seconds(max_time: str) -> int | None:
    """Returns the seconds of DD:HH:MM:SS, or None for another format."""
    parts = re.fullmatch(r"(\d{1,5}):(\d\d):(\d\d):(\d\d)", max_time)
    if parts is None:
        return None
    return sum(int(part) * unit for part, unit in zip(parts.groups(), (86400, 3600, 60, 1), strict=True))


def _are_folders(value: Any) -> bool:
    names = list(value) if isinstance(value, ListConfig | list) else [value]
    return names != [] and all(isinstance(name, str) and name for name in names)


ANY_BATCHES = Range(is_batches, "null, a number of batches (1, 2, ...) or a fraction (0.0 < x <= 1.0)")
THREADS = Range(lambda v: 1 <= v <= MOST_THREADS, f"from 1 to {MOST_THREADS}")
PLAIN_NAME = Range(is_plain_name, "a plain file name, without a slash or a leading dot")
FOLDERS = Range(_are_folders, "a folder or a list of folders, [...]")
POSITIVE = Range(lambda v: 0 < v <= LARGEST, "above 0")
