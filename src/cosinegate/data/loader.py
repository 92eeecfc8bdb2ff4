"""The whole data set as one uint8 tensor; a batch is cropped, flipped and normalised by one gather.

Which image comes when, and how it is cropped and flipped, is a pure function of (seed, epoch, step): no workers, no
state to lose, and the same batches on any device, shared out over any number of processes.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cosinegate.hardware.processes import Share


class Augmentation(NamedTuple):
    """Random crop out of an image padded with black, and random horizontal flip."""

    crop_padding: int
    flip: bool


class Draw(NamedTuple):
    """What an epoch draws for each place in its order."""

    order: Tensor  # (N,) which image
    corner: Tensor  # (N, 2) top and left of the crop in the padded image
    flipped: Tensor  # (N,) bool


class EpochOrder:
    """Draws an epoch from (seed, epoch). Lightning calls `set_epoch` before each one, as it does for any sampler.

    Without `shuffle` every epoch has the images in the data set's order.
    """

    def __init__(self, size: int, seed: int, augmentation: Augmentation, shuffle: bool = True) -> None:
        self.size = size
        self.seed = seed
        self.augmentation = augmentation
        self.shuffle = shuffle
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def draw(self) -> Draw:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.size, generator=generator) if self.shuffle else torch.arange(self.size)
        corner = torch.randint(0, 2 * self.augmentation.crop_padding + 1, (self.size, 2), generator=generator)
        flipped = torch.rand(self.size, generator=generator) < 0.5
        return Draw(order, corner, flipped & self.augmentation.flip)


class Normalisation:
    """uint8 (B, H, W, C) -> float32 (B, C, H, W) in channels_last memory: (pixel / 255 - mean) / std."""

    def __init__(self, mean: list[float], std: list[float], device: torch.device) -> None:
        self.scale = (1 / (255 * torch.tensor(std))).to(device)
        self.shift = (-torch.tensor(mean) / torch.tensor(std)).to(device)

    def __call__(self, pixels: Tensor) -> Tensor:
        width, channels = pixels.shape[2:]
        lines = pixels.float().view(
            -1, width * channels
        )  # whole lines: an inner loop over 3 channels is 5 times slower
        lines = torch.addcmul(self.shift.repeat(width), lines, self.scale.repeat(width))
        return lines.view(pixels.shape).permute(0, 3, 1, 2)


class TrainLoader:
    """Shuffled, augmented batches. Each of `world_size` processes takes its share of every global batch."""

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        normalise: Normalisation,
        batch_size: int,
        drop_last: bool,
        order: EpochOrder,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        padding, flip = order.augmentation
        self.shape = images.shape[1:]  # (H, W, C)
        self.padded = torch.nn.functional.pad(images, (0, 0, padding, padding, padding, padding))  # (N, H+2p, W+2p, C)
        if flip:
            self.padded = torch.cat((self.padded, self.padded.flip(2)))  # image i mirrored is image N + i
        self.labels = labels
        self.normalise = normalise
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.sampler = order  # the name under which lightning looks for set_epoch
        self.rank = rank
        self.world_size = world_size
        self.steps_given = 0  # in this epoch
        self.go_on = (-1, 0)  # an epoch, and the step to begin it with

    def state_dict(self) -> dict[str, int]:
        """Where the epoch is; lightning asks for it in a checkpoint, and gives it back inside an epoch."""
        return {"epoch": self.sampler.epoch, "step": self.steps_given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.go_on = state["epoch"], state["step"]
        self.steps_given = state["step"]

    def __len__(self) -> int:
        whole, rest = divmod(len(self.labels), self.batch_size)
        return whole + (not self.drop_last and rest >= self.world_size)  # no process may be left without an image

    def share(self, step: int) -> Share:
        """Which part of this step's global batch is this process's; the first ones take what is left over."""
        total = min(self.batch_size, len(self.labels) - step * self.batch_size)
        size, longer = divmod(total, self.world_size)
        start = self.rank * size + min(self.rank, longer)
        return Share(total, start, start + size + (self.rank < longer), self.world_size)

    def images_of(self, step: int) -> Tensor:
        """Which images the step's global batch has, by their place in the loader's set."""
        return self.sampler.draw().order[step * self.batch_size : (step + 1) * self.batch_size]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        device = self.padded.device
        drawn = self.sampler.draw()
        height, width, channels = self.shape
        _, rows, columns, _ = self.padded.shape
        pixels = len(self.padded) * rows * columns
        # every stretch of `width` pixels, one for each pixel that it can start at: a view, with no bytes of its own
        lines = self.padded.view(-1).as_strided((pixels - width + 1, width * channels), (channels, 1))
        integer = torch.int32 if pixels < 2**31 else torch.int64  # half the bytes to read where it can be
        down = torch.arange(height, device=device, dtype=integer) * columns
        first = self.go_on[1] if self.sampler.epoch == self.go_on[0] else 0
        for step in range(first, len(self)):
            self.steps_given = step + 1
            share = self.share(step)
            mine = slice(step * self.batch_size + share.start, step * self.batch_size + share.stop)
            index, corner, flipped = (part[mine].to(device, integer) for part in drawn)
            image = index + flipped * len(self.labels)
            top, left = corner[:, 0], torch.where(flipped == 1, columns - width - corner[:, 1], corner[:, 1])
            where = ((image * rows + top) * columns + left)[:, None] + down  # (B, H) the first pixel of every line
            crops = lines.index_select(0, where.view(-1)).view(len(index), height, width, channels)
            yield self.normalise(crops), self.labels.index_select(0, index)


class EvalLoader:
    """Every image once, in order, as it is. Each process takes every `world_size`-th."""

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        normalise: Normalisation,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.images = images[rank::world_size]
        self.labels = labels[rank::world_size]
        self.normalise = normalise
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.labels) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for pixels, labels in zip(self.images.split(self.batch_size), self.labels.split(self.batch_size), strict=True):
            yield self.normalise(pixels), labels
