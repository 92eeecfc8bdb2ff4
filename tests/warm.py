"""Starts the project's command lines, and the workers of a test run, as processes forked from one that is warm: it has
imported what they import, and has trained a few steps.

A process of its own, with its own arguments, environment, streams, signals and exit code, in tenths of a second instead
of the eight that the imports take. What imports themselves do is tested by the commands that are started afresh; those
draw their curves too, which takes as long as the rest of a short run. All workers of a test run share one such process.
A command ends without the tear-down of all that was imported, which takes longer than most commands: its exit functions
have run, its streams are flushed, its code is its own.
"""

import atexit
import contextlib
import gc
import importlib
import json
import logging
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig

ROOT = Path(__file__).parents[1]
ADDRESS = "COSINEGATE_WARM_PROCESS"
# not onnxruntime: a process forked from one that has it does not end
ROOMS = ["train", "sweeps.search", "sweeps.jobs", "evaluate", "analysis.pareto", "analysis.peers", "report.page"]
ROOMS += ["report.dashboard"]
ROOMS = [*(f"cosinegate.{room}" for room in ROOMS), "sklearn.datasets", "wandb.sdk.launch"]  # wandb.init imports that
ROOMS += ["playwright.sync_api", "timm"]  # of tests


class Started:
    """A command that was started; as far as tests need it, what subprocess.Popen is."""

    def __init__(
        self,
        command: list[str],
        cwd: Path,
        environment: dict[str, str],
        merged: bool,
        output: str | None = None,
        closed: tuple[int, ...] = (),
    ) -> None:
        self.returncode: int | None = None
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 closed with the object
        reading, writing = os.pipe()
        told, telling = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        if output is not None:
            os.dup2(os.open(output, os.O_WRONLY), writing)
        errors = writing if merged else self._errors.fileno()
        _ask(command, cwd, environment, closed, [nothing, writing, errors, telling])
        for fd in (nothing, writing, telling):
            os.close(fd)
        self.stdout: IO[str] = open(reading)  # noqa: SIM115
        self._told = open(told)  # noqa: SIM115
        self.pid = int(self._told.readline())

    def poll(self) -> int | None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 0)
            return self.returncode
        return self.wait()

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self._told.readline())
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        written = self.stdout.read()
        self.wait()
        return written, self.errors()

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def serve_commands() -> None:
    """Starts the warm process, for this process and those it starts; it ends when this one does."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(address := f"\0cosinegate-tests-{os.getpid()}")  # an abstract address: no file is left behind
    listening.listen(64)
    ends, kept = os.pipe()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    command = [sys.executable, __file__, str(listening.fileno()), str(ends)]
    subprocess.Popen(command, pass_fds=[listening.fileno(), ends], env=environment, stdin=subprocess.DEVNULL)
    listening.close()
    os.close(ends)
    os.set_inheritable(kept, False)
    os.environ[ADDRESS] = address[1:]


def worker_command() -> str:
    """The interpreter of a worker, as xdist takes it."""
    return shlex.join([sys.executable, __file__])


def _stand_in(program: str) -> None:
    """Has a worker forked, which takes this process's streams, and ends as it does."""
    told, telling = os.pipe()
    _ask(["-c", program], Path.cwd(), dict(os.environ), (), [0, 1, 2, telling])
    for fd in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    os.close(telling)
    with open(told) as lines:
        *_, code = lines
    sys.exit(int(code))


def _ask(command: list[str], cwd: Path, environment: dict[str, str], closed: tuple[int, ...], fds: list[int]) -> None:
    """Has it forked, with these as stdin, stdout, stderr and where its process id and its exit code are written."""
    if ADDRESS not in os.environ:  # no process before this one needed it
        serve_commands()
    request = {"command": command, "cwd": str(cwd), "environment": environment, "closed": closed}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect("\0" + os.environ[ADDRESS])
        socket.send_fds(server, [json.dumps(request).encode()], fds)


