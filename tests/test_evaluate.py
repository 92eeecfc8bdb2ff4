import copy
import json
from pathlib import Path

import pytest
import torch
from conftest import config, process

from cosinegate.evaluate import evaluate
from cosinegate.terminal.errors import UserError
from cosinegate.train import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    chosen = config("+experiment=digits", "threads=1", f"runs_dir={tmp_path_factory.mktemp('runs')}")
    return train(chosen), Path(chosen.run_dir)


def test_evaluation_repeats_what_the_record_says(run):
    record, folder = run
    done = process("src/evaluate.py", f"run={folder}", "json=true")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["accuracy"] == record.accuracy.test
    for key in ("mean_gate", "skip_percent", "routed_percent", "dynamic_blocks", "paths"):
        assert found[key] == getattr(record, key)
    assert found["flops"].items() <= record.flops.as_dict().items()  # which knows what compiling would leave, too
    assert [block["open"] for block in found["blocks"]] == record.blocks_open
    assert sum(entry["images"] for entry in found["classes"]) == found["images"] == 359
    right = sum(entry["images"] * entry["accuracy"] for entry in found["classes"])
    assert right / 359 == pytest.approx(found["accuracy"], abs=1e-6)
    for block in range(3):
        opened = sum(entry["images"] * entry["open"][block] for entry in found["classes"]) / 359
        assert opened == pytest.approx(found["blocks"][block]["open"], abs=1e-6)


def test_a_person_gets_tables_of_classes_and_blocks(run):
    _, folder = run
    done = process("src/evaluate.py", f"run={folder / 'checkpoints' / 'best.ckpt'}", NO_COLOR="1")
    assert done.returncode == 0, done.stderr
    for words in ("accuracy", "mean gate", "executed", "fraction of the images", "CIR"):
        assert words in done.stdout
    assert "\x1b[" not in done.stdout


def ask(*overrides: str):
    """What the command would do, in this process: a process of its own takes seconds to start."""
    return evaluate(config(*overrides, config_name="evaluate"))


def test_a_checkpoint_of_an_earlier_version_means_what_it_meant(run, tmp_path):
    _, folder = run
    stored = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    parameters = stored["hyper_parameters"]
    parameters["gate"] |= {"signal": "exact", "measure": "cir", "calibration": "none", "predictor": {"hidden": 16}}
    parameters["gate"] |= {"exits": False, "quantile": {"fit": 0}, "start": 0.5, "hidden": 4, "rate": 0.5}
    parameters["objective"] |= {
        "lambda_predict": 1.0,
        "lambda_full": 0.0,
        "start_epoch": 0.0,
        "reinforce": {"weight": 0},
    }
    parameters["optimizer"]["gate_lr"] = parameters["optimizer"].pop("gate_lr_factor")
    parameters["trunk"] = None
    torch.save(stored, tmp_path / "older.ckpt")
    result, *_ = ask(f"run={tmp_path / 'older.ckpt'}")
    expected, *_ = ask(f"run={folder / 'checkpoints' / 'last.ckpt'}")
    del result["checkpoint"], expected["checkpoint"]
    assert result == expected
    for part, key, value in [
        ("gate", "signal", "predicted"),
        ("gate", "kind", "fixed"),
        ("objective", "lambda_full", 0.5),
    ]:
        left = copy.deepcopy(stored)
        left["hyper_parameters"][part][key] = value
        torch.save(left, tmp_path / "left.ckpt")
        with pytest.raises(UserError, match=f"trained with {part}.{key} = {value}, which this version no longer has"):
            ask(f"run={tmp_path / 'left.ckpt'}")
