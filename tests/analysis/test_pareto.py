import csv
import json
import re
import statistics
from pathlib import Path

import moocore
import numpy as np
import pytest
from conftest import assert_one_line, process

from cosinegate import cli
from cosinegate.analysis import pareto, tables
from cosinegate.analysis.frontier import hypervolume, on_frontier
from cosinegate.analysis.runs import families, find_runs
from cosinegate.runs.record import FORMAT
from cosinegate.terminal.errors import UserError


def test_hypervolume_and_frontier_are_those_of_a_library():
    rng = np.random.default_rng(0)
    for size in (1, 2, 7, 40):
        for _ in range(20):
            points = np.round(rng.random((size, 2)), 1 + size % 2)  # with ties
            reference = (0.9, 0.1)
            flipped = points * [1, -1]  # the library minimises both
            kept = [tuple(point) for point in points.tolist()]
            expected = moocore.hypervolume(flipped, ref=[reference[0], -reference[1]])
            assert hypervolume(kept, reference) == pytest.approx(expected, abs=1e-12)
            assert on_frontier(kept) == moocore.is_nondominated(flipped, keep_weakly=True).tolist()


def test_a_frontier_by_hand():
    points = [(1.0, 0.9), (0.5, 0.8), (0.5, 0.7), (0.4, 0.5), (0.8, 0.8)]
    assert on_frontier(points) == [True, True, False, True, False]
    assert hypervolume([(0.5, 0.8), (0.4, 0.5)], (1.0, 0.1)) == pytest.approx(0.5 * 0.7 + 0.1 * 0.4)
    assert hypervolume([(1.2, 0.9), (0.5, 0.05)], (1.0, 0.1)) == 0


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> tuple[dict, str]:
    """The record and the config of a real run, to make others of."""
    root = tmp_path_factory.mktemp("run")
    done = process("src/train.py", "+experiment=digits", "trainer.max_epochs=1", f"runs_dir={root}")
    assert done.returncode == 0, done.stderr
    (folder,) = (root / "digits").glob("*-s*")
    return json.loads((folder / "record.json").read_text()), (folder / "config.yaml").read_text()


def write(root: Path, made: tuple[dict, str], accuracy: float, counted: float, tau=0.7, seed=0, **changes) -> Path:
    """A run that differs from the real one as asked."""
    content, settings = made
    folder = (
        root / f"{changes.get('identity', tau)}-{changes.get('gate', 'cosine')}-{changes.get('data', 'digits')}-s{seed}"
    )
    folder.mkdir(parents=True)
    content = content | {"identity": folder.name.rpartition("-")[0], "seed": seed, "mean_gate": counted} | changes
    content["accuracy"] = content["accuracy"] | {"test": accuracy}
    content["flops"] = content["flops"] | {"counted": counted}
    (folder / "record.json").write_text(json.dumps(content))
    (folder / "config.yaml").write_text(settings.replace("tau_target: 0.7", f"tau_target: {tau}"))
    return folder


@pytest.fixture
def drawn(tmp_path, capfd):
    """Draws the runs in tmp_path/runs; gives what was printed on stdout and stderr."""

    def draw(*arguments: str) -> tuple[str, str]:
        own = [f"runs=[{tmp_path}/runs]", f"output={tmp_path}/pareto"]
        tables.pareto(cli.compose(*own, *arguments, config_name="pareto"), "src/pareto.py")
        return capfd.readouterr()

    return draw


def test_runs_become_a_figure_and_tables_with_seeds_put_together(record, tmp_path, drawn):
    accuracies = [0.90, 0.92, 0.97]
    for seed, accuracy in enumerate(accuracies):
        write(tmp_path / "runs", record, accuracy, 0.5 + 0.01 * seed, tau=0.5, seed=seed)
    write(tmp_path / "runs", record, 0.91, 0.6, tau=0.6)  # dominated
    write(tmp_path / "runs", record, 0.98, 1.0, gate="none")
    output, _ = drawn()
    base = tmp_path / "pareto" / "digits-resnet8-w8-1epochs-counted"
    assert base.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in base.with_suffix(".svg").read_text()
    rows = list(csv.DictReader(base.with_suffix(".csv").open()))
    assert len(rows) == 5
    assert {row["configuration"]: row["on_frontier"] for row in rows} == {
        "τ=0.5": "True",
        "τ=0.6": "False",
        "dense": "True",
    }
    table = base.with_suffix(".md").read_text()
    mean, std = statistics.fmean(accuracies), statistics.stdev(accuracies)
    assert f"| ★ | τ=0.5 | 3 | {100 * mean:.2f}% ± {100 * std:.2f}% | 0.510 ± 0.010 |" in table
    area = (1.1 - 0.51) * (mean - 0.1) + (1.1 - 1.0) * (0.98 - mean)
    assert f"Hypervolume {area:.4f}, up to the reference (counted 1.1, accuracy 0.1)" in table
    lines = [line for line in output.splitlines() if line.startswith("│")]
    assert [line.split("│")[2].strip() for line in lines] == ["dense", "τ=0.5", "τ=0.6"]  # best first
    assert ["★" in line for line in lines] == [True, True, False]
    moved, _ = drawn("reference=[1.0,0.5]")
    assert f"hypervolume {(1 - 0.51) * (mean - 0.5):.4f}" in moved


