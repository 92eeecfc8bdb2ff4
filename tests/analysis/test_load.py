"""Much of everything: ten thousand records, and a run of many epochs. `make test-slow`."""

import json
import os
import time
from pathlib import Path

import pytest
from conftest import ROOT, config, process
from omegaconf import OmegaConf
from resident import Taken

from cosinegate.train import train

pytestmark = pytest.mark.slow

RECORD = json.loads((ROOT / "results" / "peers" / "balanced" / "record.json").read_text())


def write_runs(root: Path, configurations: int, seeds: int) -> None:
    """Runs that differ in two values and their seed, each with its own record and config."""
    settings = config("+experiment=balanced", f"run_dir={root}")
    text = OmegaConf.to_yaml(settings, resolve=True)
    old = f"tau_target: {settings.objective.tau_target}", f"lambda_cons: {settings.objective.lambda_cons}", "seed: 0\n"
    assert all(part in text for part in old)
    for number in range(configurations):
        tau, cons = 0.3 + 0.6 * number / configurations, 0.001 * (1 + number % 97)
        share = (number * 7919 % configurations) / configurations
        for seed in range(seeds):
            folder = root / f"{number:05d}-s{seed}"
            folder.mkdir(parents=True)
            record = RECORD | {"identity": f"{number:010x}", "seed": seed, "mean_gate": share}
            record |= {"accuracy": RECORD["accuracy"] | {"test": 0.5 + 0.4 * share**0.5 * (0.9 + 0.02 * seed)}}
            record |= {"flops": RECORD["flops"] | {"counted": share}}
            (folder / "record.json").write_text(json.dumps(record))
            new = f"tau_target: {tau}", f"lambda_cons: {cons}", f"seed: {seed}\n"
            changed = text
            for before, after in zip(old, new, strict=True):
                changed = changed.replace(before, after)
            (folder / "config.yaml").write_text(changed)


def test_ten_thousand_records_are_read_and_plotted_in_ten_seconds(tmp_path):
    write_runs(tmp_path / "runs", configurations=2500, seeds=4)
    begin = time.monotonic(), os.times()
    done = process("src/pareto.py", f"runs={tmp_path}/runs", f"output={tmp_path}/pareto", afresh=True)
    seconds, now = time.monotonic() - begin[0], os.times()
    used = now.children_user + now.children_system - begin[1].children_user - begin[1].children_system
    assert done.returncode == 0, done.stderr
    assert "2500 configurations, 10000 runs" in next((tmp_path / "pareto").glob("*.svg")).read_text()
    (table,) = (tmp_path / "pareto").glob("*.csv")
    assert len(table.read_text().splitlines()) == 10_001
    print(f"{seconds:.1f} s, {used:.1f} s of one core")
    assert used < 10


def test_a_run_holds_flat_memory_over_its_epochs(tmp_path, monkeypatch):
    """Validation's feature maps are of the size that leaves holes between blocks in use."""
    taken = Taken()
    monkeypatch.setattr("cosinegate.callbacks.kept.EpochLine", lambda job: taken)
    cut = ["trainer.max_epochs=20", "trainer.limit_train_batches=6", "network.width=48", "data.eval_batch_size=350"]
    train(config("+experiment=digits", "network.depth=20", "threads=1", *cut, f"runs_dir={tmp_path}"))
    print({epoch: round(size) for epoch, size in taken.after.items()})
    assert taken.after[20] - taken.after[5] < 8
