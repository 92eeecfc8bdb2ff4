"""Checks a config before any work: unknown keys, values out of range, values that exclude each other."""

import dataclasses
import difflib
import os
import re
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cosinegate.config.choices import Dataset, GateKind, Polarity
from cosinegate.config.commands import ReportConfig, SearchConfig
from cosinegate.config.identity import (
    LATEST,
    OF_A_FOLDER,
    blocks_per_stage,
    convolution_weights,
    leaves,
    primitives,
    reference,
)
from cosinegate.config.ranges import LARGEST
from cosinegate.config.schema import GATES, Config, ranges
from cosinegate.terminal.errors import UserError

MOST_WEIGHTS = 500_000_000  # of the convolutions: two gigabytes, and several times that in training
SECRET = re.compile(r"api_?key|token|secret|passw|credential", re.IGNORECASE)


def require_schema(node: Any, path: str = "") -> None:
    """Raises UserError for a key that is not in the schema (`+` can add one) or that is missing (`~` removes one)."""
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
    """Returns the keys of a part of a config; an empty list where any key is allowed."""
    return [field.name for field in dataclasses.fields(schema)] if dataclasses.is_dataclass(schema) else []


def not_left_out(full_key: str) -> str:
    return f"{full_key}: cannot be left out; give it a value, as in {full_key}=..."


def no_such_key(full_key: str, known: list[str]) -> str:
    """Returns a line about an unknown key, with the known one that is most like it."""
    parent, _, key = full_key.rpartition(".")
    near = difflib.get_close_matches(key, known, n=1)
    hint = f", did you mean {near[0]}?" if near else ""
    where = f"{parent} has" if parent else "there are"
    return f"{full_key}: no such key{hint}" + (f" ({where} {', '.join(known)})" if known else "")


def require(config: DictConfig) -> None:
    """Raises UserError for the first key that has no value."""
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise UserError(f"{missing[0]} has no value: give one on the command line, as in {missing[0]}=...")


def validate(config: DictConfig) -> None:
    """Raises UserError for the first key whose value is missing, out of range, or at odds with another."""
    require(config)
    for key, value in leaves(primitives(config)).items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not abs(number) <= LARGEST:  # nor of what is no number
                raise UserError(f"{key} = {value}: must be a finite number, at most {LARGEST:g}")
        is_option = key.startswith("network.options.") and not isinstance(value, str)  # such as class_token=false
        named_so = SECRET.search(key.rpartition(".")[2]) and not is_option
        if named_so and value is not None:  # it would lie in records and checkpoints
            raise UserError(
                f"{key}: a secret has no place in a config; W&B's key is for `wandb login` or WANDB_API_KEY"
            )
    check_ranges(config)
    schema = OmegaConf.get_type(config)
    if issubclass(schema, Config):
        _check_training(config)
    if issubclass(schema, SearchConfig) and config.gate.kind is GateKind.none:
        raise UserError("gate.kind = none: a dense network has nothing to search for")
    if issubclass(schema, ReportConfig) and config.runs is None and config.sweep is None:
        raise UserError("runs has no value: give a run's folder, as in runs=[runs/mnist/<run>], or sweep=quick")


def _check_training(config: DictConfig) -> None:
    if (config.network.library is None) is not (config.network.model is None):
        raise UserError("network.model: goes with network=timm or network=torchvision, as in network.model=resnet18")
    ours = (config.network, reference(config.network)) if config.network.library is None else ()
    for network in ours:
        weights = convolution_weights(network)
        if weights > MOST_WEIGHTS:
            given = "width" if network.widths is None else "widths"
            words = f"network.{given} = {network[given]} with {sum(blocks_per_stage(network))} blocks"
            most = f"must be at most {MOST_WEIGHTS // 10**6} million"
            raise UserError(f"{words}: {weights // 10**6} million weights; {most}")
    check_gate(config.gate)
    _check_first_blocks(config)
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
    """Raises UserError for the first key whose value is outside the range in its schema."""
    schema = OmegaConf.get_type(config)
    for key, (is_allowed, words) in ranges(schema).items() if dataclasses.is_dataclass(schema) else ():
        value = config[key]
        if not is_allowed(value):
            shown = value.name if isinstance(value, Enum) else value
            raise UserError(f"{path}{key} = {shown}: must be {words}")
    for key, node in config.items():
        if isinstance(node, DictConfig):
            check_ranges(node, f"{path}{key}.")


def with_values(schema: DictConfig, values: dict[str, Any], path: str = "") -> DictConfig:
    """Returns the schema with these values; raises UserError for the first of another type or outside its range."""
    try:
        config = OmegaConf.merge(schema, values)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}{error.full_key}: {str(error).splitlines()[0]}") from error
    check_ranges(config, path)
    return config


def check_gate(gate: DictConfig) -> None:
    """Raises UserError if a gate's values exclude each other."""
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


def _check_first_blocks(config: DictConfig) -> None:
    """Ends with one line where no block is left to have a gate."""
    gate, one_a_stage = config.gate, config.network.library is None and max(blocks_per_stage(config.network)) == 1
    if gate.kind is not GateKind.none and not gate.first_blocks and one_a_stage:
        raise UserError("gate.first_blocks = False: with one block a stage no block is left to have a gate")


def _check_weights(config: DictConfig) -> None:
    """Raises UserError if `weights` is empty, or a link that may point to another run tomorrow."""
    if config.weights is None:
        return
    path = Path(config.weights)
    if config.weights == "":
        raise UserError("weights: give a run's folder or a checkpoint, as in weights=runs/digits/...")
    if path.name == LATEST and path.is_symlink():  # the same command would ask for another run tomorrow
        raise UserError(f"weights = {path}: give the run's own folder, {path.parent / os.readlink(path)}")


def check_one_of_several(config: DictConfig) -> None:
    """Raises UserError for keys that a job of a sweep or a trial of a search cannot have."""
    if config.run_dir is not None:
        raise UserError(f"run_dir = {config.run_dir}: several runs have a folder each; runs_dir is where they lie")
    if config.trainer.fast_dev_run:
        raise UserError("trainer.fast_dev_run: tries one run, and keeps nothing that a sweep or a search could show")
