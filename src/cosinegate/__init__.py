"""CosineGate: residual networks that ask, for each sample, whether a block is worth computing."""

from cosinegate import torchvision_operators

torchvision_operators.define_missing()  # before the first import of lightning or torchmetrics, which import torchvision
