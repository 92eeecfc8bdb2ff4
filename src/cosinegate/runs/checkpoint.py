"""Reads checkpoints as data, with `weights_only` and bounds.

Nothing in a checkpoint runs, and nothing in it can ask for more memory than the file itself takes.
"""

import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cosinegate.runs.untrusted import check_plain, first_line
from cosinegate.terminal.errors import UserError

UNREADABLE = (OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, MemoryError)
UNREADABLE += (OverflowError, AssertionError, NotImplementedError, pickle.UnpicklingError, zipfile.BadZipFile)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Returns the content of a checkpoint. Raises UserError for a damaged file or another kind of file."""
    try:
        _check_archive(path)
        with warnings.catch_warnings(action="ignore"):  # what torch thinks of a file that it then refuses
            stored = torch.load(path, map_location="cpu", weights_only=True)
        config, weights = stored["hyper_parameters"], stored["state_dict"]
    except UNREADABLE as error:
        raise UserError(f"{path} is damaged, or not a checkpoint of this program: {first_line(error)}") from error
    if not isinstance(config, dict) or not isinstance(weights, dict):
        raise UserError(f"{path} is not a checkpoint of this program")
    check_plain(config, path, resolved=True)
    return stored


def load_weights(module: nn.Module, stored: dict[str, Any], path: Path) -> None:
    """Loads a checkpoint's weights into a module. Raises UserError for those of another network or version."""
    try:
        module.load_state_dict(stored["state_dict"])
    except (RuntimeError, AttributeError, TypeError) as error:
        words = "is of another network, or was written by another version"
        raise UserError(f"{path} {words}: {first_line(error)}") from error


def _check_archive(path: Path) -> None:
    """Raises an error if the file unpacks to more than its own size: torch.save does not compress."""
    if not path.is_file():
        raise ValueError("not a file")
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
        if not stored or sum(member.file_size for member in members) > path.stat().st_size:
            raise ValueError("its parts are compressed, or lie over each other")
        if damaged := archive.testzip():  # torch itself would take a flipped bit for a weight
            raise ValueError(f"{damaged} is damaged")
