"""The frontier of early exits: accuracy and FLOPs on the test set at every budget."""

from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from cosinegate.deploy.exits.budget import path_costs, set_budget
from cosinegate.deploy.exits.network import EarlyExitNetwork
from cosinegate.deploy.forward import forward
from cosinegate.deploy.source import Source
from cosinegate.networks import GatedNetwork
from cosinegate.networks.name import network_name
from cosinegate.runs.untrusted import read_json
from cosinegate.terminal import console
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
    """The part of frontier.json that figure and report show."""

    after: list[int]
    own: Measured
    points: Annotated[list[Point], Field(min_length=1)]


def read_frontier(folder: Path) -> Frontier | None:
    """Returns the frontier in a folder of exits, sorted by FLOPs, or None if there is none."""
    try:
        frontier = Frontier.model_validate(read_json(folder / FRONTIER))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise UserError(f"{folder / FRONTIER} cannot be read: {where} is not what a frontier has") from error
    frontier.points.sort(key=lambda point: point.executed)
    return frontier


def measure_frontier(
    source: Source, network: GatedNetwork, early: EarlyExitNetwork, budgets: list[float]
) -> dict[str, Any]:
    """Returns accuracy and FLOPs on the test set at every budget, and those of the network without exits."""
    held_out = source.held_out()
    images, labels = source.data.whole_images("test", None)
    costs = path_costs(early, images[:1])
    console.say(
        f"setting thresholds on {len(held_out)} {source.held_out_words}; measuring on {len(images)} test images"
    )
    whole, _, own_flops = forward(network, images)
    points = []
    for budget in budgets:
        set_budget(early, budget, held_out)
        scores, route, flops = forward(early, images)
        opened = route.float().mean(0)
        points.append(
            {
                "budget": budget,
                "threshold": early.threshold.item(),
                "accuracy": _accuracy(scores, labels),
                "other_class": int((scores.argmax(1) != whole.argmax(1)).sum()),
                "executed_of_own": flops / own_flops,
                "executed": flops / source.reference_flops,
                "flops": flops,
                "mean_gate": opened.mean().item(),
                "open": opened.tolist(),
                "paths": len(torch.unique(route, dim=0)),
            }
        )
    return {
        "name": source.config.name,
        "network": network_name(source.config.network),
        "after": early.after,
        "path_costs": costs.tolist(),
        "own": {"accuracy": _accuracy(whole, labels), "executed": own_flops / source.reference_flops},
        "images": len(images),
        "thresholds_by": f"{len(held_out)} {source.held_out_words}",
        "points": points,
    }


def _accuracy(scores: Tensor, labels: Tensor) -> float:
    return (scores.argmax(1) == labels).float().mean().item()
