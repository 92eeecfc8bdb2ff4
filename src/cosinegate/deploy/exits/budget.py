"""From a budget to the exits' threshold: FLOPs of the network with its exits, over the network's own."""

import copy

import torch
from torch import Tensor

from cosinegate.deploy.exits.fit import pass_through
from cosinegate.deploy.exits.network import EarlyExitNetwork
from cosinegate.networks.flops import counting, dense_flops
from cosinegate.networks.network import Step
from cosinegate.terminal.errors import UserError

STEPS = 60  # of the bisection
ROUNDING = 5e-4  # a budget is given with three digits


def set_budget(network: EarlyExitNetwork, budget: float, images: Tensor) -> float:
    """Sets the threshold at which these images take the budget's FLOPs on the mean. Returns what they take."""
    costs = path_costs(network, images[:1])
    require_budget(budget, costs)
    logits = exit_logits(network, images)
    below, above = logits.min().item() - 1, logits.max().item() + 1
    for _ in range(STEPS):
        middle = (below + above) / 2
        below, above = (middle, above) if mean_cost(logits, costs, middle) > budget else (below, middle)
    network.threshold.fill_(above)
    return mean_cost(logits, costs, network.threshold.item())


def require_budget(budget: float, costs: Tensor) -> None:
    """Ends with one line where no threshold gives the budget; `costs` (E + 1,) are those of the paths."""
    least, most = costs[0].item(), costs[-1].item()
    if not least - ROUNDING <= budget <= most + ROUNDING:
        words = f"must lie from {least:.3f} (every image takes the first exit) to {most:.3f} (none takes one)"
        raise UserError(f"budget = {budget:g}: {words}")


def default_budgets(costs: Tensor) -> list[float]:
    """Three budgets between the least and the most that paths of these costs (E + 1,) take, the middle one first."""
    least, most = costs[0].item(), min(costs[-1].item(), 1.0)
    return [round(least + part * (most - least), 3) for part in (0.5, 0.25, 0.75)]


def exit_logits(network: EarlyExitNetwork, images: Tensor) -> Tensor:
    """(B, E): the logit of every image at every exit, had none exited before."""
    passed = pass_through(network.network, network.after, images)
    with torch.no_grad():
        columns = [network.exit_after(index).answer(passed.statistics[index])[1] for index in network.after]
    return torch.stack(columns, dim=1)


def mean_cost(logits: Tensor, costs: Tensor, threshold: float) -> float:
    """What images with these logits (B, E) cost on the mean; `costs` (E + 1,) are those of the paths."""
    exited = torch.cat((logits <= threshold, logits.new_ones(len(logits), 1, dtype=torch.bool)), dim=1)
    return costs[exited.int().argmax(1)].mean().item()  # the first exit that is taken, or the network's end


@torch.no_grad()
def path_costs(network: EarlyExitNetwork, image: Tensor) -> Tensor:
    """(E + 1,): FLOPs of an image that takes each exit, and of one that takes none, over the network's own.

    Where gates are left, as if all of them were open.
    """
    meta, spent = copy.deepcopy(network).to("meta", torch.float32).eval(), []
    for block in meta.blocks:
        block.gate = None
    _, channels, height, width = image.shape
    with counting() as counter:

        def add_exit(step: Step) -> None:
            if (at := meta.exit_after(step.index)) is not None:
                at(step.block.as_map(step.y))
                spent.append(counter.get_total_flops())

        meta.network.run(torch.empty(1, channels, height, width, device="meta"), add_exit)
    own = dense_flops(network.network, (height, width, channels))
    return torch.tensor([*spent, counter.get_total_flops()], dtype=torch.float64) / own
