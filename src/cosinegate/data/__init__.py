"""Where images come from (verified), how they reach the network (in memory), and one DataModule for all of them."""

from cosinegate.config.choices import Dataset
from cosinegate.config.schema import DataConfig
from cosinegate.data.cifar10 import CIFAR10
from cosinegate.data.digits import DIGITS
from cosinegate.data.folder import folder_set
from cosinegate.data.mnist import FASHION_MNIST, MNIST
from cosinegate.data.sources import ImageSet

IMAGE_SETS: dict[str, ImageSet] = {image_set.name: image_set for image_set in (CIFAR10, MNIST, FASHION_MNIST, DIGITS)}


def image_set(data: DataConfig) -> ImageSet:
    """What is known of the config's data set before its images are loaded."""
    return folder_set(data) if data.name is Dataset.folder else IMAGE_SETS[data.name.name]
