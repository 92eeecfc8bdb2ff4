"""Reads configs of earlier versions: keys that left are dropped where they did not matter to the run."""

import copy
from typing import Any

from cosinegate.terminal.errors import UserError

# Keys that left, with the value at which a run computed what it would without them; ...: it did so with any value.
GONE: dict[str, Any] = {
    "gate.signal": "exact",
    "gate.measure": "cir",
    "gate.calibration": "none",
    "gate.exits": False,
    "gate.exit_classifier": ...,
    "gate.predictor": ...,
    "gate.quantile": ...,
    "gate.pattern": ...,
    "objective.targets": None,
    "objective.bounds": 0.0,
    "objective.reinforce.weight": 0.0,
    "objective.reinforce": ...,
    "objective.lambda_predict": ...,
    "objective.lambda_full": 0.0,
    "objective.lambda_exit": ...,
    "objective.start_epoch": 0.0,
    "trunk": None,
    "network.torchvision": None,
    "trainer.num_sanity_val_steps": ...,
    "trainer.log_every_n_steps": ...,
    "trainer.sync_batchnorm": True,
}
RENAMED = {"optimizer.gate_lr": "optimizer.gate_lr_factor"}
GATES_GONE = ("skipnet_recurrent", "attention", "fixed", "drop")
# Once every kind of gate carried the keys of all: those that each one has.
OPENING = {"kind", "first_blocks", "threshold", "relaxation"}
GATE_KEYS = {
    "none": {"kind"},
    "cosine": OPENING | {"polarity", "gamma", "controller"},
    "controller": OPENING | {"polarity", "gamma", "controller"},
    "skipnet": OPENING | {"start"},
    "aig": OPENING | {"start", "hidden"},
    "constant": OPENING | {"start"},
    "random": {"kind", "first_blocks", "rate"},
}


def upgraded(stored: dict[str, Any]) -> dict[str, Any]:
    """Returns a stored config as this version writes it. Raises UserError if the run used a feature that left."""
    config = copy.deepcopy(stored)
    gate = config.get("gate")
    if not isinstance(gate, dict):
        return config
    kind = gate.get("kind")
    if kind in GATES_GONE:
        raise UserError(_left(f"gate.kind = {kind}"))
    for key, neutral in GONE.items():
        if (value := _pop(config, key)) is not ... and neutral is not ... and value != neutral and kind != "none":
            raise UserError(_left(f"{key} = {value}"))
    for old, new in RENAMED.items():
        if (value := _pop(config, old)) is not ...:
            parent, _, name = new.rpartition(".")
            config[parent][name] = value
    config["gate"] = {key: value for key, value in gate.items() if key in GATE_KEYS.get(kind, gate.keys())}
    if kind == "constant" and gate.get("start", ...) is None:
        config["gate"]["start"] = 0.5  # null once meant half open
    return config


def _left(what: str) -> str:
    return f"it was trained with {what}, which this version no longer has; use the program of its record's git_commit"


def _pop(config: dict[str, Any], key: str) -> Any:
    """Removes a dotted key and returns its value, or ... if it is missing."""
    *parents, last = key.split(".")
    for parent in parents:
        config = config.get(parent)
        if not isinstance(config, dict):
            return ...
    return config.pop(last, ...)
