"""Residual networks whose blocks take an optional gate."""

from cosinegate.networks.block import ResidualBlock
from cosinegate.networks.network import GatedNetwork, Output, Routing
from cosinegate.networks.resnet import ResNet

__all__ = ["GatedNetwork", "Output", "ResNet", "ResidualBlock", "Routing"]
