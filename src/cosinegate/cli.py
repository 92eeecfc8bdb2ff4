"""Runs an entry point under Hydra. A person's mistake ends as one line on stderr, with exit code 2."""

import dataclasses
import difflib
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

import cosinegate.commands  # noqa: F401  the schemas that conf/ names
from cosinegate.config import SWEEPS
from cosinegate.errors import UserError
from cosinegate.files import write_atomically
from cosinegate.orphans import end_with

CONF = Path(__file__).parents[2] / "conf"
PLAIN = (
    "benchmark",
    "calibrate",
    "dashboard",
    "evaluate",
    "export",
    "pareto",
    "report",
    "table",
)  # commands without groups
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130


def run(task: Callable[[DictConfig], Any], config_name: str) -> None:
    """Composes `conf/<config_name>.yaml` with the command line and hands it to the task."""

    started_by = os.getpid()

    def guarded(config: DictConfig) -> Any:
        if os.getppid() == started_by:  # a worker of a parallel sweep
            end_with(started_by)
        try:
            return task(config)
        except KeyboardInterrupt:
            _end_interrupted()
        except Exception as error:
            if current_job() is not None and config_name == "train":  # the launcher keeps it and goes on
                raise UserError(why_it_ended(error, config)) from None
            if isinstance(error, UserError | OmegaConfBaseException):
                _end(error)
            raise

    if "+sweeps=wandb" in sys.argv:
        _end(UserError("+sweeps=wandb: that file is W&B's own; start it with: wandb sweep sweeps/wandb.yaml"))
    if config_name != "train" and any(word.startswith("+sweeps=") for word in sys.argv):
        _end(UserError(f"+sweeps: a sweep is for src/train.py, not for {Path(sys.argv[0]).name}"))
    if config_name in PLAIN and {"-h", "--help"} & set(sys.argv):
        print(explained(config_name))
        return
    asked_for_traceback = os.environ.get("HYDRA_FULL_ERROR", "0") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would print over many lines
    try:
        hydra.main(config_path=str(CONF), config_name=config_name, version_base="1.3")(guarded)()
    except UserError as error:
        _end(error)
    except (HydraException, OmegaConfBaseException) as error:
        if asked_for_traceback:
            raise
        _end(error)
    except KeyboardInterrupt:
        _end_interrupted()


def explained(config_name: str) -> str:
    """Every key of a command with its value and what it is for, as its file in conf/ tells it."""
    text = (CONF / f"{config_name}.yaml").read_text().partition("\nhydra:")[0]
    return re.sub(r"defaults:\n(  - .*\n)+\n", "\n", text).strip()


def current_job() -> str | None:
    """Which job of a multirun this is, in words; None outside of one."""
    hydra_config = HydraConfig.get()
    return hydra_config.job.name if hydra_config.mode is RunMode.MULTIRUN else None


def why_it_ended(error: Exception, config: DictConfig) -> str:
    """One line of what ended a job. Of what no person did wrong the run's folder keeps the rest."""
    if isinstance(error, UserError | HydraException | OmegaConfBaseException):
        return one_line(error)
    words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if "runs_dir" not in config:
        return words
    if config.run_dir is not None and Path(config.run_dir).is_dir():
        path = Path(config.run_dir) / "traceback.txt"
    else:  # it did not come to have a folder
        path = Path(config.runs_dir) / SWEEPS / "traceback.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(traceback.format_exception(error)))
    return f"{words} (more in {path})"


def compose(*overrides: str, config_name: str = "train") -> DictConfig:
    """The config that an entry point, `src/train.py` if not another, would get with these overrides."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose(config_name, list(overrides))


def _end(error: Exception) -> NoReturn:
    print(f"error: {one_line(error)}", file=sys.stderr)
    sys.exit(EXIT_MISTAKE)


def _end_interrupted() -> NoReturn:
    print("interrupted: start the same command again to go on", file=sys.stderr)
    sys.exit(EXIT_INTERRUPTED)


def one_line(error: BaseException) -> str:
    """What went wrong, with the key, without the advice that a closed schema makes wrong."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.full_key:
        parent, _, key = cause.full_key.rpartition(".")
        known = _keys(cause.object_type)
        near = difflib.get_close_matches(key, known, n=1)
        hint = f", did you mean {near[0]}?" if near else ""
        where = f"{parent} has" if parent else "there are"
        return f"{cause.full_key}: no such key{hint}" + (f" ({where} {', '.join(known)})" if known else "")
    if isinstance(cause, OmegaConfBaseException):
        words = (
            str(cause.msg or cause).splitlines()[0].replace("is not a ListConfig, list or tuple", "is not a list [...]")
        )
        return ": ".join(filter(None, [cause.full_key, words]))
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override}: not Hydra's grammar: {str(error.__cause__ or error).split(' See ')[0].splitlines()[0]}"
        )
    text = str(error).split("Config search path:")[0].split("Search path:")[0]
    return " ".join(text.split())


def _keys(schema: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(schema)] if dataclasses.is_dataclass(schema) else []
