"""The digits embedded in scikit-learn: 1,797 real 8x8 images, no download. Every fifth is a test image."""

from pathlib import Path

import numpy as np

from cosinegate.data.sources import Arrays, ImageSet


def embedded(scratch: Path) -> Arrays:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None]  # 0..16 -> 0..255
    labels = digits.target.astype(np.uint8)
    test = np.arange(len(labels)) % 5 == 4
    return Arrays(images[~test], labels[~test], images[test], labels[test])


DIGITS = ImageSet(
    name="digits",
    classes=tuple(str(digit) for digit in range(10)),
    shape=(8, 8, 1),
    train_size=1438,
    test_size=359,
    sha256="eb166841264f08df9d3e336092b0561a0bc971cfffc27265d37af9ffa8a506db",
    from_folder=None,
    sources=(("scikit-learn", embedded),),
)
