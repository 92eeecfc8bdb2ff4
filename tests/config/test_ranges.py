"""Every value that the ranges allow, at the edges, trains a short run or is answered with one line."""

import dataclasses
import json
import math
import random
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import config
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cosinegate import cli
from cosinegate.config.checks import validate
from cosinegate.config.identity import leaves, primitives
from cosinegate.config.schema import GATES, Config, GateConfig
from cosinegate.terminal.errors import UserError
from cosinegate.train import train
from cosinegate.training.build import build_module

BASES = [  # together they have every key
    "+experiment=digits",
    "+experiment=digits gate=aig objective=per_block",
    "+experiment=digits gate=random objective=plain",
    "+experiment=digits gate=constant objective=two_sided",
]
SHORT = ["network.depth=14", "network.width=4", "data.batch_size=64", "data.eval_batch_size=180", "callbacks={}"]
SHORT += ["trainer.max_epochs=2", "threads=1", "trainer.enable_progress_bar=false"]
SHORT += [f"trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test")]
LARGEST = 1e30
WEIGHT = [0.0, 1e-30, LARGEST]  # of a term, from 0 on
EPOCH = [0.0, 0.5, 1.0, LARGEST]
SHARE = [0.0, 0.5, 1.0]
INSIDE = [1e-9, 0.5, 1 - 1e-9]
BATCHES = [None, 1, 10**9, 1.0, 0.5, 1e-9]
EDGES: dict[str, list[Any]] = {  # of what is neither a choice nor true or false
    "name": ["a", "a b", "é" * 70],
    "seed": [0, 2**32 - 1],
    "threads": [None, 1],
    "sweep": [None, "mine"],
    "save_minutes": [0.0, 1e6],
    "weights": [None],
    "data.folder": [None],
    "data.holdout": [1, 1437, 10**9],
    "data.batch_size": [1, 2, 10**9],
    "data.eval_batch_size": [1, 10**9],
    "data.crop_padding": [0, 32],
    "data.mean": [[0.0], [-1e6], [1e6]],
    "data.std": [[1e-6], [1.0], [LARGEST]],
    "data.size": [None, 8, 1024],
    "data.channels": [None, 1, 3],
    "data.test_fraction": [None, 0.5],
    "data.content": [None],
    "network.depth": [8],
    "network.blocks": [None, [1, 1, 1], [1, 1, 2]],
    "network.width": [1],
    "network.widths": [None, [1, 1, 1], [1, 2, 40]],
    "network.library": [None],
    "network.model": [None],
    "network.options": [None, {}],
    "gate.threshold": INSIDE,
    "gate.gamma.init": [-LARGEST, -1e-30, 1e-30, LARGEST],
    "gate.controller.reduction": [1, 10**9],
    "gate.relaxation.temperature": [1e-30, 1.0, LARGEST],
    "gate.relaxation.temperature_end": [1e-30, 1.0, LARGEST],
    "gate.relaxation.noise_until": SHARE,
    "gate.start": [None, *INSIDE],
    "gate.hidden": [1, 1024],
    "gate.rate": [1e-9, 1.0],
    "objective.lambda_flops": WEIGHT,
    "objective.lambda_cons": WEIGHT,
    "objective.tau_target": [1e-9, 0.5, 1.0],
    "objective.warmup_epochs": EPOCH,
    "optimizer.lr": [1e-30, LARGEST],
    "optimizer.momentum": [0.0, 1 - 1e-9],
    "optimizer.weight_decay": WEIGHT,
    "optimizer.gate_lr_factor": WEIGHT,
    "trainer.accelerator": ["cpu", "auto"],
    "trainer.devices": [1, "auto"],
    "trainer.strategy": ["auto"],
    "trainer.num_nodes": [1],
    "trainer.precision": ["32-true", "64-true"],
    "trainer.max_epochs": [1, 3],
    "trainer.max_steps": [-1, 1, 3, 10**9],
    "trainer.max_time": [None, "00:00:00:01", "99999:23:59:59"],
    "trainer.limit_train_batches": [1, 0.02, 1e-9],
    "trainer.limit_val_batches": BATCHES,
    "trainer.limit_test_batches": BATCHES,
    "trainer.overfit_batches": [0, 1, 0.5, 1e-9],
    "trainer.fast_dev_run": [False, True, 2],
    "trainer.check_val_every_n_epoch": [1, 2, 10**9],
    "trainer.gradient_clip_val": [None, 0.0, 1e-30, LARGEST],
    "trainer.accumulate_grad_batches": [1, 2, 10**9],
    "trainer.profiler": [None, "simple"],
}
LONG = {  # what takes seconds each
    "network.depth": [56],
    "trainer.num_nodes": [2],
    "trainer.precision": ["bf16-mixed", "16-mixed", "bf16-true", "16-true"],
    "trainer.profiler": ["advanced", "pytorch"],
    "threads": [1024],
}
ELSEWHERE = ("runs_dir", "run_dir", "data.root", "data.name")  # where a run lies, and other data


