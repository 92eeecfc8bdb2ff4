"""Loggers: always metrics.csv in the run's folder; W&B on request, offline without an account."""

import contextlib
import functools
import http.client
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from cosinegate.runs.record import Row, read_metrics, write_metrics
from cosinegate.terminal.console import say
from cosinegate.terminal.errors import UserError

PATIENCE = 10  # seconds, for W&B's server to answer
WANDB_MODES = ("auto", "online", "offline", "disabled")


@functools.cache
def _unanswered(address: str) -> OSError | None:
    """Returns the error of asking W&B's server, once for each process: not every job of a sweep has to wait for it."""
    say(f"W&B: asking {address}")
    try:
        with urllib.request.urlopen(address, timeout=PATIENCE):
            return None
    except urllib.error.HTTPError:
        return None  # an answer
    except (OSError, http.client.HTTPException) as error:
        return error if isinstance(error, OSError) else OSError(type(error).__name__)


def require_answer(address: str) -> None:
    """Fails within seconds where wandb itself would retry silently for minutes."""
    error = _unanswered(address) if rank_zero_only.rank == 0 else None
    if error is not None:
        raise error


def _reason(error: Exception) -> str:
    return " ".join(str(getattr(error, "reason", None) or type(error).__name__).split())


@contextlib.contextmanager
def failing_quietly() -> Iterator[None]:
    """Prints one line if W&B fails, and lets the run go on."""
    try:
        yield
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        say(f"W&B failed ({words}): the run goes on without it")


class CarefulWandb(WandbLogger):
    """A W&B logger that goes offline if the server cannot be reached, and is dropped if it fails."""

    failed = False

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Runs the block; after a failure no other block is run."""
        ended_well = False
        with failing_quietly():
            yield
            ended_well = True
        self.failed = not ended_well

    @property
    def experiment(self) -> Any:
        if self.failed:
            return None
        if self._experiment is None and self._wandb_init.get("mode") == "online":
            try:
                require_answer(str(wandb_settings().base_url))
                return super().experiment
            except Exception as error:
                say(f"W&B cannot be reached ({_reason(error)}): the run is kept offline")
                self._wandb_init["mode"] = "offline"
                with contextlib.suppress(Exception):
                    sys.modules["wandb"].teardown()  # its service holds the run's id for the attempt that failed
        with self.trying():
            return super().experiment

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if not self.failed:
            with self.trying():
                super().log_metrics(metrics, step)

    def log_hyperparams(self, params: Any) -> None:
        if not self.failed:
            with self.trying():
                super().log_hyperparams(params)

    def finalize(self, status: str) -> None:
        if not self.failed:
            with self.trying():
                super().finalize(status)


class MetricsCSV(Logger):
    """A logger with one row for each epoch, from 1. A resumed run replaces the rows that it computes again."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.rows: dict[int, Row] = {}
        self.pending: Row = {}  # logged before lightning says which epoch it is
        self.changed = False

    def read(self) -> None:
        """Reads the rows of a run that resumes."""
        self.rows = read_metrics(self.folder)

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the config has its own file."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        kept = {name: value for name, value in metrics.items() if name != "epoch" and not name.startswith("test/")}
        if not kept:
            return
        self.pending |= kept
        if "epoch" in metrics:
            self.rows.setdefault(int(metrics["epoch"]) + 1, {}).update(self.pending)
            self.pending = {}
            self.changed = True

    def finalize(self, status: str) -> None:
        with contextlib.suppress(OSError):  # of a disk that is full, the first error says so
            self.save()

    @rank_zero_only
    def save(self) -> None:
        if self.changed:
            write_metrics(self.folder, self.rows)
            self.changed = False


def wandb_logger(
    mode: str, run_dir: str, project: str, group: str, tags: list[str], sweep: str | None, **kwargs: Any
) -> WandbLogger:
    """Returns a W&B logger; `mode: auto` is online with an account and offline without one. A resumed run keeps its id.

    The jobs of a sweep are a group with its name.
    """
    if mode not in WANDB_MODES:
        raise UserError(f"logger.wandb.mode = {mode}: must be one of {', '.join(WANDB_MODES)}")
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or ("online" if has_account() else "offline")
        if mode not in WANDB_MODES[1:]:
            raise UserError(f"WANDB_MODE = {mode} (environment): must be one of {', '.join(WANDB_MODES[1:])}")
    wandb_settings()
    folder = Path(run_dir)
    run_id = f"{folder.parent.name}-{folder.name}"
    os.environ["WANDB_DATA_DIR"] = str(folder / "wandb" / "data")  # a table's images: beside the run, not in the home
    if "WANDB_SWEEP_ID" not in os.environ:  # an agent of a W&B sweep has its own
        kwargs |= {"id": run_id, "project": project}
    words = [tag.name if isinstance(tag, Enum) else tag for tag in tags]  # an interpolated choice is no word yet
    if "WANDB_INIT_TIMEOUT" not in os.environ:
        kwargs.setdefault("settings", {"init_timeout": 3 * PATIENCE})
    kwargs |= {"group": sweep or group, "tags": list(dict.fromkeys([*words, *([sweep] if sweep else [])]))}
    return CarefulWandb(name=run_id, save_dir=run_dir, mode=mode, resume="allow", **kwargs)


def has_account() -> bool:
    """Returns whether W&B has a key on this machine."""
    from wandb.sdk.lib import wbauth

    return bool(os.environ.get("WANDB_API_KEY") or wbauth.read_netrc_auth(host=str(wandb_settings().base_url)))


def wandb_settings() -> Any:
    """Returns W&B's settings, the environment's included. Raises UserError for a bad one, before the run."""
    import wandb

    settings = wandb.Settings()
    try:
        settings.update_from_env_vars(os.environ)
    except ValueError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise UserError(f"W&B's settings (WANDB_... of the environment): {' '.join(lines[1:3])}") from error
    return settings
