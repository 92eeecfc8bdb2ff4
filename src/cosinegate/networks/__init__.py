"""Residual networks whose blocks take an optional gate."""

from cosinegate.networks.block import ResidualBlock
from cosinegate.networks.resnet import Output, ResNet, Routing

__all__ = ["Output", "ResNet", "ResidualBlock", "Routing"]
