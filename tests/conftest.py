"""Tests train on the embedded digits. A test process has one torch thread; xdist spreads the tests over the cores."""

import functools
import gc
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from warm import Started, draw_no_curves, serve_commands, worker_command
from xdist.scheduler import LoadScopeScheduling

import cosinegate  # noqa: F401 (mends torchvision, whoever imports it first)

if TYPE_CHECKING:  # the process that starts the workers does without
    import torch
    from omegaconf import DictConfig

ROOT = Path(__file__).parents[1]
NO_NETWORK = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "PATH": "/nonexistent"}

GROUPS = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir()}


def config(*overrides: str, config_name: str = "train") -> "DictConfig":
    """The config that a command line with these overrides would give.

    What they choose of conf/ is composed once. As Hydra does it, values are set in what was composed.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from cosinegate.config.checks import require_schema

    values = [word for word in overrides if word.lstrip("+~").partition("=")[0] not in GROUPS]
    chosen = _composed(tuple(word for word in overrides if word not in values), config_name).copy()
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(values), chosen)
    require_schema(chosen)
    return chosen


@functools.cache
def _composed(choices: tuple[str, ...], config_name: str) -> "DictConfig":
    from cosinegate import cli

    return cli.compose(*choices, config_name=config_name)


# begun first, so that no worker ends long after the others
LONGEST = ["deploy_commands", "exits", "processors", "launchers", "ranges", "onnx", "compile", "report", "wandb"]
LONGEST += ["processes", "gates", "train", "resume", "search", "faults", "fault_commands", "experiments", "peers"]
LONGEST += ["pareto", "sweeps", "run_folder"]

# what computes: a processor's way to add must not show (make test-processors)
NUMERIC = ["compile", "deploy", "deploy_commands", "evaluate", "exits", "experiments", "flops", "gate_equations"]
NUMERIC += ["gates", "geometry", "losses", "network", "objective", "onnx", "processes", "relaxation", "resume"]
NUMERIC += ["properties", "routes", "runtime", "torchvision"]

THREADS = int(os.environ.get("TEST_THREADS", "1"))


def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    serve_commands()
    for spec in specs:
        spec.python = worker_command()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem.removeprefix("test_") in NUMERIC:
            item.add_marker(pytest.mark.numeric)
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    draw_no_curves()
    gc.freeze()  # what was imported stays: looking through it again and again takes a tenth of the time


@pytest.hookimpl(tryfirst=True)
def pytest_warning_recorded(warning_message: warnings.WarningMessage) -> None:
    """The process that starts the workers would import lightning for a warning of lightning's own kind."""
    known = next(kind for kind in warning_message.category.__mro__ if kind.__module__ == "builtins")
    warning_message.category, warning_message.message = known, known(str(warning_message.message))


class SharedFixtures(LoadScopeScheduling):
    """Tests of a file whose fixtures are made once stay on one worker, a parameter of such a fixture each. Others
    go wherever there is time. (xdist's own groups do nothing beside pytest 9.2.)
    """

    def _split_scope(self, nodeid: str) -> str:
        path, _, name = nodeid.partition("::")
        text = (ROOT / path).read_text()
        if 'scope="module", params=' in text:
            return f"{path}[{name.partition('[')[2].partition('-')[0]}"
        return path if 'scope="module"' in text else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharedFixtures:
    return SharedFixtures(config, log)


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


def started(
    *command: str,
    cwd: Path = ROOT,
    merged: bool = False,
    output: str | None = None,
    closed: tuple[int, ...] = (),
    **environment: str,
) -> Started:
    """Such a command while it runs; `merged` writes its errors where its output goes.

    `output` is another file for its output, and `closed` are streams that it starts without.
    """
    return Started(list(command), cwd, _environment(environment), merged, output, closed)


def _environment(own: dict[str, str]) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    return inherited | {"OMP_NUM_THREADS": f"{THREADS}", "NETRC": "/nonexistent", "PYTHONWARNINGS": "default"} | own


def assert_one_line(done: subprocess.CompletedProcess, *fragments: str) -> None:
    """A person's mistake: one line that says what is wrong, a non-zero code, no traceback."""
    lines = done.stderr.strip().splitlines()
    assert done.returncode != 0, done.stdout
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert "Traceback" not in done.stdout + done.stderr
    for fragment in fragments:
        assert fragment in lines[0]


@pytest.fixture(autouse=True)
def own_threads() -> None:
    """A command that an earlier test ran in this process may have set another number."""
    import torch

    torch.set_num_threads(THREADS)


@pytest.fixture
def rng() -> "torch.Generator":
    import torch

    return torch.Generator().manual_seed(7)


@pytest.fixture
def disk(tmp_path):
    """A file system of 4 MiB of its own, gone with what was mounted in it."""
    mounted = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path]
    if os.getuid() != 0 or subprocess.run(mounted, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs to mount a file system")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.fixture
def in_double(monkeypatch) -> str:
    """The override that trains in double precision, here from the first draw on, so that every processor has the same
    figures: float32 weights and pixels differ in their last digit, and steps at a rate of 0.1 magnify it.
    """
    import torch

    from cosinegate import train
    from cosinegate.data.loader import Normalisation

    build = train.build_module

    def build_in_double(config):
        torch.set_default_dtype(torch.float64)
        try:
            return build(config)
        finally:
            torch.set_default_dtype(torch.float32)

    def normalise(self, pixels: "torch.Tensor") -> "torch.Tensor":
        return (pixels.double() * self.scale + self.shift).permute(0, 3, 1, 2)

    monkeypatch.setattr(train, "build_module", build_in_double)
    monkeypatch.setattr(Normalisation, "__call__", normalise)
    return "trainer.precision=64-true"
