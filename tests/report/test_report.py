"""The report in a real browser: Debian's chromium, headless."""

import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import assert_one_line, config, process
from playwright.sync_api import Page, sync_playwright

from cosinegate.report.page import report, write_report
from cosinegate.terminal.errors import UserError

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Two gated runs and a dense one, trained for real."""
    root = tmp_path_factory.mktemp("runs")
    short = ["+experiment=digits", "trainer.max_epochs=2", "threads=1"]
    found = {}
    for name, words in {"one": [], "two": ["gate.polarity=novelty"], "dense": ["gate=none"]}.items():
        done = process("src/train.py", *short, *words, f"runs_dir={root}/{name}")
        assert done.returncode == 0, done.stderr
        (found[name],) = (root / name / "digits").glob("*-s*")
    return found


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        reason = "no chromium on this machine: make browser installs Debian's"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def opened(browser):
    """Opens a page; at the end there must have been no error and no request for anything but the file."""
    troubles, pages = [], []

    def open_page(path: Path, width: int = 1100, scheme: str = "light") -> Page:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on(
            "request",
            lambda request: (
                request.url in (path.as_uri(), "about:blank")
                or request.url.startswith("data:")
                or troubles.append(request.url)
            ),
        )
        page.goto(path.as_uri())
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert troubles == []


def caption(page: Page, chart: str) -> str:
    return page.locator(f"figure:has(#{chart}) figcaption").inner_text()


CHARTS = ["accuracy", "efficiency", "block-epoch", "class-block", "cir", "open-rate", "by-computed", "paths"]


def test_a_gated_run_shows_every_figure_with_words_for_it(runs, opened, tmp_path):
    path = tmp_path / "report.html"
    write_report([runs["one"]], path)
    assert path.stat().st_size < 5 * 2**20
    page = opened(path)
    record = json.loads((runs["one"] / "record.json").read_text())
    assert f"{100 * record['accuracy']['test']:.2f}%" in page.locator("#card").inner_text()
    assert record["command"] in page.locator("#card").inner_text()
    for chart in CHARTS:
        assert page.locator(f"#{chart} svg").count() == 1, chart
        words = page.locator(f"#{chart}").get_attribute("aria-label")
        assert len(words) > 20
        assert words == caption(page, chart)
    assert "I exploration" in page.locator("#accuracy").inner_text()
    assert page.locator("#s-frontier").is_hidden()
    assert page.locator("#s-exits").is_hidden()
    assert page.locator("#unfinished").is_hidden()
    assert f"counted {record['flops']['counted']:.3f}" in caption(page, "efficiency")


def test_the_controls_do_what_they_say(runs, opened, tmp_path):
    path = tmp_path / "report.html"
    write_report([runs["one"], runs["two"]], path)
    page = opened(path)
    page.select_option("#block", "2")
    assert caption(page, "cir").startswith("Block 2:")
    assert caption(page, "open-rate").startswith("Block 2:")
    button = page.locator("#most button").first
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert page.locator("#route-drawing .block").count() == 3
    computed = page.locator("#route-drawing .computed").count()
    assert f"{computed} of 3 blocks computed it" in page.locator("#route figcaption").inner_text()
    other = f"digits {runs['two'].name}"
    assert other not in page.locator("#accuracy").inner_text()
    page.select_option("#against", "1")
    assert f"{other}: validation" in page.locator("#accuracy").inner_text()
    assert f"Dashed: {other}" in caption(page, "accuracy")
    before = caption(page, "accuracy")
    page.select_option("#run", "1")
    assert caption(page, "accuracy") != before
    assert page.locator("#route-drawing .block").count() == 0  # the other run's route is gone
    words = page.locator("#accuracy").get_attribute("aria-label")
    page.set_viewport_size({"width": 500, "height": 800})
    page.wait_for_timeout(200)
    assert page.locator("#accuracy").get_attribute("aria-label") == words
    page.locator("#accuracy svg").hover(position={"x": 250, "y": 150})
    page.get_by_text("validation").last.wait_for()
    assert "2 configurations" in caption(page, "frontier")


def test_it_fits_a_phone_and_a_dark_room(runs, opened, tmp_path):
    path = tmp_path / "report.html"
    write_report([runs["one"]], path)
    page = opened(path, width=375, scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    red, green, blue = (int(v) for v in page.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g)"))  # fmt: skip
    assert max(red, green, blue) < 60


def test_a_dense_run_has_no_gate_sections(runs, opened, tmp_path):
    path = tmp_path / "report.html"
    write_report([runs["dense"]], path)
    page = opened(path)
    assert page.locator("#accuracy svg").is_visible()
    assert page.locator(".gated").count() == 3
    assert all(section.is_hidden() for section in page.locator(".gated").all())
    assert "exploration" not in page.locator("#accuracy").inner_text()
    assert "gate" not in caption(page, "efficiency")


def test_odd_words_and_missing_numbers_break_nothing(runs, opened, tmp_path):
    odd = tmp_path / "odd"
    shutil.copytree(runs["one"], odd)
    record = json.loads((odd / "record.json").read_text())
    record |= {
        "experiment": "<!-- <script> <img src=x onerror=alert(1)>",
        "command": "a\u202eb",
        "images_per_second": float("nan"),
    }
    (odd / "record.json").write_text(json.dumps(record))
    (odd / "metrics.csv").unlink()
    write_report([odd, runs["two"]], tmp_path / "report.html")
    page = opened(tmp_path / "report.html")
    assert "<!-- <script> <img" in page.locator("#card").inner_text()
    assert "a\\u202eb" in page.locator("#card").inner_text()
    page.locator("#frontier svg").hover(position={"x": 600, "y": 150})
    assert page.locator("#cir svg").count() == 1
    page.locator("#fewest button").first.click()
    assert page.locator("#route-drawing .block").count() == 3


FIGURES = ["skip_percent", "tau_target", "dynamic_blocks", "paths", "mean_gate", "images_per_second", "parameters"]
FIGURES += ["git_commit", "seed", "epochs.planned", "accuracy.best", "accuracy.best_epoch", "accuracy.last"]
FIGURES += ["accuracy.test", "flops.counted", "flops.executed", "versions.torch"]


def test_what_a_record_lacks_is_said_and_every_chart_is_drawn(runs, opened, tmp_path):
    def without(name: str, keys: list[str], value: object) -> Path:
        """A copy whose record has the value, or with `...` nothing, in place of the figures."""
        shutil.copytree(runs["one"], tmp_path / name)
        record = json.loads((tmp_path / name / "record.json").read_text())
        for key in keys:
            *parents, last = key.split(".")
            node = record[parents[0]] if parents else record
            node.pop(last)
            node |= {} if value is ... else {last: value}
        (tmp_path / name / "record.json").write_text(json.dumps(record))
        return tmp_path / name

    copies = [without("one", ["skip_percent"], None), without("null", FIGURES, None), without("gone", FIGURES, ...)]
    copies += [without("rows", [], None), without("nan", ["flops.executed", "accuracy.best"], float("nan"))]
    copies += [without("free", ["lambda_flops"], 0.0)]
    lines = [line.split(",") for line in (copies[3] / "metrics.csv").read_text().splitlines()]
    holes = {"gates/mean": "nan", "gates/block_00": "", "val/acc": "inf"}
    lines[1] = [holes.get(name, value) for name, value in zip(*lines[:2], strict=True)]
    (copies[3] / "metrics.csv").write_text("\n".join(map(",".join, lines)) + "\n")
    write_report(copies, tmp_path / "report.html", limit_batches=1)
    page = opened(tmp_path / "report.html")
    for place, copy in enumerate(copies):
        page.select_option("#run", str(place))
        page.select_option("#against", str((place + 1) % len(copies)))
        for chart in CHARTS:
            assert page.locator(f"#{chart} svg").count() == 1, (copy.name, chart)
            assert not {"undefined", "NaN", "null"} & set(caption(page, chart).split()), (copy.name, chart)
    page.select_option("#against", "")
    assert "prog(t)" not in page.locator("#efficiency").inner_text()  # without a penalty it moves nothing
    assert "Not recorded" not in caption(page, "efficiency")
    page.select_option("#run", "0")
    assert "prog(t)" in page.locator("#efficiency").inner_text()
    record = json.loads((copies[0] / "record.json").read_text())
    assert f"executed {record['flops']['executed']:.3f} of" in caption(page, "efficiency")
    assert "Not recorded: percent skipped." in caption(page, "efficiency")
    page.select_option("#run", "1")
    assert "Not recorded: best accuracy, its epoch, last accuracy." in caption(page, "accuracy")


def test_gates_without_cir_have_routes_and_no_geometry(opened, tmp_path):
    tiny = ["+experiment=digits", "gate=aig", "objective=per_block", "trainer.max_epochs=1", "threads=1"]
    done = process("src/train.py", *tiny, "trainer.limit_train_batches=2", f"run_dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    write_report([tmp_path / "run"], tmp_path / "report.html", limit_batches=1)
    page = opened(tmp_path / "report.html")
    assert page.locator("#s-geometry").is_hidden()
    assert page.locator("#paths svg").count() == 1
    page.locator("#fewest button").first.click()
    assert page.locator("#route-drawing .block").count() == 3


def test_an_unfinished_run_is_marked(runs, opened, tmp_path):
    stopped = tmp_path / "stopped"
    shutil.copytree(runs["one"], stopped)
    record = json.loads((stopped / "record.json").read_text())
    accuracy = {key: value for key, value in record["accuracy"].items() if not key.startswith("test")}
    record |= {"status": "running", "epochs": {"planned": 9, "done": 2}, "accuracy": accuracy}
    (stopped / "record.json").write_text(json.dumps(record))
    write_report([stopped], tmp_path / "report.html")
    page = opened(tmp_path / "report.html")
    assert page.locator("#unfinished").inner_text() == "This run is not finished: running, 2 of 9 epochs."
    shutil.rmtree(stopped / "checkpoints")
    (stopped / "metrics.csv").unlink()
    write_report([stopped], tmp_path / "bare.html")
    page = opened(tmp_path / "bare.html")
    assert page.locator("#unfinished").is_visible()


def test_a_corrupt_record_is_one_line(runs, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(runs["one"], broken)
    (broken / "record.json").write_text("{")
    assert_one_line(process("src/report.py", f"runs=[{broken}]"), "record.json cannot be read")
    assert not (broken / "report.html").exists()
    with pytest.raises(UserError, match=r"has no record\.json"):
        write_report([tmp_path], tmp_path / "report.html")
    with pytest.raises(UserError, match=f"{tmp_path}: cannot be written: there is a folder"):
        report(config(f"runs=[{runs['one']}]", f"path={tmp_path}", "limit_batches=1", config_name="report"))
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}-*"))
    record = json.loads((runs["one"] / "record.json").read_text())
    (broken / "record.json").write_text(json.dumps({k: v for k, v in record.items() if k != "versions"}))
    with pytest.raises(UserError, match="has no versions"):
        write_report([broken], tmp_path / "report.html")


def test_exits_show_their_routes_and_no_epochs(runs, opened, tmp_path):
    made = tmp_path / "exits"
    done = process("src/exits.py", f"run={runs['dense']}", "after=[0]", f"output={made}", "images=64", "threads=1")
    assert done.returncode == 0, done.stderr
    write_report([made], tmp_path / "report.html", limit_batches=1)
    page = opened(tmp_path / "report.html")
    assert page.locator("#s-curves").is_hidden()
    assert page.locator("#block-epoch").is_hidden()
    assert page.locator("#paths svg").count() == 1
    assert "after blocks 0" in page.locator("#card").inner_text()
    frontier = json.loads((made / "frontier.json").read_text())
    words = caption(page, "exits")
    for point in (frontier["own"], *frontier["points"]):
        assert f"{100 * point['accuracy']:.2f}% at {point['executed']:.3f}" in words
    assert page.locator("#exits svg").count() == 1
    for point in frontier["points"]:
        assert f"{point['budget']:.2f}" in page.locator("#exits").inner_text()
    (made / "frontier.json").write_text('{"after": [0]}')
    with pytest.raises(UserError, match=r"frontier\.json cannot be read: own"):
        write_report([made], tmp_path / "report.html", limit_batches=1)
