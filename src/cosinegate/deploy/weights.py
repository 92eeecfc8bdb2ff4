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

FORMAT = 5
READ = (1, 2, 3, 4, 5)  # in format 1 every gate was a predictive one; exits may have their own classifiers from 5 on


def described(network: FoldedNetwork) -> dict[str, Any]:
    """The shapes that `rebuilt` needs."""
    return {
        "format": FORMAT,
        "in_channels": network.stem.in_channels,
        "size": network.size,
        "width": network.stem.out_channels,
        "classes": network.classes,
        "own": network.head.w1.out_features if isinstance(network.head, ExitClassifier) else None,
        "blocks": [
            {
                "inputs": block.conv1.in_channels,
                "outputs": block.conv1.out_channels,
                "stride": block.conv1.stride[0],
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
            blocks = [_block(**block) for block in card["blocks"][: len(weights)]]
            stem = nn.Conv2d(card["in_channels"], card["width"], 3, padding=1)
            head, size = classifier(blocks[-1].conv1.out_channels, card["classes"], card.get("own")), card["size"]
            network = FoldedNetwork(stem, blocks, head, size and tuple(size))
        missing, unknown = network.load_state_dict(weights, strict=False, assign=True)
        if unknown or not set(missing) <= _removed(network):
            raise ValueError(f"{len(missing)} tensors too few, {len(unknown)} too many")
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UserError(f"{path}: not the weights of its card: {' '.join(str(error).split())[:200]}") from error
    return network.requires_grad_(False).eval().to(memory_format=torch.channels_last)


def read_exported(folder: str | Path) -> FoldedNetwork:
    """The network in an export's folder, if its weights are those of the card."""
    path, weights = Path(folder) / "card.json", Path(folder) / "weights.safetensors"
    try:
        card = read_json(path)
        network, digest = card["network"], card["files"][weights.name]
    except (UserError, OSError, LookupError, TypeError) as error:
        raise UserError(f"{path}: not an export's card: {error}") from error
    if not weights.is_file() or hashlib.sha256(weights.read_bytes()).hexdigest() != digest:
        raise UserError(f"{weights}: not the file that its card describes: missing or damaged")
    return rebuilt(network, weights)


def write_weights(network: FoldedNetwork, path: Path) -> None:
    """All but those of blocks that were removed."""
    gone = _removed(network)
    kept = {name: tensor.contiguous() for name, tensor in network.state_dict().items() if name not in gone}
    with replacing(path) as file:
        file.write(save(kept))


def _removed(network: FoldedNetwork) -> set[str]:
    """The names of the weights that nothing computes with."""
    removed = tuple(f"blocks.{place}.conv" for place, block in enumerate(network.blocks) if block.removed)
    return {name for name in network.state_dict() if name.startswith(removed)}


def _kind(shortcut: nn.Module) -> str:
    return {nn.Identity: "identity", PadShortcut: "pad", nn.Conv2d: "projection"}[type(shortcut)]


def _block(
    inputs: int,
    outputs: int,
    stride: int,
    shortcut: str,
    post_activation: bool,
    gate: dict[str, Any] | list[int] | None,
    looks: dict[str, Any] | bool | None,
    removed: bool,
) -> FoldedBlock:
    paths = {
        "identity": nn.Identity,
        "pad": lambda: PadShortcut(outputs - inputs, stride),
        "projection": lambda: nn.Conv2d(inputs, outputs, 1, stride),
    }
    conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1)
    block = FoldedBlock(conv1, nn.Conv2d(outputs, outputs, 3, padding=1), paths[shortcut](), post_activation)
    if isinstance(gate, list):  # format 1
        block.head = GateHead(features=gate[1], hidden=gate[0])
    else:
        block.head = None if gate is None else built(gate)
    block.eye = built(looks) if isinstance(looks, dict) else Statistics() if looks else None
    block.removed = removed
    return block
