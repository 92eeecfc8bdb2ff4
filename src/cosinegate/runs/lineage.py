"""The programs, by commit and packages, that trained each epoch of a run."""

from typing import Any

from cosinegate.runs.record import Program, Record, Span


def spans(before: Record | None, epochs: int, inside: bool, planned: int, program: Program) -> list[Span]:
    """Returns the programs of a run that resumes after so many `epochs`, `inside` the next one or at its start.

    `before` is the run's record. This program is the last, unless nothing is left to train.
    """
    reached, trained_by = epochs + inside, []
    if before is not None and reached > 0:
        alone = Span(epochs=[1, reached], **_program(before))  # as earlier versions recorded
        earlier = [span for span in before.trained_by or [alone] if span.epochs[0] <= reached]
        trained_by = [span.replace(epochs=[span.epochs[0], min(span.epochs[1], reached)]) for span in earlier]
    if trained_by:
        trained_by[-1].epochs[1] = reached
    if not trained_by or (epochs < planned and _program(trained_by[-1]) != _program(program)):
        trained_by.append(Span(epochs=[epochs + 1, epochs + 1], **_program(program)))
    return trained_by


def _program(of: Program) -> dict[str, Any]:
    return {key: getattr(of, key) for key in Program.model_fields}


def what_changed(earlier: Program, now: Program) -> str | None:
    """Returns in words how two programs differ, or None."""
    before, after = _named(earlier), _named(now)
    both = [name for name in after if name in before]
    changed = [f"{name} {before[name]} -> {after[name]}" for name in both if before[name] != after[name]]
    return ", ".join(changed) or None


def _named(program: Program) -> dict[str, str]:
    commit = f"{str(program.git_commit)[:10]}{' with changes' if program.git_changed else ''}"
    return {"commit": commit} | (program.versions or {})
