"""Peers and controls under one protocol: the sweep's rows, and the table of them."""

import json
import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT, config
from test_sweeps import plan

from cosinegate import cli
from cosinegate.analysis import peers
from cosinegate.analysis.runs import Configuration, Run
from cosinegate.config import identity, run_folder
from cosinegate.errors import UserError

ROWS = {"resnet20", "static", "fixed", "aggressive", "balanced", "conservative", "balanced_novelty", "cir_only"}
ROWS |= {"controller_only", "aig", "skipnet", "skipnet_recurrent", "attention", "random", "constant", "drop"}


@pytest.mark.parametrize(
    ("sweep", "data", "epochs", "predictive"),
    [("peers", "cifar10", 12, "predictive_balanced"), ("peers_mnist", "mnist", 10, "mnist_predictive")],
)
def test_every_row_has_one_schedule_and_is_a_command_of_its_own(sweep, data, epochs, predictive):
    jobs = plan(f"+sweeps={sweep}")
    assert not any(job.error for job in jobs)
    assert {job.config.name for job in jobs} == ROWS | {predictive}
    assert len({identity(job.config) for job in jobs}) == len(jobs) == len(ROWS) + 1
    protocol = {
        (c.data.name.name, c.data.validation.name, c.trainer.max_epochs, c.optimizer.lr, c.data.batch_size, c.sweep)
        for c in (job.config for job in jobs)
    }
    assert protocol == {(data, "holdout", epochs, 0.1, 128, sweep)}
    machines = ["threads=1", "trainer.enable_progress_bar=false", "runs_dir=/tmp/elsewhere"]
    for job in jobs[::4]:
        point = [word for word in job.overrides if not word.startswith("+sweeps=")]
        by_sweep, alone = [*job.overrides, *machines], [*point, f"sweep={sweep}", *machines]
        told = {command_for(words) for words in (by_sweep, alone)}
        assert told == {shlex.join(["python", "src/train.py", *point, "seed=0"])}
        again = config(*shlex.split(told.pop())[2:])
        assert run_folder(again) == run_folder(job.config) == run_folder(config(*alone[:-1]))


def command_for(overrides: list[str], **changes) -> str:
    """What the table says of a run that was told these words."""
    record = {"seed": 0, "overrides": overrides} | changes
    return peers.command_of(Configuration([Run(Path("x"), record, {})]))


def test_the_schedule_of_all_rows_is_the_command_lines():
    jobs = plan("+sweeps=peers", "trainer.max_epochs=2", "data=digits")
    assert {(job.config.trainer.max_epochs, job.config.data.name.name) for job in jobs} == {(2, "digits")}
    assert len(jobs) == len(ROWS) + 1


def write(root: Path, name: str, gate: str, accuracy: float, seed: int = 0, latency: float | None = None, **changes):
    """The record of a run, as far as a table looks at it."""
    network = changes.pop("network", "resnet20-w16")
    executed, dense = changes.pop("executed", 1.0), changes.pop("dense_per_image", 80_000_000)
    record = {
        "format": 1,
        "status": "finished",
        "experiment": name,
        "identity": name,
        "seed": seed,
        "data": "cifar10",
        "gate": gate,
        "signal": "exact",
        "polarity": "paper",
        "selected_on": "holdout",
        "network": network,
        "epochs": {"planned": 12, "done": 12},
        "accuracy": {"test": accuracy},
        "mean_gate": 0.7,
        "flops": {"counted": 0.7, "executed": executed, "dense_per_image": dense},
        "dynamic_blocks": 3,
        "paths": 17,
        "blocks_open": [0.7] * 9,
        "parameters": 270_000,
        "latency_ms": latency,
        "command": "src/train.py -m +sweeps=peers",
        "overrides": ["+sweeps=peers", f"gate={gate}", "objective=plain", f"name={name}", f"seed={seed}", "threads=1"],
    } | changes
    folder = root / name / f"{name}-s{seed}"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps(record))


@pytest.fixture
def runs(tmp_path) -> Path:
    root = tmp_path / "runs"
    write(root, "resnet20", "none", 0.90, latency=2.0)
    write(root, "static", "none", 0.89, network="resnet2-2-3-w16", dense_per_image=60_000_000)
    for seed, accuracy in enumerate((0.88, 0.90)):
        write(root, "random", "random", accuracy, seed, executed=0.71)
    write(root, "balanced", "cosine", 0.87, executed=1.006, latency=2.5)
    return root


def rows_of(text: str) -> dict[str, dict[str, str]]:
    lines = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    header, *rows = [[cell.strip() for cell in line] for line in lines]
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def test_records_become_a_table_with_ratios_to_the_dense_network_and_the_papers_figures_apart(runs, tmp_path, capsys):
    path = tmp_path / "results" / "peers.md"
    asked = cli.compose("sweep=null", f"runs=[{runs}]", f"path={path}", config_name="table")
    peers.table(asked, "src/table.py")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    text = path.read_text()
    rows = rows_of(text)
    assert list(rows) == ["resnet20", "random", "static", "balanced"]  # best first
    assert rows["random"]["test accuracy"] == "89.00% ± 1.41%"
    assert rows["random"]["seeds"] == "2"
    assert rows["static"]["executed"] == "0.750"  # of the larger dense network's FLOPs
    assert rows["balanced"]["executed"] == "1.006"
    assert rows["balanced"]["counted"] == "0.700"
    assert (rows["balanced"]["latency ratio"], rows["random"]["latency ratio"]) == ("1.25", "-")
    assert rows["balanced"]["paper: accuracy"] == "91.3% epoch 160; 91.8% peak in epoch 154"
    assert rows["balanced"]["paper: counted"] == "0.715; 0.722"
    assert rows["random"]["paper: accuracy"] == "-"
    assert rows["balanced"]["parameters"] == "270,000"
    assert rows["balanced"]["dynamic blocks"] == "3 of 9"
    command = rows["random"]["command"].strip("`")
    assert command == "python src/train.py -m gate=random objective=plain name=random seed=0,1"
    assert shlex.split(rows["resnet20"]["command"].strip("`"))[-1] == "seed=0"
    assert "SLAT, 92.1% at 0.750" in text  # quoted, and no row is of it


def test_a_run_of_another_sweep_has_the_command_that_made_it():
    made = "src/train.py -m +sweeps=quick seed=range(3) data.root=/mine threads=1 hydra.launcher.n_jobs=2"
    for overrides in (["+sweeps=quick", "seed=0"], None):  # older records have none
        assert command_for(overrides, command=made) == "python src/train.py -m +sweeps=quick seed=range(3)"


def test_without_runs_the_table_says_what_makes_some(tmp_path):
    (tmp_path / "runs").mkdir()
    for asked, words in (
        ([f"runs_dir={tmp_path}/runs"], "sweep = peers: not started yet"),
        (["sweep=null", f"runs=[{tmp_path}/runs]"], r"no finished run in .*\+sweeps=peers"),
    ):
        with pytest.raises(UserError, match=words):
            peers.table(cli.compose(*asked, f"path={tmp_path}/x.md", config_name="table"), "src/table.py")
    assert not (tmp_path / "x.md").exists()


def test_make_has_a_target_for_it():
    text = (ROOT / "Makefile").read_text()
    assert re.search(r"^table: setup ## .*\n\t\$\(BIN\)/python src/table.py", text, re.M)
