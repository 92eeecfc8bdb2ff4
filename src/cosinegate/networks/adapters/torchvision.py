"""The parts of torchvision's blocks: one small function a block class."""

from torch import Tensor
from torchvision.models import (
    convnext,
    efficientnet,
    mobilenetv2,
    mobilenetv3,
    resnet,
    swin_transformer,
    vision_transformer,
)
from torchvision.ops import StochasticDepth

from cosinegate.networks.adapt import Part, parts, turns_off


@turns_off(StochasticDepth)
def stochastic_depth(layer: StochasticDepth) -> None:
    layer.p = 0.0


@parts(resnet.BasicBlock)
def basic(block: resnet.BasicBlock) -> list[Part]:
    layers = [block.conv1, block.bn1, block.relu, block.conv2, block.bn2]
    return [Part(layers, [block.downsample], [block.relu])]


@parts(resnet.Bottleneck)
def bottleneck(block: resnet.Bottleneck) -> list[Part]:
    layers = [block.conv1, block.bn1, block.relu, block.conv2, block.bn2, block.relu, block.conv3, block.bn3]
    return [Part(layers, [block.downsample], [block.relu])]


@parts(mobilenetv2.InvertedResidual)
def inverted_residual(block: mobilenetv2.InvertedResidual) -> list[Part]:
    return [Part([block.conv])] if block.use_res_connect else []


@parts(mobilenetv3.InvertedResidual, efficientnet.MBConv, efficientnet.FusedMBConv)
def mobile(block: mobilenetv3.InvertedResidual) -> list[Part]:
    return [Part([block.block])] if block.use_res_connect else []


@parts(convnext.CNBlock)
def convnext_block(block: convnext.CNBlock) -> list[Part]:
    return [Part([block.block, lambda x: block.layer_scale * x])]


@parts(vision_transformer.EncoderBlock)
def transformer(block: vision_transformer.EncoderBlock) -> list[Part]:
    def attention(x: Tensor) -> Tensor:
        return block.self_attention(x, x, x, need_weights=False)[0]

    first = Part([block.ln_1, attention, block.dropout], channels_last=True)
    return [first, Part([block.ln_2, block.mlp], channels_last=True)]


@parts(swin_transformer.SwinTransformerBlock)
def swin(block: swin_transformer.SwinTransformerBlock) -> list[Part]:
    attention = Part([block.norm1, block.attn], channels_last=True)
    return [attention, Part([block.norm2, block.mlp], channels_last=True)]


@parts(swin_transformer.SwinTransformerBlockV2)
def swin_v2(block: swin_transformer.SwinTransformerBlockV2) -> list[Part]:
    attention = Part([block.attn, block.norm1], channels_last=True)
    return [attention, Part([block.mlp, block.norm2], channels_last=True)]
