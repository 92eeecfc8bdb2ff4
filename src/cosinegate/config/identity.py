"""The identity of a config: runs that compute the same share it, and their folder is named by it."""

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
NOT_IDENTITY += ("trainer.enable_progress_bar", "trainer.enable_model_summary")
NOT_IDENTITY += ("trainer.profiler",)
OF_A_FOLDER = ("size", "channels", "test_fraction", "content")  # keys of data=folder: no part where they are null

# Keys that left, with what every run has had there: a part of the identities, so that runs keep their folders.
LEFT = {"trainer": {"num_sanity_val_steps": 0, "sync_batchnorm": True}}

LATEST = "latest"  # beside the runs of an experiment: a link to the newest
FIGURES = "figures"  # in runs_dir: what commands about several runs write, and in a run's folder its own
SWEEPS = ".sweeps"  # in runs_dir: which runs a sweep has, a search's study, a launcher's logs


def blocks_per_stage(network: DictConfig) -> list[int]:
    return list(network.blocks or [(network.depth - 2) // 6] * 3)


def stage_widths(network: DictConfig) -> list[int]:
    """Returns the channels of each stage."""
    return list(network.widths or (network.width, 2 * network.width, 4 * network.width))


def reference(network: DictConfig) -> DictConfig:
    """Returns the network of the config's depth and width with evenly distributed blocks, which ratios refer to."""
    return OmegaConf.merge(network, {"blocks": None, "widths": None})


def convolution_weights(network: DictConfig) -> int:
    """Returns the number of weights in the residuals' convolutions, nearly all of a network's, without building it."""
    widths = stage_widths(network)
    inner = sum(18 * channels**2 * number for channels, number in zip(widths, blocks_per_stage(network), strict=True))
    return inner - 9 * sum(after * (after - before) for before, after in pairwise(widths))


def primitives(config: DictConfig) -> dict[str, Any]:
    """Returns the resolved config as plain dicts, lists, numbers and strings."""
    return OmegaConf.to_container(config, resolve=True, enum_to_str=True, throw_on_missing=True)


def identity(config: DictConfig) -> str:
    """Returns ten hex digits that configs share if they ask for the same computation, whatever the seed."""
    content = primitives(config)
    content["callbacks"] = OmegaConf.to_container(config.callbacks)  # what they take from other keys is there already
    for key in NOT_IDENTITY:
        *parents, last = key.split(".")
        node = content
        for parent in parents:
            node = node[parent]
        del node[last]
    for group, values in LEFT.items():
        content[group] |= values
    for key in OF_A_FOLDER:
        if content["data"][key] is None:
            del content["data"][key]
    if config.weights:  # runs of several seeds, each from the run of its own seed, are one configuration
        content["weights"] = re.sub(rf"-s{config.seed}$", "", str(Path(config.weights)))
    if content["network"]["library"] is None:  # as it was before other libraries' networks had keys
        ours = {key: value for key, value in content["network"].items() if key not in ("library", "model", "options")}
        content["network"] = ours | {"torchvision": None}
    if content["gate"]["kind"] == GateKind.none.name:
        content["gate"], content["objective"] = {"kind": "none"}, None  # a dense network looks at nothing else of them
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


def run_folder(config: DictConfig) -> Path:
    """Returns the run's folder: `run_dir`, or one that follows from the identity and the seed."""
    if config.run_dir is not None:
        return Path(config.run_dir)
    return Path(config.runs_dir) / config.name / f"{identity(config)}-s{config.seed}"


def leaves(node: Any, path: str = "") -> dict[str, Any]:
    """Returns every value of nested dicts by its dotted key; a list is one value."""
    if not isinstance(node, dict):
        return {path: node}
    return {k: v for key, child in node.items() for k, v in leaves(child, f"{path}.{key}" if path else key).items()}
