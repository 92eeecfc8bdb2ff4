"""Starts the project's command lines as processes forked from one that has imported what they import.

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
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
ADDRESS = "COSINEGATE_WARM_PROCESS"
# not onnxruntime: a process forked from one that has it does not end
ROOMS = ["train", "sweeps.search", "sweeps.jobs", "evaluate", "analysis.pareto", "analysis.peers", "report.page"]
ROOMS = [*(f"cosinegate.{room}" for room in ROOMS), "sklearn.datasets", "wandb.sdk.launch"]  # wandb.init imports that


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
        if output is not None:
            os.dup2(os.open(output, os.O_WRONLY), writing)
        streams = [writing, writing if merged else self._errors.fileno(), telling]
        request = {"command": command, "cwd": str(cwd), "environment": environment, "closed": closed}
        with _connected() as server:
            socket.send_fds(server, [json.dumps(request).encode()], streams)
        os.close(writing)
        os.close(telling)
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


def _connected() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect("\0" + os.environ[ADDRESS])
    return connection


def _next_command(listening: socket.socket, ends: int) -> list[str]:
    """Returns in a process forked for a command, with its streams, folder and environment; ends with the test run."""
    gc.freeze()
    while True:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
        if ends in select.select([listening, ends], [], [])[0]:
            listening.close()
            sys.exit()
        with listening.accept()[0] as connection:
            message, (*streams, telling), *_ = socket.recv_fds(connection, 1 << 18, 3)
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
    for place, fd in enumerate(streams, start=1):
        os.dup2(fd, place)
    for fd in set(streams):
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    request = json.loads(message)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    encoding = os.environ.get("PYTHONIOENCODING")
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

    for room in ROOMS:
        importlib.import_module(room)
    draw_no_curves()
    _compose_once()
    cli.compose("+experiment=digits")  # Hydra has found its plugins then, and its grammar has its tables
    media = importlib.import_module("wandb.sdk.data_types._private").MEDIA_TMP
    media.cleanup()
    script, *arguments = _next_command(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    if any("wandb" in word for word in arguments):
        media.__init__("wandb-media")  # a folder that wandb makes when it is imported, and removes when a process ends
    if script == "-m":
        script, *arguments = arguments
        sys.argv = [script, *arguments]
        _end_with(lambda: runpy.run_module(script, run_name="__main__", alter_sys=True))
    else:
        sys.argv = [script, *arguments]
        _end_with(lambda: runpy.run_path(script, run_name="__main__"))


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
    _serve()
