"""Runs an entry point under Hydra. A person's mistake prints one line on stderr and exits with code 2."""

import argparse
import dataclasses
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from cosinegate.config.checks import no_such_key, not_left_out, require_schema, schema_keys, validate
from cosinegate.config.commands import COMMANDS
from cosinegate.config.identity import SWEEPS
from cosinegate.runs.files import write_atomically
from cosinegate.terminal.errors import NotFinite, UserError
from cosinegate.terminal.escape import printable
from cosinegate.terminal.orphans import end_with
from cosinegate.terminal.secrets import masked
from cosinegate.terminal.signals import Stopped
from cosinegate.terminal.streams import lost_output, make_lossy

CONF = Path(__file__).parents[2] / "conf"
EXIT_MISTAKE = 2
# what lightning and OpenMP read as numbers, some of them while they are imported
RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "JSM_NAMESPACE_RANK")
RANKS += ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS")
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # of another process, as gloo says it
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def run(task: Callable[[DictConfig], Any], config_name: str) -> None:
    """Composes `conf/<config_name>.yaml` with the command line, checks the config, and calls the task with it."""
    started_by, composed = os.getpid(), False

    def guarded(config: DictConfig) -> Any:
        nonlocal composed
        composed = True
        return _run_task(task, config, config_name, started_by)

    check_surroundings()
    _refuse_sweeps(config_name)
    if config_name in COMMANDS and {"-h", "--help"} & set(sys.argv):
        print(explained(config_name))
        _end_where_output_was_lost(trained=False)
        return
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR", "0") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would print over many lines
    try:
        hydra.main(config_path=str(CONF), config_name=config_name, version_base="1.3")(guarded)()
    except (UserError, OSError) as error:
        end(error)
    except (HydraException, OmegaConfBaseException) as error:
        if wants_traceback:
            raise
        end(error)
    except (ValueError, TypeError) as error:
        if composed or wants_traceback or {"-m", "--multirun"} & set(sys.argv):
            raise
        end(UserError(str(error)))  # Hydra has no exception of its own for every override that it refuses
    except Stopped as stopped:
        _end_stopped(stopped)
    except KeyboardInterrupt:
        end_interrupted()
    except SystemExit as ended:
        if not ended.code:  # Hydra's own help
            _end_where_output_was_lost(trained=False)
        raise
    _end_where_output_was_lost(trained=config_name in ("train", "search"))


def _run_task(task: Callable[[DictConfig], Any], config: DictConfig, config_name: str, started_by: int) -> Any:
    """Checks the config before the task imports torch, and ends the program with one line for a person's mistake."""
    if os.getppid() == started_by:  # a worker of a parallel sweep
        end_with(started_by)
        make_lossy()
    sweeper_word = next((word for word in sys.argv if word.lstrip("+~").startswith("hydra.sweeper.")), None)
    if sweeper_word is not None and current_job() is None:
        end(UserError(f"{sweeper_word}: is for a multirun, and this would train one run; add -m"))
    try:
        require_schema(config)
        require_schema(HydraConfig.get(), "hydra.")
        validate(config)
        return task(config)
    except Stopped as stopped:
        if os.getpid() != started_by:  # a worker must not take up the next job
            os._exit(stopped.code)
        _end_stopped(stopped)
    except KeyboardInterrupt:
        end_interrupted()
    except Exception as error:
        if current_job() is not None and config_name == "train":  # the launcher keeps it and goes on
            raise UserError(why_it_ended(error, config)) from None
        if isinstance(error, UserError | OmegaConfBaseException | OSError):
            end(error)
        if _says_nothing() and isinstance(error, RuntimeError) and any(words in str(error) for words in LOST):
            sys.exit(1)  # the first process has ended and said why
        raise


def _refuse_sweeps(config_name: str) -> None:
    """Ends the program with one line if a command other than train is called with a multirun."""
    if "+sweeps=wandb" in sys.argv:
        end(UserError("+sweeps=wandb: that file is W&B's own; start it with: wandb sweep sweeps/wandb.yaml"))
    script = Path(sys.argv[0]).name
    if config_name != "train" and any(word.startswith("+sweeps=") for word in sys.argv):
        end(UserError(f"+sweeps: a sweep is for src/train.py, not for {script}"))
    if config_name != "train" and {"-m", "--multirun"} & set(sys.argv):
        end(UserError(f"-m: a multirun is for src/train.py, not for {script}; leave -m out"))


def _end_where_output_was_lost(trained: bool) -> None:
    """Prints one line, or fails, if stdout could not be written: a trained run has its folder, other output is lost."""
    words = lost_output()
    if words is not None and trained:
        print(f"what was printed could not be written ({words}); the run's folder has everything", file=sys.stderr)
    elif words is not None:
        end(UserError(f"what was printed could not be written: {words}"))


