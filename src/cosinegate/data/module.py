"""The LightningDataModule: a verified data set, split as the config asks, on the device that trains."""

import lightning.pytorch as L
import torch
from torch import Tensor

from cosinegate.config.choices import Validation
from cosinegate.config.schema import DataConfig
from cosinegate.data import image_set
from cosinegate.data.loader import Augmentation, EpochOrder, EvalLoader, Normalisation, TrainLoader
from cosinegate.data.sources import Arrays, load
from cosinegate.terminal.errors import UserError

SPLIT_SEED = 20161205  # which images are held out never depends on a run's seed


class ImageData(L.LightningDataModule):
    """`validation: test` validates on the test set; `holdout` on training images that training never sees."""

    def __init__(self, config: DataConfig, seed: int, shuffle: bool = True) -> None:
        super().__init__()
        self.config = config
        self.seed = seed
        self.shuffle = shuffle
        self.image_set = image_set(config)
        channels = self.image_set.shape[2]
        if len(config.mean) != channels:
            raise UserError(f"data.mean has {len(config.mean)} values: {self.image_set.name} has {channels} channel(s)")
        if config.validation is Validation.holdout and config.holdout >= self.image_set.train_size:
            raise UserError(
                f"data.holdout = {config.holdout}: must be below the {self.image_set.train_size} training images; "
                f"a tenth of them is data.holdout={max(1, self.image_set.train_size // 10)}"
            )
        kept = self.image_set.train_size - (config.holdout if config.validation is Validation.holdout else 0)
        if config.drop_last and config.batch_size > kept:
            raise UserError(
                f"data.batch_size = {config.batch_size}: with data.drop_last, at most the {kept} training images"
            )
        self.arrays: Arrays | None = None
        self.splits: dict[str, tuple[Tensor, Tensor]] | None = None
        self.kept: Tensor | None = None  # the training images that are not held out, where some are

    def prepare_data(self) -> None:
        """Fetches, verifies and keeps the data in memory, once."""
        if self.arrays is None:
            self.arrays = load(self.image_set, self.config.root, self.config.folder)

    def setup(self, stage: str | None = None) -> None:
        if self.splits is not None:
            return
        self.prepare_data()
        images, labels, test_images, test_labels = (torch.from_numpy(array).contiguous() for array in self.arrays)
        train, test = (images, labels.long()), (test_images, test_labels.long())
        validation = test
        if self.config.validation is Validation.holdout:
            shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
            held, kept = shuffled[: self.config.holdout].sort().values, shuffled[self.config.holdout :].sort().values
            train, validation = (images[kept], train[1][kept]), (images[held], train[1][held])
            self.kept = kept
        self.splits = {"train": train, "val": validation, "test": test}

    def batches(self, world_size: int) -> dict[str, int]:
        """How many there are in training, validation and test."""
        held_out = self.config.holdout if self.config.validation is Validation.holdout else 0
        whole, rest = divmod(self.image_set.train_size - held_out, self.config.batch_size)
        sizes = {"val": held_out or self.image_set.test_size, "test": self.image_set.test_size}
        evaluated = {stage: -(-size // world_size // self.config.eval_batch_size) for stage, size in sizes.items()}
        return {"train": whole + (not self.config.drop_last and rest >= world_size)} | evaluated

    def train_dataloader(self) -> TrainLoader:
        images, labels = self._on_device("train")
        augmentation = Augmentation(self.config.crop_padding, self.config.flip)
        return TrainLoader(
            images,
            labels,
            self._normalise,
            self.config.batch_size,
            self.config.drop_last,
            EpochOrder(len(labels), self.seed, augmentation, self.shuffle),
            self._rank,
            self._world_size,
        )

    def val_dataloader(self) -> EvalLoader:
        return self._eval_loader("val")

    def test_dataloader(self) -> EvalLoader:
        return self._eval_loader("test")

    def whole_images(self, split: str, limit: int | None = None) -> tuple[Tensor, Tensor]:
        """The first images of a split as the network takes them, neither cropped nor mirrored, and their labels."""
        images, labels = self._on_device(split)
        loader = EvalLoader(images[:limit], labels[:limit], self._normalise, self.config.eval_batch_size, 0, 1)
        return torch.cat([batch[0] for batch in loader]), labels[:limit]

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Whole images that were kept aside, or where none were, as many training images; never of the test set."""
        return self.whole_images(
            "val" if self.config.validation is Validation.holdout else "train", self.config.holdout
        )

    def of_training_set(self, images: Tensor) -> Tensor:
        """Places among the images that are trained on, as places in the data set's training images."""
        return images if self.kept is None else self.kept[images]

    def _eval_loader(self, split: str) -> EvalLoader:
        images, labels = self._on_device(split)
        return EvalLoader(images, labels, self._normalise, self.config.eval_batch_size, self._rank, self._world_size)

    def _on_device(self, split: str) -> tuple[Tensor, Tensor]:
        images, labels = self.splits[split]
        self.splits[split] = images.to(self._device), labels.to(self._device)  # moved once
        return self.splits[split]

    @property
    def _normalise(self) -> Normalisation:
        return Normalisation(list(self.config.mean), list(self.config.std), self._device)

    @property
    def _device(self) -> torch.device:
        return self.trainer.strategy.root_device if self.trainer is not None else torch.device("cpu")

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1
