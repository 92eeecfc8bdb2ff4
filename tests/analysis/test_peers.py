"""Peers and controls under one protocol: the sweep's rows, and the table of them."""

import itertools
import json
import shlex
import shutil
import statistics
import subprocess
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from conftest import ROOT, assert_one_line, config, process
from matplotlib.text import Text
from test_sweeps import plan

from cosinegate import cli
from cosinegate.analysis import peers
from cosinegate.analysis.runs import Configuration, Run
from cosinegate.config.identity import identity, run_folder
from cosinegate.runs.record import Epochs, Record

ROWS = {"resnet20", "static", "static_leaner", "aggressive", "balanced", "conservative", "balanced_novelty"}
ROWS |= {"cir_only", "controller_only", "aig", "skipnet", "random", "constant"}


@pytest.mark.parametrize(("sweep", "data", "epochs"), [("peers", "cifar10", 12), ("peers_mnist", "mnist", 10)])
def test_every_row_has_one_schedule_and_is_a_command_of_its_own(sweep, data, epochs):
    jobs = plan(f"+sweeps={sweep}")
    assert not any(job.error for job in jobs)
    assert {job.config.name for job in jobs} == ROWS
    assert len({identity(job.config) for job in jobs}) == len(jobs) == len(ROWS)
    protocol = {
        (c.data.name.name, c.data.validation.name, c.trainer.max_epochs, c.optimizer.lr, c.data.batch_size, c.sweep)
        for c in (job.config for job in jobs)
    }
    assert protocol == {(data, "holdout", epochs, 0.1, 128, sweep)}
    machines = ["threads=1", "trainer.enable_progress_bar=false", "runs_dir=/tmp/elsewhere"]
    for job in jobs[::6]:
        point = [word for word in job.overrides if not word.startswith("+sweeps=")]
        by_sweep, alone = [*job.overrides, *machines], [*point, f"sweep={sweep}", *machines]
        told = {command_for(words) for words in (by_sweep, alone)}
        assert told == {shlex.join(["python", "src/train.py", *point, "seed=0"])}
        again = config(*shlex.split(told.pop())[2:])
        assert run_folder(again) == run_folder(job.config) == run_folder(config(*alone[:-1]))


def command_for(overrides: list[str], **changes) -> str:
    """What the table says of a run that was told these words."""
    record = Record(status="finished", epochs=Epochs(done=1), seed=0, overrides=overrides, **changes)
    return peers.command_of(Configuration([Run(Path("x"), record, {})]))


def test_the_schedule_of_all_rows_is_the_command_lines():
    jobs = plan("+sweeps=peers", "trainer.max_epochs=2", "data=digits")
    assert {(job.config.trainer.max_epochs, job.config.data.name.name) for job in jobs} == {(2, "digits")}
    assert len(jobs) == len(ROWS)


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
        "latency": None if latency is None else {"batch": 1, "engine": "torch", "time_ratio": latency},
        "command": "src/train.py -m +sweeps=peers",
        "overrides": ["+sweeps=peers", f"gate={gate}", "objective=plain", f"name={name}", f"seed={seed}", "threads=1"],
    } | changes
    folder = root / name / f"{name}-s{seed}"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps(record))


@pytest.fixture
def runs(tmp_path) -> Path:
    root = tmp_path / "runs"
    write(root, "resnet20", "none", 0.90, latency=1.0)
    write(root, "static", "none", 0.89, network="resnet2-2-3-w16", dense_per_image=60_000_000)
    for seed, accuracy in enumerate((0.88, 0.90)):
        write(root, "random", "random", accuracy, seed, executed=0.71)
    write(root, "balanced", "cosine", 0.87, executed=1.006, latency=1.25)
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
    assert (rows["static"]["network"], rows["balanced"]["network"]) == ("resnet2-2-3-w16", "resnet20-w16")
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


def test_the_names_of_rows_near_each_other_do_not_lie_on_each_other():
    figure, axis = plt.subplots(figsize=(10, 7))
    places = [(name, 1.0 + i / 500, 88 + i % 3 / 20) for i, name in enumerate(sorted(ROWS))]  # all in one corner
    axis.plot(*zip(*((x, y) for _, x, y in places), (0.5, 20), strict=True), "o")
    figure.draw_without_rendering()
    labels = peers.name_points(axis, places)
    assert {label.get_text() for label in labels} == ROWS
    boxes = [Text.get_window_extent(label) for label in labels]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert all(axis.bbox.containsx(x) and axis.bbox.containsy(y) for box in boxes for x, y in box.corners())
    plt.close(figure)


