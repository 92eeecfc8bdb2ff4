"""Where images come from (verified), how they reach the network (in memory), and one DataModule for all of them."""

from cosinegate.data.cifar10 import CIFAR10
from cosinegate.data.digits import DIGITS
from cosinegate.data.mnist import FASHION_MNIST, MNIST
from cosinegate.data.sources import ImageSet

IMAGE_SETS: dict[str, ImageSet] = {image_set.name: image_set for image_set in (CIFAR10, MNIST, FASHION_MNIST, DIGITS)}
