"""The pages: every command is right for today's code, every link leads somewhere, lines fit. Nothing is trained."""

import functools
import itertools
import os
import re
import shlex
import subprocess
from pathlib import Path

import grimp
import pytest
from conftest import ROOT
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from cosinegate import cli
from cosinegate.config.checks import validate

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
LONGEST_LINE, MOST_LINES = 120, 150
RUN = "0123456789-s0"  # takes the place of <run>
CODE = re.compile(r"^(?: {4,}|\t)((?:python src/|make )[^\\\n]*(?:\\\n[^\\\n]*)*)", re.MULTILINE)
INLINE = re.compile(r"`((?:python src/|make )[^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", re.MULTILINE)
FILE = re.compile(r"`((?:src|conf|sweeps|tests|docs)/[\w./-]+)`")
CHOICE = re.compile(r"\+(experiment|sweeps|protocol)=(\w+)")
MADE_UP = ("checker", "mine")  # examples of a person's own
MAKE = {"PATH": os.environ["PATH"]}  # without what a make around the tests hands on


def commands() -> list[tuple[str, str]]:
    """Every command of the pages, with its page, once."""
    found = {}
    for page in PAGES:
        text = page.read_text()
        for command in [*CODE.findall(text), *INLINE.findall(text)]:
            words = shlex.split(command.replace("\\\n", " ").replace("<run>", RUN), comments=True)
            if not any(f"={name}" in command for name in MADE_UP):
                found.setdefault(shlex.join(words), page.name)
    return [(page, command) for command, page in found.items()]


def check(command: str) -> None:
    program, *words = shlex.split(command)
    if program == "make":
        check_make(words)
    else:
        check_python(words)


def check_make(words: list[str]) -> None:
    """The target is there, and so are the commands that it would run."""
    unknown = {word.partition("=")[0] for word in words if "=" in word} - make_variables()
    assert not unknown, f"the Makefile reads no {unknown}"
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, env=MAKE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "is missing" not in done.stdout, done.stdout
    for command in re.findall(r"/python (src/[^;&|\n]*)", done.stdout):
        check_python(shlex.split(command))


@functools.cache
def make_variables() -> set[str]:
    return set(re.findall(r"^([A-Z]+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE))


def check_python(words: list[str]) -> None:
    """The config that the command asks for can be composed, and holds only values that are allowed."""
    script, *words = words
    assert (ROOT / script).is_file(), f"there is no {script}"
    if "--help" in words:
        return
    if "--cfg" in words:  # prints the config, or another part of it
        del words[words.index("--cfg") : words.index("--cfg") + 2]
    name = Path(script).stem
    is_multirun = "-m" in words
    overrides = [word for word in words if word != "-m"]
    if is_multirun:
        assert name == "train", "a multirun is for src/train.py"
        overrides = [one for word in overrides for one in first_value(word)]
    elif name in ("train", "quickstart"):
        assert not any("sweeps=" in word for word in overrides), "a sweep needs -m"
    compose("train" if name == "quickstart" else name, *overrides)


def first_value(word: str) -> list[str]:
    """Of an override with several values the first."""
    override = OverridesParser.create().parse_override(word)
    if not override.is_sweep_override():
        return [word]
    return [f"{override.get_key_element()}={next(override.sweep_string_iterator())}"]


@functools.cache
def compose(name: str, *overrides: str) -> None:
    config = cli.compose(*overrides, config_name=name)
    validate(config)


@pytest.mark.parametrize(("page", "command"), commands())
def test_a_command_of_a_page_is_one_of_the_program(page, command):
    check(command)


def test_every_point_of_the_papers_sweep_is_a_command():
    for point in OmegaConf.load(ROOT / "sweeps" / "paper.yaml").hydra.sweeper.points:
        compose("train", *(one for word in point for one in first_value(word)))


def test_pages_have_commands_of_every_program():
    """What is collected is not empty, whatever becomes of the pages' form."""
    shown = " ".join(command for _, command in commands())
    for script in (ROOT / "src").glob("*.py"):
        assert f"src/{script.name}" in shown or script.stem in ("quickstart",), script


@pytest.mark.parametrize(
    "wrong",
    [
        "python src/calibrate.py run=runs/a",
        "python src/train.py +experiment=digits gate.rate=0.5",
        "python src/train.py +experiment=gone",
        "python src/train.py objective.tau_target=2",
        "python src/train.py +sweeps=quick",
        "python src/train.py -m +sweeps=gone",
        "python src/export.py run=runs/a folder=b",
        "python src/exits.py budgets=[0.7]",
        "python src/exits.py run=runs/a budgets=[]",
        "make calibrate RUN=runs/a",
        "make exits RUN=runs/a ARGS='budget=0.7'",
        "make exits",
        "make train EXPERIMNT=balanced",
    ],
)
def test_a_wrong_command_is_found(wrong):
    with pytest.raises(Exception):  # noqa: B017, PT011  Hydra's, ours or an assertion's
        check(wrong)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "results" / "README.md"], ids=lambda page: page.stem)
def test_links_lead_to_files_and_lines_fit(page):
    text = page.read_text()
    links = [inline or below for inline, below in LINK.findall(text)]
    gone = [link for link in links if "://" not in link and not (page.parent / link.partition("#")[0]).exists()]
    assert not gone
    assert [line for line in text.splitlines() if len(line) > LONGEST_LINE] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "what-was-tried"], ids=lambda page: page.stem)
def test_files_and_choices_that_a_page_names_are_there(page):
    """docs/what-was-tried.md names what an earlier commit had."""
    text = page.read_text()
    named = [path for path in FILE.findall(text) if Path(path).stem not in MADE_UP]
    assert [path for path in named if not (ROOT / path).exists()] == []
    named = set(CHOICE.findall(text)) - {("sweeps", name) for name in MADE_UP}
    assert [one for one in named if not (ROOT / "conf" / one[0] / f"{one[1]}.yaml").exists()] == []


def drawn_imports() -> set[tuple[str, str]]:
    """The arrows of the picture, each from a room to one that imports it."""
    picture = (ROOT / "docs" / "architecture.md").read_text().partition("```mermaid")[2].partition("```")[0]
    chains = [line.split(" --> ") for line in picture.splitlines() if "-->" in line]
    return {(one.strip(), other.strip()) for chain in chains for one, other in itertools.pairwise(chain)}


def imports() -> set[tuple[str, str]]:
    """Which room is imported by which, without what follows from others."""
    graph, edges = grimp.build_graph("cosinegate", cache_dir=None), set()
    for module in graph.modules - {"cosinegate"}:
        for imported in graph.find_modules_directly_imported_by(module) - {"cosinegate"}:
            edges.add((imported.split(".")[1], module.split(".")[1]))
    edges = {(room, by) for room, by in edges if room != by}
    beyond = {room: {by for one, by in edges if one == room} for room, _ in edges}

    def follows(room: str, by: str) -> bool:
        """Whether another way leads from the room to the one that imports it."""
        left, seen = [other for other in beyond[room] if other != by], set()
        while left:
            seen.add(other := left.pop())
            left += beyond.get(other, set()) - seen
        return by in seen

    return {edge for edge in edges if not follows(*edge)}


def test_the_picture_of_the_imports_is_true():
    assert drawn_imports() == imports()


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= MOST_LINES
