"""Tests train on the embedded digits. A test process has one torch thread; xdist spreads the tests over the cores."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from warm import Started, draw_no_curves

import cosinegate.config  # noqa: F401 (registers the schema)
from cosinegate import cli

ROOT = Path(__file__).parents[1]
NO_NETWORK = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "PATH": "/nonexistent"}

config = cli.compose  # the config that a command line with these overrides would give

# begun first, so that no process of the suite ends long after the others
LONGEST = ["deploy_commands", "launchers", "gates", "resume", "onnx", "processes", "train", "bad_input", "wandb"]
LONGEST += [
    "search",
    "peers",
    "predictive",
    "exits",
    "faults",
    "fault_commands",
    "experiments",
    "sweeps",
    "safe_loading",
]

torch.set_num_threads(1)
draw_no_curves()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    gc.freeze()  # what was imported stays: looking through it again and again takes a tenth of the time


def process(*command: str, cwd: Path = ROOT, afresh: bool = False, **environment: str) -> subprocess.CompletedProcess:
    """A real command line of the project, as a user would type it after activating .venv.

    Forked from a process that has imported what commands import; `afresh` starts Python itself.
    """
    if afresh:
        environment = _environment(environment)
        command = [sys.executable, *command]
        return subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
        )
    running = started(*command, cwd=cwd, **environment)
    written, errors = running.communicate()
    return subprocess.CompletedProcess(list(command), running.returncode, written, errors)


def started(*command: str, cwd: Path = ROOT, merged: bool = False, **environment: str) -> Started:
    """Such a command while it runs; `merged` writes its errors where its output goes."""
    return Started(list(command), cwd, _environment(environment), merged)


def _environment(own: dict[str, str]) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    return inherited | {"OMP_NUM_THREADS": "1", "NETRC": "/nonexistent", "PYTHONWARNINGS": "default"} | own


def assert_one_line(done: subprocess.CompletedProcess, *fragments: str) -> None:
    """A person's mistake: one line that says what is wrong, a non-zero code, no traceback."""
    lines = done.stderr.strip().splitlines()
    assert done.returncode != 0, done.stdout
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert "Traceback" not in done.stdout + done.stderr
    for fragment in fragments:
        assert fragment in lines[0]


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.fixture
def disk(tmp_path):
    """A file system of 4 MiB of its own, gone with what was mounted in it."""
    mounted = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path]
    if os.getuid() != 0 or subprocess.run(mounted, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs to mount a file system")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)
