"""Checks a config before any work: keys that are not there, values out of range, values that do not go together."""

import dataclasses
import difflib
import os
import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from cosinegate.config.choices import Dataset, GateKind, Polarity
from cosinegate.config.identity import (
    LATEST,
    OF_A_FOLDER,
    blocks_per_stage,
    convolution_weights,
    leaves,
    primitives,
    reference,
)
from cosinegate.config.schema import GATES, MOST_IMAGES, MOST_THREADS, ranges
from cosinegate.terminal.errors import UserError

LARGEST = 1e30  # of a number that float32 holds, with room to compute with it
MOST_WEIGHTS = 500_000_000  # of the convolutions: two gigabytes, and several times that in training
SECRET = re.compile(r"api_?key|token|secret|passw|credential", re.IGNORECASE)


def require_schema(node: Any, path: str = "") -> None:
    """Ends with one line where a key is not the schema's, which `+` can add, or is gone, which `~` can bring about."""
    if not isinstance(node, DictConfig) or node._is_none() or node._is_missing() or node._is_interpolation():
        return
    known = schema_keys(OmegaConf.get_type(node))
    for key in known if path == "" else []:  # of the others OmegaConf itself lets none go
        if key not in list(node):
            raise UserError(not_left_out(key))
    for key in node:
        if known and key not in known and f"{path}{key}" != "hydra.env":  # Hydra's own, beside its schema
            raise UserError(no_such_key(f"{path}{key}", known))
        require_schema(node._get_node(key), f"{path}{key}.")


def schema_keys(schema: Any) -> list[str]:
    """The keys of a part of a config; none where any key may be."""
    return [field.name for field in dataclasses.fields(schema)] if dataclasses.is_dataclass(schema) else []


def not_left_out(full_key: str) -> str:
    return f"{full_key}: cannot be left out; give it a value, as in {full_key}=..."


def no_such_key(full_key: str, known: list[str]) -> str:
    """One line about a key that a part of a config does not have, with the one that may have been meant."""
    parent, _, key = full_key.rpartition(".")
    near = difflib.get_close_matches(key, known, n=1)
    hint = f", did you mean {near[0]}?" if near else ""
    where = f"{parent} has" if parent else "there are"
    return f"{full_key}: no such key{hint}" + (f" ({where} {', '.join(known)})" if known else "")


def require(config: DictConfig) -> None:
    """Ends with one line that names the first key that has no value."""
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise UserError(f"{missing[0]} has no value: give one on the command line, as in {missing[0]}=...")


def require_positive(config: DictConfig, *keys: str) -> None:
    """Ends with one line that names the first of the keys that is below 1, or beyond any use."""
    for key in keys:
        most = MOST_THREADS if key == "threads" else MOST_IMAGES
        if config[key] is not None and not 1 <= config[key] <= most:
            raise UserError(f"{key} = {config[key]}: must be at least 1 and at most {most}")


def validate(config: DictConfig) -> None:
    """Ends with one line that names the first key whose value is missing or out of range."""
    require(config)
    for key, value in leaves(primitives(config)).items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not abs(number) <= LARGEST:  # nor of what is no number
                raise UserError(f"{key} = {value}: must be a finite number, at most {LARGEST:g}")
        if SECRET.search(key.rpartition(".")[2]) and value is not None:  # it would lie in records and checkpoints
            raise UserError(
                f"{key}: a secret has no place in a config; W&B's key is for `wandb login` or WANDB_API_KEY"
            )
    check_ranges(config)
    for network in (config.network, reference(config.network)):
        weights = convolution_weights(network)
        if weights > MOST_WEIGHTS:
            given = "width" if network.widths is None else "widths"
            words = f"network.{given} = {network[given]} with {sum(blocks_per_stage(network))} blocks"
            most = f"must be at most {MOST_WEIGHTS // 10**6} million"
            raise UserError(f"{words}: {weights // 10**6} million weights; {most}")
    _check_gate(config)
    if config.trainer.check_val_every_n_epoch > config.trainer.max_epochs:
        raise UserError(
            f"trainer.check_val_every_n_epoch = {config.trainer.check_val_every_n_epoch}: "
            f"must be at most trainer.max_epochs = {config.trainer.max_epochs}"
        )
    _check_weights(config)
    if config.optimizer.nesterov and config.optimizer.momentum == 0:
        raise UserError("optimizer.nesterov = True: needs optimizer.momentum above 0")
    _check_data(config.data)


