"""Which runs are the same: the identity of what a config asks for, and the folder that follows from it."""

import hashlib
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from cosinegate.config.choices import GateKind

# The keys that say where and how a run is kept or shown, not what it computes: they are no part of its identity.
NOT_IDENTITY = ("name", "seed", "threads", "runs_dir", "run_dir", "sweep", "save_minutes", "logger")
NOT_IDENTITY += ("data.root", "data.folder")
NOT_IDENTITY += ("trainer.accelerator", "trainer.devices", "trainer.strategy", "trainer.num_nodes")
NOT_IDENTITY += ("trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.log_every_n_steps")
NOT_IDENTITY += ("trainer.profiler",)
OF_A_FOLDER = ("size", "channels", "test_fraction", "content")  # keys of data=folder: no part where they are null

LATEST = "latest"  # beside the runs of an experiment: a link to the newest
SWEEPS = ".sweeps"  # in runs_dir: which runs a sweep has, a search's study, a launcher's logs


def blocks_per_stage(network: DictConfig) -> list[int]:
    return list(network.blocks or [(network.depth - 2) // 6] * 3)


def stage_widths(network: DictConfig) -> list[int]:
    """The channels of each stage."""
    return list(network.widths or (network.width, 2 * network.width, 4 * network.width))


def reference(network: DictConfig) -> DictConfig:
    """The network of its depth and width, which a benchmark's figures are ratios to, however it is shared out."""
    return OmegaConf.merge(network, {"blocks": None, "widths": None})


def convolution_weights(network: DictConfig) -> int:
    """How many weights the convolutions of the residuals have: nearly all of a network's, known before it is built."""
    widths = stage_widths(network)
    inner = sum(18 * channels**2 * number for channels, number in zip(widths, blocks_per_stage(network), strict=True))
    return inner - 9 * sum(after * (after - before) for before, after in pairwise(widths))


def primitives(config: DictConfig) -> dict[str, Any]:
    """The resolved config as plain dicts, lists, numbers and words."""
    return OmegaConf.to_container(config, resolve=True, enum_to_str=True, throw_on_missing=True)


def identity(config: DictConfig) -> str:
    """Ten hex digits that two configs share when they ask for the same computation, the seed aside."""
    content = primitives(config)
    content["callbacks"] = OmegaConf.to_container(config.callbacks)  # what they take from other keys is there already
    for key in NOT_IDENTITY:
        *parents, last = key.split(".")
        node = content
        for parent in parents:
            node = node[parent]
        del node[last]
    for key in OF_A_FOLDER:
        if content["data"][key] is None:
            del content["data"][key]
    if config.weights:  # runs of several seeds, each from the run of its own seed, are one configuration
        content["weights"] = re.sub(rf"-s{config.seed}$", "", str(Path(config.weights)))
    if content["gate"]["kind"] == GateKind.none.name:
        content["gate"], content["objective"] = {"kind": "none"}, None  # a dense network looks at nothing else of them
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


def run_folder(config: DictConfig) -> Path:
    """Where the run lives: what was asked for, or a folder that follows from what the run computes."""
    if config.run_dir is not None:
        return Path(config.run_dir)
    return Path(config.runs_dir) / config.name / f"{identity(config)}-s{config.seed}"


def leaves(node: Any, path: str = "") -> dict[str, Any]:
    """Every value of nested dicts by its dotted key; a list is one value."""
    if not isinstance(node, dict):
        return {path: node}
    return {k: v for key, child in node.items() for k, v in leaves(child, f"{path}.{key}" if path else key).items()}
