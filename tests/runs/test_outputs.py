"""What commands write: over their own files alone, with names escaped, and with the path where a disk is full."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, assert_one_line, config, process
from faults import fill

from cosinegate.analysis import pareto, peers, training_speed
from cosinegate.deploy import benchmark, benchmark_table
from cosinegate.runs.outputs import require_own
from cosinegate.terminal.errors import UserError
from cosinegate.terminal.escape import code, csv_cell, markdown, printable
from cosinegate.train import train

BAD = '=HYPERLINK("http://x")|<script>`a`</script>[b](c)\\'  # what a name can be, and what a place would make of it
WORSE = "+cmd|' /C calc'!A0\x1b[2J\r\n| x | \u202e"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A short run that can be deployed."""
    folder = tmp_path_factory.mktemp("run") / "run"
    asked = ["objective.warmup_epochs=0", "trainer.max_epochs=1", "trainer.limit_train_batches=2", "threads=1"]
    asked += ["gate.polarity=novelty", "network.blocks=[1,1,2]"]  # whose gates start open
    train(config("+experiment=digits", *asked, f"run_dir={folder}"))
    return folder


def test_what_earlier_versions_wrote_is_a_commands_own():
    """`make pareto`, `make table` and the others replace what is committed, and no file of another kind."""
    kept = {path for path in (ROOT / "results").rglob("*") if path.is_file()}
    texts = {
        r"results/(pareto|consistency)/.*csv": (pareto.HEADER, pareto.MARK),
        r"results/(pareto|consistency)/.*md": (pareto.TABLE, pareto.MARK),
        r"results/peers(_mnist)?\.md": (peers.TITLE, peers.MARK),
        r"results/.*/benchmark\.json": (benchmark.OWN_JSON, benchmark_table.MARK),
        r"results/.*/benchmark\.md": (benchmark.OWN_TABLE, benchmark_table.MARK),
    }
    for pattern, (own, mark) in texts.items():
        files = {path for path in kept if re.fullmatch(pattern, str(path.relative_to(ROOT)))}
        assert files
        for path in files:
            figures = {path.with_suffix(kind) for kind in (".png", ".svg")} & kept
            require_own({path: own}, dict.fromkeys(figures, mark))
        for path in (ROOT / "results" / "README.md", ROOT / "pyproject.toml", min(kept - files)):
            with pytest.raises(UserError, match="was not written by this command"):
                require_own({path: own})
    training_speed.require_own_files(ROOT / "results" / "bench")


def test_a_table_is_made_again_over_its_own_and_over_nothing_else(run, tmp_path):
    table = [str(ROOT / "src" / "table.py"), "sweep=null", f"runs=[{run}]"]
    shutil.copy(ROOT / "results" / "peers.md", tmp_path / "peers.md")
    shutil.copy(ROOT / "results" / "peers.png", tmp_path / "peers.png")
    for _ in range(2):
        assert process(*table, "path=peers.md", cwd=tmp_path).returncode == 0
    assert (tmp_path / "peers.png").read_bytes() != (ROOT / "results" / "peers.png").read_bytes()
    (tmp_path / "peers.md").write_text("my thesis\n")
    assert_one_line(process(*table, "path=peers.md", cwd=tmp_path), "peers.md: already exists and was not written")
    (tmp_path / "peers.md").unlink()
    shutil.copy(ROOT / "results" / "mnist" / "curves.png", tmp_path / "peers.png")  # another figure, and no table
    assert_one_line(process(*table, "path=peers.md", cwd=tmp_path), "peers.png: already exists and was not written")
    assert [path.name for path in tmp_path.iterdir()] == ["peers.png"]


# names


@pytest.mark.parametrize("name", [BAD, WORSE, "τ=0.5 λ_cons=1", "'quoted' \"words\"", "&amp;", "`", "\\|", "\\"])
def test_a_name_is_one_cell_without_markup(name):
    for shown in (markdown(name), code(name)):
        assert shown.isprintable()
        row = re.sub(r"\\.", "", f"| {shown} | 1 |")
        assert row.count("|") == 3
        if not shown.startswith("`"):
            assert not re.search(r"[<`\[](?!/?code>)", row)
    assert printable(name).isprintable()
    assert not csv_cell(name).startswith(("=", "+", "-", "@", "\t", "\r"))
    assert csv_cell(-0.5) == -0.5


def test_names_of_records_are_escaped_wherever_they_are_shown(run, tmp_path):
    record, settings = json.loads((run / "record.json").read_text()), (run / "config.yaml").read_text()
    for number, changes in enumerate((
        {"experiment": BAD, "overrides": [f"name={WORSE}"]},
        {"experiment": "b", "overrides": None, "command": WORSE, "polarity": WORSE},
        {"experiment": "c", "parameters": "m\x1bany"},
        {"experiment": "a\x1b[2J"},
    )):  # fmt: skip
        folder = tmp_path / "runs" / str(number)
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(json.dumps(record | {"identity": f"x{number}"} | changes))
        (folder / "config.yaml").write_text(settings.replace("name: digits\n", f"name: {json.dumps(WORSE)}\n", 1))
    drawn = process("src/pareto.py", f"runs={tmp_path}/runs", f"output={tmp_path}")
    tabled = process("src/table.py", "sweep=null", f"runs=[{tmp_path}/runs]", f"path={tmp_path}/table.md")
    for done in (drawn, tabled):
        assert done.returncode == 0, done.stderr
        assert (done.stdout + done.stderr).replace("\n", "").isprintable()
        assert "experiment = a\\x1b[2J" in done.stderr
        assert "parameters = m\\x1bany" in done.stderr
    (path,) = tmp_path.glob("*.csv")
    rows = list(csv.DictReader(path.open()))
    assert {row["experiment"] for row in rows} == {f"'{BAD}", "b"}
    for text in tmp_path.glob("*.md"):
        assert "<script>" not in text.read_text().replace("\\<", "")
        bare = [re.sub(r"\\.", "", line) for line in text.read_text().splitlines() if line.startswith("| ")]
        assert len({line.count("|") for line in bare}) == 1
    for text in tmp_path.glob("*.svg"):
        assert "\x1b" not in text.read_text()


# full disks


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("pareto runs=run output=pareto", "pareto/digits-"),
        ("table sweep=null runs=[run] path=there/table.md", "there/table.md"),
        ("report runs=[run] limit_batches=1", "run/report.html"),
        ("exits run=run budgets=[1.0] images=20 output=exits", "exits"),
        ("export run=run images=20", "run/export"),
        ("train -m +experiment=digits seed=0,1", "runs/.sweeps"),
    ],
    ids=lambda words: words.split()[0],
)
def test_a_full_disk_is_named_by_the_path_that_could_not_be_written(command, named, run, disk):
    shutil.copytree(run, disk / "run", ignore=shutil.ignore_patterns("export", "report.html"))
    fill(disk / "run" / "figures")
    program, *words = command.split()
    done = process(str(ROOT / "src" / f"{program}.py"), *words, cwd=disk)
    assert_one_line(done, named, "No space left on device")
    assert done.returncode == 2
    assert not [path for path in disk.rglob("*") if path.name.startswith(".export-") or path.suffix == ".part"]
