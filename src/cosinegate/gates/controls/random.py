"""A control: gates that are open at random for a given fraction of the images, whatever the image shows."""

import torch
from torch import Tensor, nn

from cosinegate.config.schema import RandomGateConfig
from cosinegate.gates.decision import Decision, without_cir
from cosinegate.gates.gate import Gate, Slot
from cosinegate.relaxation import gumbel_difference

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # whole numbers of a float's size
ODD, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's


def _signed(word: int) -> int:
    """Returns the 64 bits of a word as torch's int64 has them."""
    return word - 2**64 if word >= 2**63 else word


def _mixed(word: Tensor) -> Tensor:
    """Returns splitmix64's output function of a word: every bit depends on every bit of the word."""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        word = (word ^ ((word >> shift) & (2 ** (64 - shift) - 1))) * _signed(factor)
    return word ^ ((word >> 31) & (2**33 - 1))


def fingerprint(images: Tensor) -> Tensor:
    """Returns (B,) int64 hashes of the images' bits: sums of integers, which no batch and no memory layout changes."""
    bits = images.detach().contiguous().flatten(1).view(WORDS[images.element_size()]).long()
    places = torch.arange(1, bits.shape[1] + 1, device=bits.device)
    return _mixed(bits + places * _signed(ODD)).sum(1)


def uniform(fingerprints: Tensor, gate_index: int) -> Tensor:
    """Returns (B,) numbers from 0 to 1, others for every gate."""
    bits = _mixed(_mixed(fingerprints + _signed((gate_index + 1) * ODD % 2**64)))
    return ((bits >> 11) & (2**53 - 1)).double() / 2**53


class RandomGate(Gate):
    """Draws anew at every step in training, and hashes the image in evaluation.

    The hash is of the image's bits and the gate's index, so that an image's route is the same in every batch and run.
    """

    def __init__(self, *, rate: float, gate_index: int, opening: nn.Module) -> None:
        super().__init__(opening)
        self.rate, self.gate_index = rate, gate_index

    @property
    def threshold_logit(self) -> float:
        return 0.0

    def decide(self, x: Tensor, images: Tensor) -> Decision:
        if self.training:
            logit = torch.logit(torch.full((len(x),), self.rate, device=x.device))
            return without_cir((logit + gumbel_difference(logit, self.opening.share) > 0).float(), logit)
        logit = (self.rate - uniform(fingerprint(images), self.gate_index)).float()
        return without_cir((logit > 0).float(), logit)

    def extra_repr(self) -> str:
        return f"rate={self.rate}, gate_index={self.gate_index}"


def make(config: RandomGateConfig, slot: Slot) -> RandomGate:
    return RandomGate(rate=config.rate, gate_index=slot.gate_index, opening=slot.opening())
