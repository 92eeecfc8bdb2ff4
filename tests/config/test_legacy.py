"""Configs of earlier versions, as their checkpoints hold them: read as they were meant, or refused in one line."""

import copy
from pathlib import Path

import pytest
import torch
import yaml
from conftest import config
from omegaconf import OmegaConf

from cosinegate.config.identity import identity, leaves, primitives
from cosinegate.config.legacy import upgraded
from cosinegate.terminal.errors import UserError
from cosinegate.training.build import build_module
from cosinegate.training.load import checked_config, load_checkpoint

# what commit 38c0605 wrote for `+experiment=digits`
OLD = yaml.safe_load("""
name: digits
seed: 0
threads: null
runs_dir: runs
run_dir: null
sweep: null
save_minutes: 10.0
trunk: null
data: {name: digits, root: data, folder: null, validation: test, holdout: 300, batch_size: 64, eval_batch_size: 256,
  drop_last: false, crop_padding: 0, flip: false, mean: [0.3], std: [0.37]}
network: {depth: 8, blocks: null, width: 8, widths: null, shortcut: pad, post_activation: true, torchvision: null}
gate:
  kind: cosine
  signal: exact
  measure: cir
  first_blocks: true
  exits: false
  exit_classifier: shared
  calibration: none
  predictor: {look: block, hidden: 16, switch_epoch: 0.0}
  quantile: {sharing: block, low: 0.15, high: 0.95, worth: null, begin: null, temperature: 0.5, credit: slope, fit: 0}
  polarity: paper
  threshold: 0.45
  gamma: {init: -2.5, learnable: true}
  controller: {enabled: true, reduction: 8}
  relaxation: {hard: false, temperature: 1.0, temperature_end: 0.1, annealing: none, noise_until: 1.0}
  start: null
  hidden: 16
  rate: 0.7
  pattern: null
objective: {lambda_flops: 3.0, lambda_cons: 0.01, tau_target: 0.7, weighting: mean, sided: one, target: network,
  targets: null, bounds: 0.0, reinforce: {weight: 0.0, alpha: 0.1, start_epoch: 0.0}, lambda_predict: 1.0,
  lambda_full: 0.0, lambda_exit: 1.0, start_epoch: 0.0, warmup_epochs: 1.0, per_step: false,
  consistency: {detach_target: false}}
optimizer: {lr: 0.1, momentum: 0.9, weight_decay: 0.0005, nesterov: false, gate_lr: 1.0, decay_gates: true}
trainer: {accelerator: cpu, devices: 1, strategy: auto, num_nodes: 1, precision: 32-true, max_epochs: 4,
  limit_train_batches: null, limit_val_batches: null, limit_test_batches: null, check_val_every_n_epoch: 1,
  num_sanity_val_steps: 0, log_every_n_steps: 1, gradient_clip_val: null, accumulate_grad_batches: 1,
  sync_batchnorm: true, deterministic: true, detect_anomaly: false, enable_progress_bar: true,
  enable_model_summary: false}
callbacks:
  progress: {_target_: lightning.pytorch.callbacks.RichProgressBar, leave: false}
  curves: {_target_: cosinegate.callbacks.figures.Curves, run_dir: null}
logger: {}
""")
HARD = {"hard": True, "temperature": 1.0, "temperature_end": 0.1, "annealing": "none", "noise_until": 1.0}
# what the files of conf/gate changed of the keys that all kinds had then
GATES = {
    "cosine": {},
    "cosine_novelty": {"polarity": "novelty"},
    "cir_only": {"controller": {"enabled": False, "reduction": 8}},
    "controller_only": {"kind": "controller"},
    "skipnet": {"kind": "skipnet", "threshold": 0.5, "relaxation": HARD | {"noise_until": 0.0}},
    "aig": {"kind": "aig", "threshold": 0.5, "relaxation": HARD, "start": 0.85, "hidden": 16},
    "constant": {"kind": "constant", "threshold": 0.5, "relaxation": HARD, "start": 0.85},
    "random": {"kind": "random", "rate": 0.7},
    "none": {"kind": "none"},
}


