"""The parts of timm's blocks: one small function a block class."""

from timm.layers import DropPath
from timm.models import _efficientnet_blocks, convnext, mlp_mixer, resnet, swin_transformer, vision_transformer

from cosinegate.networks.adapt import Part, parts, turns_off


@turns_off(DropPath)
def drop_path(layer: DropPath) -> None:
    layer.drop_prob = 0.0


@parts(resnet.BasicBlock)
def basic(block: resnet.BasicBlock) -> list[Part]:
    first = [block.conv1, block.bn1, block.drop_block, block.act1, block.aa]
    return [Part([*first, block.conv2, block.bn2, block.se], [block.downsample], [block.act2])]


@parts(resnet.Bottleneck)
def bottleneck(block: resnet.Bottleneck) -> list[Part]:
    first = [block.conv1, block.bn1, block.act1, block.conv2, block.bn2, block.drop_block, block.act2, block.aa]
    return [Part([*first, block.conv3, block.bn3, block.se], [block.downsample], [block.act3])]


@parts(convnext.ConvNeXtBlock)
def convnext_block(block: convnext.ConvNeXtBlock) -> list[Part]:
    layers = [block.norm, block.mlp]
    if not block.use_conv_mlp:  # LayerNorm and linear layers take channels last
        layers = [lambda x: x.permute(0, 2, 3, 1), *layers, lambda x: x.permute(0, 3, 1, 2)]
    scale = None if block.gamma is None else lambda x: x.mul(block.gamma.reshape(1, -1, 1, 1))
    return [Part([block.conv_dw, *layers, scale], [block.shortcut])]


@parts(vision_transformer.Block)
def transformer(block: vision_transformer.Block) -> list[Part]:
    attention = Part([block.norm1, block.attn, block.ls1], channels_last=True)
    return [attention, Part([block.norm2, block.mlp, block.ls2], channels_last=True)]


@parts(vision_transformer.ResPostBlock)
def post_norm_transformer(block: vision_transformer.ResPostBlock) -> list[Part]:
    return [Part([block.attn, block.norm1], channels_last=True), Part([block.mlp, block.norm2], channels_last=True)]


@parts(swin_transformer.SwinTransformerBlock)
def swin(block: swin_transformer.SwinTransformerBlock) -> list[Part]:
    attention = Part([block.norm1, block._attn], channels_last=True)
    return [attention, Part([block.norm2, block.mlp], channels_last=True)]


@parts(mlp_mixer.MixerBlock)
def mixer(block: mlp_mixer.MixerBlock) -> list[Part]:
    def transposed(x):  # noqa: ANN001, ANN202
        return x.transpose(1, 2)

    tokens = Part([block.norm1, transposed, block.mlp_tokens, transposed], channels_last=True)
    return [tokens, Part([block.norm2, block.mlp_channels], channels_last=True)]


@parts(_efficientnet_blocks.InvertedResidual)
def inverted_residual(block: _efficientnet_blocks.InvertedResidual) -> list[Part]:
    first = [block.conv_s2d, block.bn_s2d, block.conv_pw, block.bn1, block.conv_dw, block.bn2, block.aa, block.se]
    return [Part([*first, block.conv_pwl, block.bn3])] if block.has_skip else []


@parts(_efficientnet_blocks.DepthwiseSeparableConv)
def depthwise_separable(block: _efficientnet_blocks.DepthwiseSeparableConv) -> list[Part]:
    first = [block.conv_s2d, block.bn_s2d, block.conv_dw, block.bn1, block.aa, block.se]
    return [Part([*first, block.conv_pw, block.bn2])] if block.has_skip else []


@parts(_efficientnet_blocks.EdgeResidual)
def edge_residual(block: _efficientnet_blocks.EdgeResidual) -> list[Part]:
    layers = [block.conv_exp, block.bn1, block.aa, block.se, block.conv_pwl, block.bn2]
    return [Part(layers)] if block.has_skip else []


@parts(_efficientnet_blocks.UniversalInvertedResidual)
def universal(block: _efficientnet_blocks.UniversalInvertedResidual) -> list[Part]:
    first = [block.dw_start, block.pw_exp, block.dw_mid, block.se, block.pw_proj]
    return [Part([*first, block.dw_end, block.layer_scale])] if block.has_skip else []