def schema_leaves(schema: type, path: str = "") -> dict[str, Any]:
    """The type of every key, of every kind of gate too."""
    found = {}
    for name, kind in typing.get_type_hints(schema).items():
        for part in set(GATES.values()) if kind is GateConfig else [kind]:
            nested = schema_leaves(part, f"{path}{name}.") if dataclasses.is_dataclass(part) else {path + name: part}
            found |= nested
    return {key: kind for key, kind in found.items() if not key.startswith(("callbacks", "logger"))}


def pairs(edges: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(key, value) for key, values in edges.items() for value in values]


CHOICES = {
    key: [False, True] if kind is bool else [member.name for member in kind]
    for key, kind in schema_leaves(Config).items()
    if key not in ELSEWHERE and (kind is bool or (isinstance(kind, type) and issubclass(kind, Enum)))
}


def test_every_key_has_its_edges():
    assert set(schema_leaves(Config)) == {*EDGES, *CHOICES, *ELSEWHERE}


def test_every_key_is_one_of_a_config_that_is_tried(bases):
    had = {key for base in bases for key in leaves(primitives(base)) if not key.startswith(("callbacks", "logger"))}
    assert had == set(schema_leaves(Config))


def is_out_of_range(wanted: DictConfig, key: str, value: Any) -> bool:
    """Sets the value, and tells whether that ends with a line: of its range, or of a gate that has no such key."""
    try:
        OmegaConf.update(wanted, key, value)
        validate(wanted)
        build_module(wanted)
    except (UserError, OmegaConfBaseException) as error:
        return one_line(cli.one_line(error))
    return False


def tried(base: DictConfig, chosen: list[tuple[str, Any]], folder: Path) -> list[tuple[str, Any]]:
    """Trains with all of these values that go together, and gives those back that the others left no room for.

    What a run is refused with is looked for by halves: each value ends in a run that finishes or, alone, in one line.
    """
    wanted, taken, left = base.copy(), [], []
    for key, value in chosen:
        more = wanted.copy()
        if not is_out_of_range(more, key, value):
            wanted, taken = more, [*taken, (key, value)]
        else:
            left.append((key, value))
    wanted.runs_dir = str(folder / str(len(list(folder.iterdir()))))
    Path(wanted.runs_dir).mkdir()
    if taken and is_refused(wanted) and len(taken) > 1:
        half = len(taken) // 2
        left += tried(base, taken[:half], folder) + tried(base, taken[half:], folder)
    return left


def is_refused(wanted: DictConfig) -> bool:
    """Whether training ends with a line. Where it does not, its record is whole."""
    try:
        record = train(wanted).as_dict()
    except UserError as error:
        return one_line(str(error))
    finally:
        torch.set_num_threads(1)
    figures = leaves({key: record[key] for key in ("accuracy", "flops", "epochs", "mean_gate", "seconds")})
    assert all(math.isfinite(value) for value in figures.values() if isinstance(value, int | float)), figures
    assert record["status"] == "finished"
    json.dumps(record, allow_nan=False)
    return False


def one_line(words: str) -> bool:
    assert words
    assert "\n" not in words
    return True


def is_mild(value: Any) -> bool:
    """Whether it is no number at the end of what float32 holds: with those most losses are not finite."""
    if isinstance(value, list):
        return all(map(is_mild, value))
    return not isinstance(value, float) or value == 0 or 1e-8 <= abs(value) <= LARGEST / 10


EVALUATES = {"trainer.limit_val_batches", "trainer.limit_test_batches", "trainer.num_sanity_val_steps"}


def fit(values: dict[str, Any]) -> bool:
    """Whether they may be tried in one run: all images one by one take long."""
    return values.get("data.eval_batch_size") != 1 or not EVALUATES & set(values)


def groups(chosen: list[tuple[str, Any]], size: int) -> list[list[tuple[str, Any]]]:
    """Lots of so many, in which no key is twice."""
    random.Random(0).shuffle(chosen)
    made: list[list[tuple[str, Any]]] = []
    for key, value in chosen:
        free = (lot for lot in made if len(lot) < size and key not in dict(lot) and fit(dict([*lot, (key, value)])))
        lot = next(free, None)
        if lot is None:
            made.append(lot := [])
        lot.append((key, value))
    return made


@pytest.fixture(scope="module")
def bases() -> list[DictConfig]:
    return [config(*base.split(), *SHORT) for base in BASES]


MILD = [pair for pair in pairs(EDGES | CHOICES) if is_mild(pair[1])]


@pytest.mark.parametrize("lot", groups(MILD, 20), ids=lambda lot: lot[0][0])
def test_values_at_their_edges_train_or_are_refused_with_one_line(bases, lot, tmp_path, capfd):
    left = lot
    for base in bases:
        left = tried(base, left, tmp_path) if left else []


@pytest.mark.slow
@pytest.mark.parametrize("base", range(len(BASES)))
@pytest.mark.parametrize("pair", pairs(EDGES | CHOICES) + pairs(LONG), ids=str)
def test_each_value_at_its_edge_trains_or_is_refused_with_one_line(bases, base, pair, tmp_path):
    tried(bases[base], [pair], tmp_path)
