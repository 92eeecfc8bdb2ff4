"""Which program, by its commit and packages, trained which epochs of a run."""

from typing import Any

PROGRAM = ("git_commit", "git_changed", "versions")
Span = dict[str, Any]  # "epochs": the first and the last, counted from 1; and the program


def spans(
    before: dict[str, Any] | None, epochs: int, inside: bool, planned: int, program: dict[str, Any]
) -> list[Span]:
    """The programs of a run that goes on after so many `epochs`, `inside` the next one or at its beginning.

    `before` is the run's record. This program is the last, unless nothing is left to train.
    """
    reached, own = epochs + inside, {key: program[key] for key in PROGRAM}
    found: list[Span] = []
    if before is not None and reached > 0:
        alone = {"epochs": [1, reached]} | {key: before.get(key) for key in PROGRAM}  # as earlier versions recorded
        found = [span for span in before.get("trained_by") or [alone] if span["epochs"][0] <= reached]
        found = [span | {"epochs": [span["epochs"][0], min(span["epochs"][1], reached)]} for span in found]
    if found:
        found[-1]["epochs"][1] = reached
    if not found or (epochs < planned and {key: found[-1].get(key) for key in PROGRAM} != own):
        found.append({"epochs": [epochs + 1, epochs + 1]} | own)
    return found


def what_changed(earlier: dict[str, Any], now: dict[str, Any]) -> str | None:
    """How two programs differ, in words."""
    before, after = _named(earlier), _named(now)
    both = [name for name in after if name in before]
    changed = [f"{name} {before[name]} -> {after[name]}" for name in both if before[name] != after[name]]
    return ", ".join(changed) or None


def _named(program: dict[str, Any]) -> dict[str, str]:
    commit = f"{str(program.get('git_commit'))[:10]}{' with changes' if program.get('git_changed') else ''}"
    versions = program.get("versions")
    return {"commit": commit} | (versions if isinstance(versions, dict) else {})