TINY = ["data=digits", "network.depth=8", "network.width=4", "trainer.max_epochs=1", "trainer.limit_train_batches=2"]
TINY += ["trainer.limit_val_batches=1", "callbacks.curves=null"]


def test_runs_of_a_sweep_and_of_single_commands_become_one_table_through_the_commands(tmp_path):
    sweep = ["hydra.sweeper.points=[['gate=random','objective=plain','name=random','+protocol=peers']]", "seed=0,1"]
    single = ["+experiment=resnet20", "+protocol=peers", "sweep=peers", "trainer.enable_progress_bar=false"]
    for words in (["-m", "+sweeps=peers", *sweep], single):
        trained = process("src/train.py", *words, *TINY, "threads=1", f"runs_dir={tmp_path}/runs")
        assert trained.returncode == 0, trained.stderr
    made = process(
        str(ROOT / "src" / "table.py"), "path=both.md", cwd=tmp_path
    )  # the sweep's runs, whoever trained them
    assert made.returncode == 0, made.stderr
    assert set(rows_of((tmp_path / "both.md").read_text())) == {"random", "resnet20"}
    kept = tmp_path / "results" / "peers"  # as records are committed: without the runs' other files
    for record in (tmp_path / "runs").rglob("record.json"):
        (kept / record.parent.name).mkdir(parents=True)
        shutil.copy(record, kept / record.parent.name)
    done = process(str(ROOT / "src" / "table.py"), "sweep=null", "runs=[results/peers]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["written", "runs/figures/peers.md", "written", "runs/figures/peers.png"]
    assert (tmp_path / "runs" / "figures" / "peers.png").read_bytes().startswith(b"\x89PNG")
    rows = rows_of((tmp_path / "runs" / "figures" / "peers.md").read_text())
    tiny = " ".join(TINY)
    assert {name: row["command"] for name, row in rows.items()} == {
        "random": f"`python src/train.py -m {tiny} gate=random objective=plain name=random +protocol=peers seed=0,1`",
        "resnet20": f"`python src/train.py +experiment=resnet20 +protocol=peers {tiny} seed=0`",
    }
    records = [json.loads(path.read_text()) for path in kept.rglob("record.json")]
    accuracies = [record["accuracy"]["test"] for record in records if record["gate"] == "random"]
    mean, std = statistics.fmean(accuracies), statistics.stdev(accuracies)
    assert rows["random"]["test accuracy"] == f"{100 * mean:.2f}% ± {100 * std:.2f}%"
    assert (rows["random"]["seeds"], rows["resnet20"]["seeds"]) == ("2", "1")
    assert (rows["resnet20"]["executed"], rows["resnet20"]["gate"]) == ("1.000", "dense")
    assert float(rows["random"]["executed"].split()[0]) == pytest.approx(0.7, abs=0.06)
    assert tuple(rows["random"]) == peers.COLUMNS


def test_without_runs_the_table_says_what_makes_some_and_writes_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    for asked, words in (
        ("runs_dir=empty", "sweep = peers: not started yet"),
        ("sweep=null runs=[empty]", "no finished run in empty"),
    ):
        done = process(str(ROOT / "src" / "table.py"), *asked.split(), cwd=tmp_path)
        assert_one_line(done, words, "python src/train.py -m +sweeps=peers")
        assert done.returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


MAKE = ("make", "--dry-run", "--no-print-directory", "--old-file=.venv/ready")  # as if in no other make


def test_make_table_asks_for_a_sweep_or_for_folders_of_records():
    for words, told in {
        "": "src/table.py",
        "SWEEP=peers_mnist": "src/table.py sweep=peers_mnist",
        "RUNS=results/peers": "src/table.py sweep=null 'runs=[results/peers]'",
    }.items():
        command = [*MAKE, "table", "ARGS=", *words.split()]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == f".venv/bin/python {told}"