def _check_data(data: DictConfig) -> None:
    """Ends with one line where the keys of a data set do not go together."""
    for key in OF_A_FOLDER:
        if data.name is not Dataset.folder and data[key] is not None:
            raise UserError(f"data.{key} = {data[key]}: is for data=folder, not for {data.name.name}")
        if data.name is Dataset.folder and data[key] is None and key != "content":
            raise UserError(f"data.{key} has no value: choose the images by data=folder, which gives it one")
    if len(data.mean) != len(data.std):
        raise UserError(f"data.mean has {len(data.mean)} values and data.std {len(data.std)}: one a channel")


def check_ranges(config: DictConfig, path: str = "") -> None:
    """Ends with one line that names the first key whose value its schema does not allow."""
    schema = OmegaConf.get_type(config)
    for key, (is_allowed, words) in ranges(schema).items() if dataclasses.is_dataclass(schema) else ():
        if not is_allowed(config[key]):
            raise UserError(f"{path}{key} = {config[key]}: must be {words}")
    for key, node in config.items():
        if isinstance(node, DictConfig):
            check_ranges(node, f"{path}{key}.")


def _check_gate(config: DictConfig) -> None:
    """Ends with one line where a gate's values do not go together."""
    gate = config.gate
    if OmegaConf.get_type(gate) is not GATES[gate.kind]:
        words = "has other keys than this gate; choose it with them by a file of conf/gate, as in gate=aig"
        raise UserError(f"gate.kind = {gate.kind.name}: {words}")
    if gate.kind in (GateKind.cosine, GateKind.controller):
        gamma = gate.gamma.init
        if gate.polarity is Polarity.paper and gamma >= 0:
            words = "must be below 0 with gate.polarity=paper (the paper has γ < 0)"
            raise UserError(f"gate.gamma.init = {gamma}: {words}")
        if gamma == 0:
            raise UserError("gate.gamma.init = 0: must not be 0, or CIR moves no gate")
    if gate.kind is GateKind.controller and not gate.controller.enabled:
        raise UserError("gate.controller.enabled = False: gates of kind controller have nothing else to decide by")
    one_a_stage = config.network.torchvision is None and max(blocks_per_stage(config.network)) == 1
    if gate.kind is not GateKind.none and not gate.first_blocks and one_a_stage:
        raise UserError("gate.first_blocks = False: with one block a stage no block is left to have a gate")


def _check_weights(config: DictConfig) -> None:
    """Ends with one line where `weights` names no run that will be the same tomorrow."""
    if config.weights is None:
        return
    path = Path(config.weights)
    if config.weights == "":
        raise UserError("weights: give a run's folder or a checkpoint, as in weights=runs/digits/...")
    if path.name == LATEST and path.is_symlink():  # the same command would ask for another run tomorrow
        raise UserError(f"weights = {path}: give the run's own folder, {path.parent / os.readlink(path)}")


def check_one_of_several(config: DictConfig) -> None:
    """What a run alone may have and a job of a sweep, or a trial of a search, may not."""
    if config.run_dir is not None:
        raise UserError(f"run_dir = {config.run_dir}: several runs have a folder each; runs_dir is where they lie")
    if config.trainer.fast_dev_run:
        raise UserError("trainer.fast_dev_run: tries one run, and keeps nothing that a sweep or a search could show")


def is_number(value: Any) -> bool:
    """Whether it is a number that can be computed with: finite, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