def check_surroundings() -> None:
    """Ends the program with one line if the command line or the environment would break what is imported later."""
    make_lossy()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal without our letters shows a question mark
    if not os.environ.get("COLUMNS", "1").isdecimal() or int(os.environ.get("COLUMNS", "1")) == 0:
        del os.environ["COLUMNS"]  # a terminal that does not know its width
    sys.argv[1:] = map(_with_home, sys.argv[1:])
    os.environ["MPLBACKEND"] = "Agg"  # figures go to files, whatever a notebook asked for
    argparse.ArgumentParser.error = lambda self, message: end(UserError(message))  # without the usage over many lines
    for word in sys.argv[1:]:
        try:
            word.encode()
        except UnicodeEncodeError:
            end(UserError(f"{word!a}: is not UTF-8"))
    try:
        os.getcwd()
    except FileNotFoundError:
        end(UserError("the working folder was removed: change to one that is there"))
    for name in (*RANKS, *THREADS):
        value, least = os.environ.get(name, "1"), 1 if name in THREADS else 0
        if not all(part.strip().isdecimal() and int(part) >= least for part in value.split(",")):
            end(UserError(f"{name} = {value} (environment): must be a whole number, at least {least}"))


def _with_home(word: str) -> str:
    """Expands ~ behind a key, where neither a shell nor Hydra does."""
    return re.sub(r"(?<=[=\[,\"'])~[\w.-]*(?=/)", lambda match: os.path.expanduser(match[0]), word)


def explained(config_name: str) -> str:
    """Returns every key of a command with its default and what it is for."""
    usage = (CONF / f"{config_name}.yaml").read_text().splitlines()[0]
    return "\n".join([usage, "", *map(_explained_key, dataclasses.fields(COMMANDS[config_name]))])


def _explained_key(key: dataclasses.Field) -> str:
    default = key.default_factory() if key.default is dataclasses.MISSING else key.default
    shown = default.name if isinstance(default, Enum) else json.dumps(default).replace('"', "")
    return f"{key.name}: {shown} # {key.metadata['about']}"


def current_job() -> str | None:
    """Returns the name of the job in a multirun, or None."""
    hydra_config = HydraConfig.get()
    return hydra_config.job.name if hydra_config.mode is RunMode.MULTIRUN else None


def why_it_ended(error: Exception, config: DictConfig) -> str:
    """Returns one line about what ended a job. A traceback that is no person's mistake goes to the run's folder."""
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
    """Returns the config that an entry point (src/train.py by default) would get with these overrides."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        config = hydra.compose(config_name, list(overrides))
    require_schema(config)
    return config


def end(error: Exception) -> NoReturn:
    """Ends the program with one line about a person's mistake."""
    if isinstance(error, NotFinite) and _says_nothing():  # all processes have it
        sys.exit(0)
    print(f"error: {masked(one_line(error))}", file=sys.stderr)
    sys.exit(EXIT_MISTAKE)


def end_interrupted() -> NoReturn:
    _end_stopped(Stopped(signal.SIGINT))


def _end_stopped(stopped: Stopped) -> NoReturn:
    if _says_nothing():
        sys.exit(0)
    print(f"stopped ({stopped.reason}): start the same command again to resume", file=sys.stderr)
    sys.exit(stopped.code)


def _says_nothing() -> bool:
    """Returns whether another process prints the line and has the exit code.

    Of several processes it is the first: lightning would kill it if another one exited with a code.
    """
    return int(os.environ.get("LOCAL_RANK", 0)) > 0


def one_line(error: BaseException) -> str:
    """Returns what went wrong in one line that names the key."""
    return printable(" ".join(_words(error).split()))


def _words(error: BaseException) -> str:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and not isinstance(
        error, HydraException
    ):  # the disk, a file that is a folder, a right that is missing
        where = ": ".join(str(name) for name in (error.filename2, error.filename) if name is not None)
        return f"{where or type(error).__name__}: {error.strerror or error}"
    if file := re.match(r"In '(.+)': \w+ raised while composing config", str(error)):  # a file sets what cannot be
        return f"{_words(error.__context__)}; conf/{file[1]}.yaml sets it"
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.full_key:
        return no_such_key(cause.full_key, schema_keys(cause.object_type))
    if isinstance(cause, OmegaConfBaseException):
        if cause.full_key and "does not support deletion" in str(cause):
            return not_left_out(cause.full_key)
        words = (
            str(cause.msg or cause).splitlines()[0].replace("is not a ListConfig, list or tuple", "is not a list [...]")
        )
        return ": ".join(filter(None, [cause.full_key, words]))
    if isinstance(error, OverrideParseException):
        why = str(error.__cause__ or error).split(" See ")[0].splitlines()[0]
        key, given, value = error.override.partition("=")
        if given and value and not set("[](){}'\"\n") & set(value):
            why = f"a value with such letters needs quotes of its own, as in '{key}=\"{value}\"'"
        return f"{error.override}: not Hydra's grammar, which is key=value: {why}"
    if unknown := re.search(r"unexpected keyword argument '(.+)'.*\sfull_key: (\S+)", str(error), re.DOTALL):
        return no_such_key(f"{unknown[2]}.{unknown[1]}", [])
    if gone := re.match(r"Could not delete from config. '(.+)' does not exist", str(error)):
        return f"~{gone[1]}: there is no such key, or it has no value"
    return str(error).split("Config search path:")[0].split("Search path:")[0]