def stored(**gate) -> dict:
    old = copy.deepcopy(OLD)
    old["gate"] |= gate
    return old


def changed(key: str, value) -> dict:
    old = OmegaConf.create(OLD)
    OmegaConf.update(old, key, value)
    return OmegaConf.to_container(old)


def read(old: dict):
    return checked_config(old, Path("x.ckpt"), size=10**9)


@pytest.mark.parametrize("gate", sorted(GATES))
def test_a_config_of_an_earlier_version_is_this_versions(gate):
    old = stored(**GATES[gate])
    before = copy.deepcopy(old)
    found = read(old)
    assert old == before
    now = config("+experiment=digits", f"gate={gate}")
    now.callbacks = found.callbacks  # a file's are nothing to call
    assert leaves(primitives(found)) == leaves(primitives(now))
    assert identity(found) == identity(now)


@pytest.mark.parametrize("gate", sorted(GATES))
def test_a_checkpoint_of_an_earlier_version_has_the_network_that_was_trained(gate, tmp_path):
    module = build_module(config("+experiment=digits", f"gate={gate}", "seed=3"))
    state = {"hyper_parameters": stored(**GATES[gate]), "state_dict": module.state_dict()}
    torch.save(state, tmp_path / "old.ckpt")
    again, _ = load_checkpoint(tmp_path / "old.ckpt")
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(again.eval()(x).logits, module.eval()(x).logits)


def test_what_was_renamed_keeps_its_value_and_what_had_no_part_is_forgotten():
    assert read(changed("optimizer.gate_lr", 3.0)).optimizer.gate_lr_factor == 3.0
    for key, value in {
        "gate.quantile.fit": 200,
        "gate.predictor.look": "stage",
        "gate.exit_classifier": "own",
        "objective.lambda_exit": 0.1,
        "objective.lambda_predict": 5.0,
        "objective.reinforce.alpha": 0.4,
    }.items():
        assert read(changed(key, value)) == read(OLD), key
    dense = changed("gate.kind", "none")
    dense["gate"]["signal"], dense["objective"]["lambda_full"] = "predicted", 1.0  # of a network without gates
    assert leaves(primitives(read(dense).gate)) == {"kind": "none"}


def test_a_constant_gate_without_a_start_began_half_open():
    assert read(stored(**GATES["constant"] | {"start": None})).gate.start == 0.5


LEFT = {
    "gate.signal": "predicted",
    "gate.measure": "turn",
    "gate.calibration": "quantile",
    "gate.exits": True,
    "gate.kind": ["fixed", "drop", "attention", "skipnet_recurrent"],
    "objective.lambda_full": 1.0,
    "objective.targets": [[0.5, 0.6, 0.7]],
    "objective.bounds": 0.33,
    "objective.reinforce.weight": 0.1,
    "objective.start_epoch": 2.0,
    "trainer.sync_batchnorm": False,
    "trunk": "runs/trunk/ab-s0",
}
CASES = [(key, value) for key, values in LEFT.items() for value in (values if isinstance(values, list) else [values])]


@pytest.mark.parametrize(("key", "value"), CASES, ids=lambda part: str(part))
def test_a_run_that_used_what_has_left_is_refused_in_one_line_with_key_and_value(key, value, tmp_path):
    torch.save({"hyper_parameters": changed(key, value), "state_dict": {}}, tmp_path / "old.ckpt")
    with pytest.raises(UserError) as caught:
        load_checkpoint(tmp_path / "old.ckpt")
    line = str(caught.value)
    assert line.startswith(f"{tmp_path / 'old.ckpt'}: it was trained with {key} = {value}, ")
    assert "git_commit" in line
    assert "\n" not in line


def test_what_is_no_config_is_left_to_its_reader():
    assert upgraded({}) == {}
    assert upgraded({"gate": None}) == {"gate": None}
