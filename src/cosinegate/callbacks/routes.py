"""The route of every test image: the blocks that computed it, their CIR, and the predicted class."""

from collections import Counter
from dataclasses import dataclass

import numpy as np


@dataclass
class Routes:
    """Arrays over M images and N blocks. In a dense network every block is open, and there is neither CIR nor
    threshold.

    CIR is nan for a block without a gate.
    """

    index: np.ndarray  # (M,) which test image
    label: np.ndarray  # (M,)
    predicted: np.ndarray  # (M,)
    open: np.ndarray  # (M, N) bool
    cir: np.ndarray | None  # (M, N)
    threshold: np.ndarray | None  # (N,) the CIR at which a gate turns, at the mean of its controller's offset

    @property
    def right(self) -> np.ndarray:
        return self.label == self.predicted

    @property
    def gated(self) -> list[int]:
        """Returns the indices of the blocks that have a gate."""
        return [] if self.cir is None else np.flatnonzero(~np.isnan(self.cir).all(0)).tolist()

    @property
    def computed(self) -> np.ndarray:
        """Returns how many blocks computed each image, (M,)."""
        return self.open.sum(1)

    def paths(self, most: int) -> list[tuple[str, int, float]]:
        """Returns the most common paths (1 computed, 0 skipped, a digit for each block), with images and accuracy."""
        words = ["".join("1" if is_open else "0" for is_open in row) for row in self.open]
        right = Counter(word for word, is_right in zip(words, self.right, strict=True) if is_right)
        return [(word, count, right[word] / count) for word, count in Counter(words).most_common(most)]

    def by_class(self, classes: int) -> np.ndarray:
        """Returns the fraction of each class's images that compute each block, (K, N)."""
        empty = np.full(self.open.shape[1], np.nan)
        masks = [self.label == k for k in range(classes)]
        return np.stack([self.open[mask].mean(0) if mask.any() else empty for mask in masks])

    def accuracy_by_computed(self) -> list[tuple[int, int, float]]:
        """Returns tuples (number of computed blocks, number of images, their accuracy)."""
        groups = []
        for number in np.unique(self.computed):
            mask = self.computed == number
            groups.append((int(number), int(mask.sum()), float(self.right[mask].mean())))
        return groups

    def open_rate_by_cir(self, block: int, edges: np.ndarray) -> np.ndarray:
        """Returns for each bin of CIR the fraction of the images that compute the block; nan for an empty bin."""
        known = ~np.isnan(self.cir[:, block])
        bins = np.digitize(self.cir[known, block], edges[1:-1])
        images = np.bincount(bins, minlength=len(edges) - 1)
        opened = np.bincount(bins, self.open[known, block], minlength=len(edges) - 1)
        return np.divide(opened, images, out=np.full(len(images), np.nan), where=images > 0)

    def extremes(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the indices of the images that took the fewest blocks, and of those that took the most."""
        order = np.argsort(self.computed, kind="stable")
        return order[:number], order[::-1][:number]