def test_without_an_output_the_files_lie_beside_the_runs(record, tmp_path):
    write(tmp_path / "runs", record, 0.9, 0.5)
    words = [f"runs=[{tmp_path}/runs]", f"runs_dir={tmp_path}/runs"]
    tables.pareto(cli.compose(*words, config_name="pareto"), "src/pareto.py")
    written = {path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("digits-*")}
    assert written == {"runs/figures"}


def test_each_axis_is_its_own_figure_and_latency_waits_for_a_measurement(record, tmp_path, drawn):
    write(tmp_path / "runs", record, 0.9, 0.5)
    drawn("x=executed")
    with pytest.raises(UserError, match="latency: no run"):
        drawn("x=latency")
    write(tmp_path / "runs", record, 0.8, 0.4, tau=0.4, latency_ms=1.5)
    output, _ = drawn("x=latency")
    assert "1 configurations have no latency" in output
    assert "latency 1.65" in output  # the reference: 1.1 of the slowest
    write(tmp_path / "runs", record, 0.9, 0.4, tau=0.4, seed=1)  # a seed that nobody timed
    drawn("x=latency")
    (table,) = (tmp_path / "pareto").glob("*latency.md")
    assert "| 2 | 85.00% ± 7.07% |" in table.read_text()
    assert "| 1.500 |" in table.read_text()
    assert {path.name.split("-")[-1] for path in (tmp_path / "pareto").glob("*.png")} == {"executed.png", "latency.png"}
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        drawn(f"output={tmp_path}/file")


def test_absolute_costs_compare_networks_of_different_size(record, tmp_path, drawn):
    """A smaller dense network beside a larger gated one: in units of its own FLOPs it would look as dear."""
    flops = {"executed": 1.0, "dense_per_image": 2_000_000}
    write(tmp_path / "runs", record, 0.9, 1.0, gate="none", network="resnet20-w16", flops=flops)
    smaller = flops | {"dense_per_image": 1_500_000}
    write(tmp_path / "runs", record, 0.8, 1.0, gate="none", network="resnet2-2-3-w16", identity="small", flops=smaller)
    gated = flops | {"executed": 0.7}
    write(tmp_path / "runs", record, 0.85, 0.6, network="resnet20-w16", flops=gated)
    folder = tmp_path / "pareto"
    drawn("x=executed")
    assert len(list(folder.glob("*executed.png"))) == 2
    drawn("x=mflops")
    (table,) = folder.glob("*all-networks*mflops.md")
    lines = [line.split(" | ") for line in table.read_text().splitlines() if line.startswith("| ")][1:]
    assert [line[7] for line in lines] == ["2.00", "1.40", "1.50"]
    assert [line[0] for line in lines] == ["| ★", "| ★", "| "]
    assert "resnet2-2-3-w16 dense" in lines[2][1]
    write(tmp_path / "runs", record, 0.9, 1.0, identity="old", flops={"executed": 1.0})
    assert "1 configurations have no mflops" in drawn("x=mflops")[0]


def test_a_key_that_an_older_run_did_not_know_is_in_no_label(record, tmp_path):
    older = re.sub(r" *decay_gates: .*\n", "", record[1])
    assert older != record[1]
    write(tmp_path, (record[0], older), 0.9, 0.5, tau=0.4, identity="old")
    write(tmp_path, record, 0.9, 0.5, tau=0.5, identity="new")
    (configurations,) = families(find_runs([tmp_path], print), "counted").values()
    assert {one.label for one in configurations} == {"τ=0.4", "τ=0.5"}


def test_labels_say_what_sets_a_configuration_apart(record, tmp_path):
    for name, text in (("a", ""), ("b", "polarity: novelty"), ("c", "hard: true"), ("d", "reduction: 4")):
        made = record[1]
        for key in ("polarity", "hard", "reduction"):
            if text.startswith(key):
                made = re.sub(rf"{key}: .*", text, made)
        write(tmp_path, (record[0], made), 0.9, 0.5, tau=0.7, identity=name, seed=ord(name))
    (configurations,) = families(find_runs([tmp_path], print), "counted").values()
    assert {one.label for one in configurations} == {
        "digits as it is",
        "gate.polarity=novelty",
        "gate.relaxation.hard=True",
        "gate.controller.reduction=4",
    }


