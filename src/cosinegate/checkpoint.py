"""Reading a checkpoint. It is data, read with `weights_only`: nothing in it runs."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch

from cosinegate.errors import UserError


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What a checkpoint holds; a file that is damaged or something else is answered with one line."""
    try:
        with warnings.catch_warnings(action="ignore"):  # what torch thinks of a file that it then refuses
            stored = torch.load(path, map_location="cpu", weights_only=True)
        config, weights = stored["hyper_parameters"], stored["state_dict"]
    except (OSError, RuntimeError, EOFError, ValueError, LookupError, TypeError, pickle.UnpicklingError) as error:
        raise UserError(f"{path} is not a checkpoint of this program: {first_line(error)}") from error
    if not isinstance(config, dict) or not isinstance(weights, dict):
        raise UserError(f"{path} is not a checkpoint of this program")
    return stored


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
