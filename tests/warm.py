"""Starts the project's command lines as processes forked from one that has imported what they import.

A process of its own, with its own arguments, environment, streams, signals and exit code, in tenths of a second instead
of the eight that the imports take. What imports themselves do is tested by the commands that are started afresh; those
draw their curves too, which takes as long as the rest of a short run.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
# not onnxruntime: a process forked from one that has it does not end
ROOMS = ["run", "search", "sweep", "evaluate", "analysis.pareto", "report.page", "report.content"]


class Started:
    """A command that was started; as far as tests need it, what subprocess.Popen is."""

    def __init__(self, command: list[str], cwd: Path, environment: dict[str, str], merged: bool) -> None:
        self.returncode: int | None = None
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 closed with the object
        reading, writing = os.pipe()
        told, telling = os.pipe()
        streams = [writing, writing if merged else self._errors.fileno(), telling]
        request = json.dumps({"command": command, "cwd": str(cwd), "environment": environment}).encode()
        socket.send_fds(_server(), [request], streams)
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


_socket: socket.socket | None = None


def _server() -> socket.socket:
    """The warm process of this test process; it ends when this one does."""
    global _socket
    if _socket is None:
        _socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
        command = [sys.executable, __file__, str(theirs.fileno())]
        subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
        theirs.close()
    return _socket


def _next_command(requests: socket.socket) -> list[str]:
    """Returns in a process forked for a command, with its streams, folder and environment; ends when nobody asks."""
    gc.freeze()
    while True:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
        message, (*streams, telling), *_ = socket.recv_fds(requests, 1 << 18, 3) if _more(requests) else sys.exit()
        if os.fork() == 0:
            break
        for fd in (*streams, telling):
            os.close(fd)
    requests.close()
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
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    return request["command"]


def _more(requests: socket.socket) -> bool:
    return bool(requests.recv(1, socket.MSG_PEEK))


def draw_no_curves() -> None:
    """Of runs in this process, until it ends."""
    importlib.import_module("cosinegate.callbacks.figures").draw_curves = lambda *what: None


def _serve() -> None:
    sys.path[0] = str(ROOT / "src")
    import cosinegate.config  # noqa: F401  before what it makes safe to import

    for room in ROOMS:
        importlib.import_module(f"cosinegate.{room}")
    draw_no_curves()
    script, *arguments = _next_command(socket.socket(fileno=int(sys.argv[1])))
    if script == "-m":
        script, *arguments = arguments
        sys.argv = [script, *arguments]
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _serve()
