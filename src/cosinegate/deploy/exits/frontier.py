"""The frontier of exits as it is kept: accuracy and FLOPs of the test set at every budget."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from cosinegate.runs.untrusted import read_json
from cosinegate.terminal.errors import UserError

FRONTIER = "frontier.json"
Fraction = Annotated[float, Field(ge=0, le=1)]
Ratio = Annotated[float, Field(ge=0, le=1e6)]  # of FLOPs; the dense network = 1


class Measured(BaseModel):
    """A network on the test set."""

    accuracy: Fraction
    executed: Ratio


class Point(Measured):
    budget: Ratio


class Frontier(BaseModel):
    """What the figure and the report show of frontier.json."""

    after: list[int]
    own: Measured
    points: Annotated[list[Point], Field(min_length=1)]


def read_frontier(folder: Path) -> Frontier | None:
    """Returns the frontier in a folder of exits, its points by FLOPs, or None where there is none."""
    try:
        frontier = Frontier.model_validate(read_json(folder / FRONTIER))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise UserError(f"{folder / FRONTIER} cannot be read: {where} is not what a frontier has") from error
    frontier.points.sort(key=lambda point: point.executed)
    return frontier
