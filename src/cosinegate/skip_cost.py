"""What skipping a block would have cost a sample: its loss without F less its loss with F, other blocks as they were.

Gates cannot learn that from the gradient of the one pass that training makes: given the image, the slope of the loss
along an open gate is zero on the mean where the network's probabilities are right. So the rest of the network runs
again for a part of the batch, from one block on, with that block and without it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from cosinegate.calibration import Quantile
from cosinegate.choices import Credit
from cosinegate.networks import Output, ResidualBlock, ResNet

PART = 2  # one of so many samples of a batch is measured
SMALL = 1e-3  # a divergence below which the prediction is as good as unmoved


@contextmanager
def _input_of(block: ResidualBlock) -> Iterator[list[Tensor]]:
    """What the block is given in a pass made meanwhile."""
    kept: list[Tensor] = []
    hook = block.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0].detach()))
    try:
        yield kept
    finally:
        hook.remove()


@torch.no_grad()
def skip_cost(
    network: ResNet, place: int, x: Tensor, gates: Tensor, target: Tensor, credit: Credit = Credit.cost
) -> Tensor:
    """(B,) of block `place` with input x, where the blocks have gates (B, N) of 0 and 1.

    With Credit.change the divergence of the prediction without F from that with F, whatever the target: a loss may
    also fall when the network gets less sure of a wrong class, and those images are the last to leave alone.

    As evaluation has it: with BatchNorm's running moments, for a batch's own would hide a part of what changes.
    """
    was_training = network.training
    network.eval()
    block, later = network.blocks[place], network.blocks[place + 1 :]
    s, r = block.shortcut(x), block.residual(x)
    y = block.activation(torch.cat((s, s + r)))
    for gate, block in zip(gates[:, place + 1 :].T, later, strict=True):
        y = block.route(y, gate.repeat(2))
    scores = network.classify(y)
    network.train(was_training)
    if credit is Credit.change:
        without, with_f = scores.log_softmax(1).chunk(2)
        return F.kl_div(without, with_f, reduction="none", log_target=True).sum(1)
    without, with_f = F.cross_entropy(scores, target.repeat(2), reduction="none").chunk(2)
    return without - with_f


def learned(cost: Tensor, credit: Credit) -> Tensor:
    """What a logit, by the size of γ, is to be: of large costs the logarithm counts, and of small changes of the
    prediction too, for those part the images that can do without F."""
    return (cost + SMALL).log() if credit is Credit.change else torch.asinh(cost)


def priced_places(network: ResNet) -> list[int]:
    """The blocks whose gates learn what skipping costs."""
    openings = {place: block.gate.opening for place, block in enumerate(network.blocks) if block.gate is not None}
    learn = (place for place, opening in openings.items() if isinstance(opening, Quantile))
    return [place for place in learn if openings[place].budget.credit is not Credit.slope]


def running(network: ResNet, places: list[int]) -> list[int]:
    """Of these blocks those that training does not skip for every sample now."""
    return [place for place in places if not network.blocks[place].gate.opening.is_closed]


def priced(
    network: ResNet, places: list[int], images: Tensor, target: Tensor, full_path: bool = False
) -> tuple[Output, Tensor]:
    """A pass, with the full path or without, and the error of the logits of one of the blocks, by γ, as guesses of the
    cost.

    The block is drawn by chance. Of large errors the size counts instead of its square: before a network has learned
    anything, costs are anything. A cost in the loss is mostly noise, so its error is averaged over all blocks; a change
    of the prediction is not. Gates that are fitted between epochs learn nothing of it here.
    """
    if network.blocks[places[0]].gate.opening.budget.fitted:
        output = network(images, full_path)
        return output, 0.0 * output.routing.logits[:, places].sum()
    candidates = running(network, places) or places
    place = candidates[torch.randint(len(candidates), ())]
    credit = network.blocks[place].gate.opening.budget.credit
    with _input_of(network.blocks[place]) as kept:
        output = network(images, full_path)
    part, logits = slice(None, None, PART), output.routing.logits
    cost = skip_cost(network, place, kept[0][part], output.routing.gates[part].detach(), target[part], credit)
    price = logits[part, place] / network.blocks[place].gate.gamma.detach().abs()
    others = 0.0 * logits[:, places].sum()  # gates that are not drawn have a gradient too, as several processes want it
    error = F.smooth_l1_loss(price, learned(cost, credit))
    return output, (error if credit is Credit.change else error / len(places)) + others