def _next_command(listening: socket.socket, ends: int) -> list[str]:
    """Returns in a process forked for a command, with its streams, folder and environment; ends with the test run."""
    gc.freeze()
    while True:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
        if ends in select.select([listening, ends], [], [])[0]:
            listening.close()
            sys.exit()
        with listening.accept()[0] as connection:
            message, (*streams, telling), *_ = socket.recv_fds(connection, 1 << 18, 4)
        if os.fork() == 0:
            break
        for fd in (*streams, telling):
            os.close(fd)
    listening.close()
    os.close(ends)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child > 0:  # keeps the command company and tells how it ended
        for fd in streams:
            os.close(fd)
        os.write(telling, f"{child}\n".encode())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            os.write(telling, f"{code}\n".encode())
        os._exit(0)
    os.close(telling)
    for place, fd in enumerate(streams):
        os.dup2(fd, place)
    for fd in set(streams):
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    request = json.loads(message)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    encoding = os.environ.get("PYTHONIOENCODING")
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115 as Python opens them itself
    sys.stderr = open(2, "w", buffering=1, encoding=encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115
    for fd in request["closed"]:
        os.close(fd)
        setattr(sys, {1: "stdout", 2: "stderr"}[fd], None)  # as Python has it then
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    return request["command"]


def draw_no_curves() -> None:
    """Of runs in this process, until it ends."""
    importlib.import_module("cosinegate.callbacks.figures").draw_curves = lambda *what: None


def _serve() -> None:
    sys.path[0] = str(ROOT / "src")
    from cosinegate import cli  # before what it makes safe to import

    show, warnings.showwarning = warnings.showwarning, lambda *what, **more: None
    for room in ROOMS:
        importlib.import_module(room)
    warnings.showwarning = show
    draw_no_curves()
    _compose_once()
    with _silently():
        _train_once(cli.compose("+experiment=digits"))  # Hydra has found its plugins, its grammar has its tables
        _export_once()
    media = importlib.import_module("wandb.sdk.data_types._private").MEDIA_TMP
    media.cleanup()
    script, *arguments = _next_command(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    if script == "-c" or any("wandb" in word for word in arguments):
        media.__init__("wandb-media")  # a folder that wandb makes when it is imported, and removes when a process ends
    if script == "-c":
        sys.argv = [script]
        sys.warnoptions.clear()  # pytest has its own, as long as nobody asked for others
        warnings.simplefilter("ignore", ResourceWarning)
        _end_with(lambda: exec(arguments[0], {"__name__": "__main__"}))
    elif script == "-m":
        script, *arguments = arguments
        sys.argv = [script, *arguments]
        _end_with(lambda: runpy.run_module(script, run_name="__main__", alter_sys=True))
    else:
        sys.argv = [script, *arguments]
        _end_with(lambda: runpy.run_path(script, run_name="__main__"))


@contextlib.contextmanager
def _silently() -> Iterator[None]:
    """Leaves no word and no setting behind."""
    import torch

    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels, said = [logger.level for logger in loggers], os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with warnings.catch_warnings(action="ignore"):
        yield
    os.dup2(said, 1)
    os.close(said)
    torch.use_deterministic_algorithms(False)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def _train_once(config: "DictConfig") -> None:
    """What PyTorch and lightning prepare in a process's first run is there then."""
    from cosinegate.train import train

    with tempfile.TemporaryDirectory() as folder:
        config.runs_dir, config.trainer.max_epochs, config.trainer.limit_train_batches = folder, 1, 1
        train(config)


def _export_once() -> None:
    """What the exporter imports and looks up is there then."""
    import torch

    layer, images = torch.nn.Conv2d(1, 1, 1).eval(), torch.zeros(3, 1, 8, 8)
    batch = torch.export.Dim("batch", min=1)
    torch.onnx.export(layer, (images,), dynamo=True, dynamic_shapes=({0: batch},), verbose=False)


def _compose_once() -> None:
    """Hydra composes a command's whole config one more time, for nothing but hydra.mode."""
    from hydra._internal.hydra import Hydra

    by_composing = Hydra.get_mode

    def get_mode(self: Hydra, config_name: str, overrides: list[str]) -> object:
        is_asked_for = any("hydra.mode" in word for word in overrides)
        return by_composing(self, config_name, overrides) if is_asked_for else None

    Hydra.get_mode = get_mode


def _end_with(command: Callable[[], object]) -> None:
    """Ends the process when the command does; one that raises ends as Python ends it."""
    code = 0
    try:
        command()
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        code = ended.code or 0
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    _stand_in(sys.argv[-1]) if "-c" in sys.argv else _serve()
