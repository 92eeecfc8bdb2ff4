"""The deployed network as safetensors weights and the JSON that rebuilds it: data, with no code in it."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from cosinegate.deploy.eyes import Statistics, classifier
from cosinegate.deploy.folded import FoldedBlock, FoldedNetwork
from cosinegate.deploy.gates import built
from cosinegate.deploy.heads import GateHead
from cosinegate.errors import UserError
from cosinegate.files import replacing
from cosinegate.foreign import read_json
from cosinegate.gates.exit import ExitClassifier
from cosinegate.networks.block import PadShortcut

FORMAT = 6
READ = (
    1,
    2,
    3,
    4,
    5,
    6,
)  # in 1 every gate was a predictive one; from 5 on exits may have their own classifiers; from 6
# on there are torchvision's networks and gates that compare
MOST_BLOCKS = 1000
LARGEST_WEIGHTS = 2**31  # bytes: fifty times those of the largest network


def described(network: FoldedNetwork) -> dict[str, Any]:
    """The shapes that `rebuilt` needs."""
    return {
        "format": FORMAT,
        "in_channels": network.stem.in_channels,
        "size": network.size,
        "width": network.stem.out_channels,
        "pooled": network.pool is not None,  # with torchvision's stem
        "classes": network.classes,
        "own": network.head.w1.out_features if isinstance(network.head, ExitClassifier) else None,
        "blocks": [
            {
                "inputs": block.inputs,
                "outputs": block.outputs,
                "middle": block.conv1.out_channels if len(block.convolutions) == 3 else None,  # of a bottleneck
                "stride": _stride(block.shortcut),
                "shortcut": _kind(block.shortcut),
                "post_activation": block.post_activation,
                "gate": None if block.head is None else block.head.described(),
                "looks": None if block.eye is None else block.eye.described(),
                "removed": block.removed,
            }
            for block in network.blocks
        ],
    }


def rebuilt(card: dict[str, Any], path: Path) -> FoldedNetwork:
    """The network that a card describes, with the weights of the file."""
    try:
        if card["format"] not in READ:
            raise UserError(f"{path}: format {card['format']}, this program reads {FORMAT}")
        weights = load_file(path)
        with torch.device("meta"):  # a card may claim any size: the memory is that of the file
            if len(card["blocks"]) > MOST_BLOCKS:
                raise ValueError(f"{len(card['blocks'])} blocks")
            blocks, channels, pooled = [_block(**block) for block in card["blocks"]], card["width"], card.get("pooled")
            for place, block in enumerate(blocks):  # one that was removed has no weights that would tell
                if block.inputs != channels:
                    raise ValueError(f"block {place} takes {block.inputs} channels and is given {channels}")
                channels = block.outputs
            kernel, pool = (7, [nn.MaxPool2d(3, 2, padding=1)]) if pooled else (3, [])
            stem = nn.Conv2d(card["in_channels"], card["width"], kernel, 2 if pooled else 1, padding=kernel // 2)
            head, size = classifier(channels, card["classes"], card.get("own")), card["size"]
            network = FoldedNetwork(stem, blocks, head, size and tuple(size), *pool)
        network.load_state_dict(weights, assign=True)
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UserError(f"{path}: not the weights of its card: {' '.join(str(error).split())[:200]}") from error
    return network.requires_grad_(False).eval().to(memory_format=torch.channels_last)


def read_exported(folder: str | Path) -> FoldedNetwork:
    """The network in an export's folder, if its weights are those of the card."""
    return read_export(folder)[1]


def read_export(folder: str | Path) -> tuple[dict[str, Any], FoldedNetwork]:
    """The card in an export's folder, and the network, if its weights are those of the card."""
    path, weights = Path(folder) / "card.json", Path(folder) / "weights.safetensors"
    try:
        card = read_json(path)
        network, digest = card["network"], card["files"][weights.name]
    except (UserError, OSError, LookupError, TypeError) as error:
        raise UserError(f"{path}: not an export's card: {error}") from error
    if not weights.is_file() or weights.stat().st_size > LARGEST_WEIGHTS or sha256(weights) != digest:
        raise UserError(f"{weights}: not the file that its card describes: missing or damaged")
    return card, rebuilt(network, weights)


def is_export(folder: Path) -> bool:
    """Whether the folder's card is one of ours."""
    try:
        card = read_json(folder / "card.json")
    except (UserError, FileNotFoundError, NotADirectoryError):
        return False
    return isinstance(card, dict) and {"network", "forms", "files"} <= card.keys() and isinstance(card["files"], dict)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_weights(network: FoldedNetwork, path: Path) -> None:
    """A block that was removed has none."""
    with replacing(path) as file:
        file.write(save({name: tensor.contiguous() for name, tensor in network.state_dict().items()}))


def _kind(shortcut: nn.Module) -> str:
    return {nn.Identity: "identity", PadShortcut: "pad", nn.Conv2d: "projection"}[type(shortcut)]


def _stride(shortcut: nn.Module) -> int:
    stride = getattr(shortcut, "stride", 1)
    return stride[0] if isinstance(stride, tuple) else stride


def _block(
    inputs: int,
    outputs: int,
    stride: int,
    shortcut: str,
    post_activation: bool,
    gate: dict[str, Any] | list[int] | None,
    looks: dict[str, Any] | bool | None,
    removed: bool,
    middle: int | None = None,
) -> FoldedBlock:
    paths = {
        "identity": nn.Identity,
        "pad": lambda: _pad(outputs - inputs, stride),
        "projection": lambda: nn.Conv2d(inputs, outputs, 1, stride),
    }
    if removed:
        convolutions = []
    elif middle is None:
        convolutions = [nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)]
    else:
        first, last = nn.Conv2d(inputs, middle, 1), nn.Conv2d(middle, outputs, 1)
        convolutions = [first, nn.Conv2d(middle, middle, 3, stride, padding=1), last]
    block = FoldedBlock(inputs, outputs, convolutions, paths[shortcut](), post_activation)
    if isinstance(gate, list):  # format 1
        block.head = GateHead(features=gate[1], hidden=gate[0])
    else:
        block.head = None if gate is None else built(gate)
    block.eye = built(looks) if isinstance(looks, dict) else Statistics() if looks else None
    return block


def _pad(new_channels: int, stride: int) -> PadShortcut:
    if new_channels < 0 or stride < 1:
        raise ValueError(f"a shortcut with {new_channels} new channels and a stride of {stride}")
    return PadShortcut(new_channels, stride)