def test_what_cannot_be_compared_is_drawn_apart(record, tmp_path, drawn):
    write(tmp_path / "runs", record, 0.9, 0.5)
    write(tmp_path / "runs", record, 0.99, 0.5, data="mnist")
    write(tmp_path / "runs", record, 0.95, 0.5, tau=0.6, epochs={"planned": 8, "done": 8})
    write(tmp_path / "runs", record, 0.95, 0.5, tau=0.8, network="resnet20-w16")
    write(tmp_path / "runs", record, 0.95, 0.5, tau=0.9, selected_on="holdout")
    drawn()
    names = {path.stem for path in (tmp_path / "pareto").glob("*.md")}
    assert names == {
        "digits-resnet8-w8-1epochs-counted",
        "digits-resnet8-w8-8epochs-counted",
        "digits-resnet8-w8-1epochs-holdout-counted",
        "digits-resnet20-w16-1epochs-counted",
        "mnist-resnet8-w8-1epochs-counted",
    }
    mnist = (tmp_path / "pareto" / "mnist-resnet8-w8-1epochs-counted.md").read_text()
    assert "Quoted from the paper (ResNet-20), not measured" in mnist
    assert "| MNIST, within 10 epochs | 99.5% | 0.630 |" in mnist
    digits = (tmp_path / "pareto" / "digits-resnet8-w8-1epochs-counted.md").read_text()
    assert "Quoted" not in digits


def test_a_record_that_cannot_be_read_is_passed_over_with_a_line(record, tmp_path):
    good = write(tmp_path / "runs", record, 0.9, 0.5)
    corrupt = write(tmp_path / "runs", record, 0.9, 0.5, tau=0.1)
    (corrupt / "record.json").write_text('{"format": 1, "status": "fin')
    write(tmp_path / "runs", record, 0.9, 0.5, tau=0.2, format=FORMAT + 1)
    write(tmp_path / "runs", record, 0.9, 0.5, tau=0.3, status="running")
    write(tmp_path / "runs", record, 0.9, None, tau=0.4)
    for number, text in enumerate(
        ("[]", "{}", "null", '{"format": 1, "epochs": 3}', '{"format": 1, "status": "finished"}')
    ):
        (tmp_path / "runs" / f"odd{number}").mkdir()
        (tmp_path / "runs" / f"odd{number}" / "record.json").write_text(text)
    write(tmp_path / "runs", record, float("nan"), 0.5, tau=0.41)
    write(tmp_path / "runs", record, 0.9, 0.5, tau=0.42, network=["x"])
    write(tmp_path / "runs", record, 0.9, 0.5, tau=0.43, latency_ms="slow")
    odd = write(tmp_path / "runs", record, 0.9, 0.5, tau=0.45)
    (odd / "config.yaml").write_text("objective: [1")
    write(tmp_path / "runs" / "copy", record, 0.9, 0.5)
    done = process("src/pareto.py", f"runs={tmp_path}/runs", f"output={tmp_path}/pareto", afresh=True)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.strip().splitlines()
    assert all(line.startswith("skipped: ") for line in lines), done.stderr
    assert len(lines) == 1 + 1 + 1 + 1 + 5 + 3 + 1 + 1
    rows = list(csv.DictReader((tmp_path / "pareto" / "digits-resnet8-w8-1epochs-counted.csv").open()))
    assert [row["folder"] for row in rows] in ([good.as_posix()], [f"{tmp_path}/runs/copy/{good.name}"])


def test_without_runs_it_says_what_makes_some(tmp_path, drawn):
    with pytest.raises(UserError, match="no such folder: make pareto SWEEP=quick"):
        drawn()
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match=r"no finished run in .*: make pareto SWEEP=quick"):
        drawn()
    done = process("src/pareto.py", "sweep=quick", f"runs_dir={tmp_path}/runs", f"output={tmp_path}/pareto")
    assert_one_line(done, "sweep = quick: not started yet", "make pareto SWEEP=quick")
    assert_one_line(process("src/pareto.py", "x=speed"), "x", "speed", "counted")
    assert not (tmp_path / "pareto").exists()


def test_the_frontier_is_of_the_means(record, tmp_path):
    for seed, accuracy in enumerate((0.99, 0.71)):  # a lucky seed alone would be on the frontier
        write(tmp_path, record, accuracy, 0.6, tau=0.6, seed=seed)
    write(tmp_path, record, 0.9, 0.5, tau=0.5)
    (configurations,) = families(find_runs([tmp_path], print), "counted").values()
    marked = pareto.mark(configurations, "counted")
    assert [(one.label, one.on_frontier) for one in marked] == [("τ=0.5", True), ("τ=0.6", False)]
