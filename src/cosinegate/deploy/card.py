"""A deployed network as data: safetensors weights, and a JSON card that tells how to build the network.

Weights have the same names as in training, so those of a compiled network are a subset of the run's.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from cosinegate.config.identity import primitives
from cosinegate.deploy.exits import EarlyExitNetwork, Exit
from cosinegate.networks import GatedNetwork
from cosinegate.networks.compile import Action, Changes, remove_blocks
from cosinegate.runs.files import replacing
from cosinegate.runs.untrusted import read_json
from cosinegate.terminal.errors import UserError
from cosinegate.training.build import build_network
from cosinegate.training.load import checked_config

FORMAT = 7  # earlier ones described blocks one by one, for a runtime of its own
CARD, WEIGHTS = "card.json", "weights.safetensors"
LARGEST_WEIGHTS = 2**31  # bytes: fifty times those of the largest network

Network = GatedNetwork | EarlyExitNetwork


def described(network: Network, config: DictConfig, actions: list[Action] | None) -> dict[str, Any]:
    """Returns what `read_network` builds the network from; `actions` are what compiling did to each block, or None."""
    kept = primitives(config)
    exits = None
    if isinstance(network, EarlyExitNetwork):
        exits = {str(index): network.exit_after(index).channels for index in network.after}
    return {
        "format": FORMAT,
        "config": {key: kept[key] for key in ("data", "network", "gate", "objective", "seed", "name")},
        "actions": None if actions is None else [action.name for action in actions],
        "exits": exits,  # channels of the map that each exit pools, by the block before it
    }


def actions_of(changes: Changes) -> list[Action]:
    return [change.action for change in changes.blocks]


def write_weights(network: Network, path: Path) -> None:
    with replacing(path) as file:
        file.write(save({name: tensor.contiguous() for name, tensor in network.state_dict().items()}))


def write_card(card: dict[str, Any], folder: Path) -> None:
    with replacing(folder / CARD) as file:
        file.write((json.dumps(card, indent=2) + "\n").encode())


def read_network(folder: str | Path) -> tuple[dict[str, Any], Network, DictConfig]:
    """Returns a folder's card, its network and its training config. Raises UserError if card and weights differ."""
    path, weights = Path(folder) / CARD, Path(folder) / WEIGHTS
    try:
        card = read_json(path)
        network, digest = card["network"], card["files"][WEIGHTS]
        form = network["format"]
    except (UserError, OSError, LookupError, TypeError) as error:
        raise UserError(f"{path}: not a card of this program: {error}") from error
    if form != FORMAT:
        raise UserError(f"{path}: a card of format {form}, where this version reads {FORMAT}: export again")
    if not weights.is_file() or weights.stat().st_size > LARGEST_WEIGHTS or sha256(weights) != digest:
        raise UserError(f"{weights}: not the file that its card describes: missing or damaged")
    return card, *_built(network, path, weights)


def _built(card: dict[str, Any], path: Path, weights: Path) -> tuple[Network, DictConfig]:
    size = weights.stat().st_size
    removed = (card.get("actions") or []).count(Action.removed.name) if isinstance(card.get("actions"), list) else 0
    config = checked_config(card.get("config"), path, size if removed == 0 else LARGEST_WEIGHTS)
    try:
        with torch.device("meta"):
            network: Network = build_network(config)
            if card.get("actions") is not None:
                remove_blocks(network, [Action[name] for name in card["actions"]])
            if card.get("exits") is not None:
                network = EarlyExitNetwork(network, _exits(card["exits"], network, size))
        network.load_state_dict(_same_kinds(load_file(weights), network.state_dict()), assign=True)
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UserError(f"{weights}: not the weights of its card: {' '.join(str(error).split())[:200]}") from error
    return network.requires_grad_(False).eval().to(memory_format=torch.channels_last), config


def _same_kinds(stored: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the stored weights if they are floats where expected, all of one precision."""
    floats = {name: tensor.dtype for name, tensor in stored.items() if tensor.is_floating_point()}
    if len(set(floats.values())) > 1 or floats.keys() != {n for n, t in expected.items() if t.is_floating_point()}:
        raise ValueError("names or number formats differ")
    return stored


def _exits(card: dict[str, Any], network: GatedNetwork, size: int) -> dict[int, Exit]:
    known = {str(index) for index in range(len(network.blocks))}
    if not isinstance(card, dict) or not set(card) <= known:
        raise ValueError(f"exits after {list(card)[:9]} of {len(network.blocks)} blocks")
    for channels in card.values():
        if not isinstance(channels, int) or not 1 <= channels <= size:
            raise ValueError(f"an exit with {str(channels)[:20]} channels")
    return {int(at): Exit(channels=channels, num_classes=network.num_classes) for at, channels in card.items()}


def is_card_folder(folder: Path) -> bool:
    """Returns whether the folder has a card that this program wrote."""
    try:
        card = read_json(folder / CARD)
    except (UserError, FileNotFoundError, NotADirectoryError):
        return False
    return isinstance(card, dict) and {"network", "files"} <= card.keys() and isinstance(card["files"], dict)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
