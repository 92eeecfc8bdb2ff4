"""A dense run's network is given gates, which learn and leave it as it is."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import assert_one_line, config, process

from cosinegate.analysis.runs import Run
from cosinegate.build import build_module
from cosinegate.config import identity
from cosinegate.errors import UserError
from cosinegate.lit import LitCosineGate
from cosinegate.record import write_record
from cosinegate.run import train
from cosinegate.saved import load_checkpoint

ALIKE = ["data=digits", "network.blocks=[1,1,4]", "network.width=4", "data.validation=holdout", "data.holdout=200"]
SHORT = [*ALIKE, "threads=1", "callbacks.curves=null"]
NOTHING_LEARNS = ["gate=cir_only", "gate.gamma.learnable=false", "gate.exit_classifier=shared"]
EXITS = ["+experiment=exits", *SHORT, "objective.tau_target=0.75", "gate.quantile.fit=1024"]


def trained(folder: Path, *overrides: str):
    chosen = config(*overrides, f"runs_dir={folder}")
    return train(chosen), Path(chosen.run_dir)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> tuple[dict, Path]:
    return trained(tmp_path_factory.mktemp("dense"), "+experiment=resnet20", *SHORT, "trainer.max_epochs=3")


def weights(folder: Path, which: str = "best") -> dict[str, torch.Tensor]:
    return load_checkpoint(folder / "checkpoints" / f"{which}.ckpt")[0].network.state_dict()


def test_the_trunk_stays_as_it_is_and_its_exits_are_as_good(dense, tmp_path):
    before, of_dense = dense
    record, folder = trained(tmp_path, *EXITS, f"trunk={of_dense}")
    trunk, now = weights(of_dense), weights(folder)
    assert all(torch.equal(now[name], value) for name, value in trunk.items())  # moments of BatchNorm as well
    assert record.trunk.as_dict() | {"run": None, "sha256": None} == {
        "run": None,
        "sha256": None,
        "checkpoint": "best",
        "identity": before.identity,
        "seed": 0,
        "epochs": 3,
    }
    assert record.flops.executed < 0.9  # of a network so small the looks are a tenth
    assert record.dynamic_blocks == 3
    assert record.accuracy.test > before.accuracy.test - 0.03
    born = build_module(config(*EXITS, f"trunk={of_dense}")).network.state_dict()
    learned = [name for name, value in now.items() if not torch.equal(value, born[name]) and name not in trunk]
    for part in ("predictor", "standardise", "controller", "own", "threshold"):
        assert any(part in name for name in learned)
    assert Run(folder, record, {}).family[2] == 3  # it stands beside its trunk in a figure
    file = of_dense / "checkpoints" / "best.ckpt"
    by_file, _ = trained(tmp_path, *EXITS, f"trunk={file}")
    assert by_file.trunk == record.trunk.replace(run=str(file))
    assert by_file.accuracy == record.accuracy


def test_runs_of_several_seeds_from_trunks_of_theirs_are_one_configuration():
    given = (0, "runs/trunk/ab-s0"), (1, "runs/trunk/ab-s1/"), (1, "runs/trunk/ab-s0"), (0, "runs/trunk/cd-s0")
    found = [identity(config(*EXITS, f"trunk={trunk}", f"seed={seed}")) for seed, trunk in given]
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_a_trunk_that_is_trained_with_its_exits_is_the_dense_networks(dense, tmp_path):
    """Bit for bit: exits with classifiers of their own cost the network nothing."""
    gates = ["gate=exit", "objective=predictive", "gate.exit_classifier=own", "objective.lambda_exit=0"]
    gates += ["objective.start_epoch=2", "optimizer.decay_gates=false", "objective.tau_target=0.75"]
    _, folder = trained(tmp_path, "+experiment=resnet20", *SHORT, *gates, "name=both", "trainer.max_epochs=3")
    trunk, both = weights(dense[1], "last"), weights(folder, "last")
    assert all(torch.equal(both[name], value) for name, value in trunk.items())


def test_a_run_that_was_stopped_goes_on_with_the_trunk_held(dense, tmp_path, monkeypatch):
    two = [*EXITS, f"trunk={dense[1]}", "trainer.max_epochs=2"]
    before, whole = trained(tmp_path / "whole", *two)
    step = LitCosineGate.training_step

    def failing(self, batch, batch_idx):
        if self.current_epoch == 1 and batch_idx == 1:
            raise RuntimeError("the machine goes off")
        return step(self, batch, batch_idx)

    monkeypatch.setattr(LitCosineGate, "training_step", failing)
    with pytest.raises(RuntimeError, match="goes off"):
        trained(tmp_path / "stopped", *two)
    monkeypatch.setattr(LitCosineGate, "training_step", step)
    away = dense[1].rename(tmp_path / "away")  # its own checkpoint has all that it needs
    record, resumed = trained(tmp_path / "stopped", *two)
    away.rename(dense[1])
    assert record.trunk == before.trunk
    expected = weights(whole, "last")
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed, "last").items())


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        ([], ["trunk", "give the folder of a dense run"]),
        (["trunk=nowhere"], ["trunk = nowhere", "no such folder"]),
        (["trunk=DENSE", "network.blocks=[1,1,3]"], ["network.blocks = [1, 1, 4]", "[1, 1, 3]", "must be the same"]),
        (["trunk=DENSE", "data.holdout=100"], ["data.holdout = 200", "must be the same"]),
        (["trunk=DENSE", "gate=none"], ["only gates learn", "gate.kind=none"]),
        (["trunk=DENSE", "objective.lambda_exit=0.1"], ["objective.lambda_exit=0"]),
        (
            ["trunk=DENSE", "gate=cir_only", "gate.gamma.learnable=false", "gate.exit_classifier=shared"],
            ["nothing that"],
        ),
    ],
    ids=["none", "nowhere", "another network", "other images", "no gates", "a loss for what is held", "no parameters"],
)
def test_a_trunk_that_cannot_be_is_one_line(overrides, fragments, dense, tmp_path):
    given = [part.replace("DENSE", str(dense[1])) for part in overrides]
    done = process("src/train.py", *EXITS, *given, f"runs_dir={tmp_path}")
    assert_one_line(done, *fragments)
    assert not list(tmp_path.iterdir())


def test_a_trunk_with_gates_or_half_trained_is_refused(dense, tmp_path):
    _, gated = trained(tmp_path, *EXITS, f"trunk={dense[1]}")
    with pytest.raises(UserError, match=f"trunk = {gated}: has gates of its own"):
        trained(tmp_path, *EXITS, f"trunk={gated}")
    half = tmp_path / "half"
    shutil.copytree(dense[1], half)
    write_record(half, dense[0].replace(status="stopped"))
    with pytest.raises(UserError, match=r"half: is not trained to its end \(stopped\)"):
        trained(tmp_path, *EXITS, f"trunk={half}")
    stored = torch.load(half / "checkpoints" / "last.ckpt", weights_only=True)
    torch.save(stored | {"epoch": 1}, half / "checkpoints" / "early.ckpt")
    record, _ = trained(tmp_path, *EXITS, f"trunk={half / 'checkpoints' / 'early.ckpt'}")
    assert record.trunk.epochs == 2  # that it was trained for, not that were planned
