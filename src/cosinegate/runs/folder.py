"""The folder of a run: where it may be, and whether its content belongs to this run."""

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from cosinegate.config.identity import LATEST, NOT_IDENTITY, SWEEPS, identity, leaves, primitives
from cosinegate.runs.files import is_part, refuse_dangling_links, remove_parts
from cosinegate.runs.lock import LOCK
from cosinegate.runs.record import Record, read_record
from cosinegate.runs.untrusted import parse_yaml, read_text
from cosinegate.terminal.errors import UserError
from cosinegate.terminal.secrets import masked

FILES = ("record.json", "config.yaml", "metrics.csv", "traceback.txt", "not_finite.pt")
RUN = re.compile(r"[0-9a-f]{10}-s\d+")  # how run_folder names one
CHECKPOINTS = ("last.ckpt", "best.ckpt")


def own_record(folder: Path, config: DictConfig, facts: dict[str, Any]) -> Record | None:
    """Returns the record of this run, or None before its first start. Raises UserError for any other folder."""
    _refuse_shared(folder, Path(config.runs_dir))
    record = read_record(folder)
    if record is None:
        _refuse_foreign_files(folder)
    elif (record.identity, record.seed) != (facts["identity"], facts["seed"]):
        raise UserError(f"run_dir = {folder}: {_another_run(folder, config, record)}")
    return record


def remove_scraps(folder: Path) -> None:
    """Removes what killed writes of this program left in a run's folder."""
    remove_parts(folder, FILES)
    remove_parts(folder / "checkpoints", CHECKPOINTS)


def link_latest(folder: Path) -> None:
    """Makes `latest`, beside the run's folder, a link to it. Anything else of that name is left alone."""
    link = folder.parent / LATEST
    with contextlib.suppress(OSError):  # a file system without links
        if link.is_symlink() and RUN.fullmatch(os.readlink(link)):
            link.unlink()
        link.symlink_to(folder.name)


def run_stamp(config: DictConfig) -> dict[str, Any]:
    """Returns the identity and the seed that a checkpoint has of its run."""
    return {"identity": identity(config), "seed": config.seed}


def differences(theirs: dict[str, Any], config: DictConfig) -> dict[str, tuple[Any, Any]]:
    """Returns the keys, with both values, in which a stored config asks for another computation than `config`.

    Keys that only one of them has are ignored: versions differ in these.
    """
    ours, theirs = leaves(json.loads(masked(json.dumps(primitives(config))))), leaves(theirs)
    apart = [
        key for key in (*NOT_IDENTITY, "callbacks", "trunk", "weights") if key != "seed"
    ]  # paths may be spelt in two ways
    if ours["gate.kind"] == "none":
        apart += [key for key in ours if key.startswith(("gate.", "objective.")) and key != "gate.kind"]
    compared = [key for key in ours if not any(key == part or key.startswith(f"{part}.") for part in apart)]
    return {key: (theirs[key], ours[key]) for key in compared if key in theirs and theirs[key] != ours[key]}


def stored_config(folder: Path) -> dict[str, Any]:
    """Returns config.yaml as plain values; empty if there is none."""
    path = folder / "config.yaml"
    try:
        content = parse_yaml(read_text(path), path)
    except FileNotFoundError:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path} cannot be read: it is not a config")
    return content


def _refuse_shared(folder: Path, runs_dir: Path) -> None:
    """Raises UserError if a run's folder would hold other things: a home, the runs, another run."""
    refuse_dangling_links(folder)
    place = folder.resolve()
    home = None
    with contextlib.suppress(RuntimeError):  # nobody's
        home = Path.home().resolve()
    what = None
    if place == place.parent:
        what = "is the root of the disk"
    elif place == home:
        what = "is your home"
    elif Path.cwd().is_relative_to(place):
        what = "is the working folder, or holds it"
    elif runs_dir.resolve().is_relative_to(place):
        what = f"is where all runs lie (runs_dir = {runs_dir})"
    elif place.is_relative_to((runs_dir / SWEEPS).resolve()):
        what = "is for the files of sweeps"
    elif any(map(_is_run, place.parents)):
        what = "lies in the folder of another run"
    if what is not None:
        raise UserError(f"run_dir = {folder}: {what}; a run needs a folder of its own, as in run_dir=runs/mine")


def _is_run(folder: Path) -> bool:
    try:
        return read_record(folder) is not None
    except UserError:  # a file of that name that is no record of ours
        return False


def _refuse_foreign_files(folder: Path) -> None:
    """Raises UserError if a folder without a record holds more than a killed start leaves."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    if any(name in names for name in ("config.yaml", "metrics.csv", "checkpoints")):
        raise UserError(f"run_dir = {folder}: holds files of a run but no record.json; choose another folder")
    other = next((name for name in names if name not in (LOCK, "traceback.txt") and not is_part(name, FILES)), None)
    if other is not None:
        raise UserError(f"run_dir = {folder}: holds {other}, which is not of this run; choose an empty or a new folder")


def _another_run(folder: Path, config: DictConfig, record: Record) -> str:
    try:
        changed = differences(stored_config(folder), config)
    except UserError:
        changed = {}
    if list(changed) == ["trainer.max_epochs"]:
        theirs, ours = changed["trainer.max_epochs"]
        return (
            f"holds a run of another config: {theirs} epochs are another schedule than {ours}, hence another run; "
            f"leave run_dir out, or choose another folder; weights={folder} would begin with its weights"
        )
    if record.seed != config.seed:
        changed["seed"] = record.seed, config.seed
    words = next((f" ({key} = {theirs}, not {ours})" for key, (theirs, ours) in changed.items()), "")
    return f"holds a run of another config{words}; choose another folder"
