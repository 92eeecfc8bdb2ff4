"""The table at the end of a training run."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from cosinegate.runs.dynamic import routed_percent
from cosinegate.runs.record import Record, ended_early, require
from cosinegate.terminal import console

SHOWN = ("experiment", "data", "seed", "selected_on", "gate", "blocks_open", "dynamic_blocks", "paths", "tau_target")
SHOWN += ("accuracy.test", "accuracy.last", "accuracy.best", "accuracy.last_epoch", "accuracy.best_epoch")
SHOWN += ("mean_gate", "skip_percent", "flops.counted", "flops.executed", "images_per_second", "seconds")


def show_record(record: Record, folder: Path) -> None:
    """Prints the results of a finished run, and where its files are."""
    if not console.is_first_process():
        return
    require(record, folder / "record.json", *SHOWN)
    accuracy, flops = record.accuracy, record.flops
    table = Table(title=console.cell(f"{record.experiment} on {record.data}, seed {record.seed}"), title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("how", overflow="fold")
    chosen = "the test set" if record.selected_on == "test" else "held-out training images"
    target = f"target {record.tau_target:g}" if record.lambda_flops else "no target: λ_flops is 0"
    rows = [
        ("test accuracy", console.percent(accuracy.test), f"hard gates, {accuracy.test_of} epoch"),
        ("last accuracy", console.percent(accuracy.last), f"epoch {accuracy.last_epoch}"),
        ("peak accuracy", console.percent(accuracy.best), f"epoch {accuracy.best_epoch}, chosen on {chosen}"),
        ("mean gate", f"{record.mean_gate:.3f}", target),
        ("skip", f"{record.skip_percent:.1f}%", "1 - mean gate"),
        ("FLOPs counted", f"{flops.counted:.3f}", "the paper's figure: the mean gate"),
        ("FLOPs executed", f"{flops.executed:.3f}", "measured, whole network / dense network"),
        (
            "dynamic blocks",
            f"{record.dynamic_blocks} of {len(record.blocks_open)}",
            f"open for 5-95% of the images; {routed_percent(record.blocks_open):.1f} of the "
            f"{record.skip_percent:.1f}% are skipped there",
        ),
        ("distinct paths", str(record.paths), "sets of open blocks"),
        ("images/s", f"{record.images_per_second:.0f}", f"training; {record.seconds:.0f} s in all"),
    ]
    if early := ended_early(record):
        done, why = early.split(", ", 1)
        rows.insert(0, ("ended early", done, why))
    if record.gate == "none":
        rows = [
            row
            for row in rows
            if row[0] not in ("mean gate", "skip", "FLOPs counted", "dynamic blocks", "distinct paths")
        ]
    for row in rows:
        table.add_row(*map(console.cell, row))
    if record.cut and record.cut.as_dict():
        limits = ", ".join(f"trainer.{key}={value}" for key, value in record.cut.as_dict().items())
        table.add_row("cut", "yes", console.cell(f"{limits}: nothing to compare with a whole run"))
    if compiled := record.compiled:  # an earlier version's record has none
        words = f"FLOPs; blocks {compiled.blocks} of {len(record.blocks_open)}, same answers on "
        words += f"{compiled.same_class:,} of {compiled.images:,} images"
        table.add_row("compiled", f"{compiled.executed:.3f}", words)
    if record.gate != "none":
        table.add_row("open by block", console.bars(record.blocks_open), "first to last; full: every image computes it")
    Console().print(table)
    figure = folder / "figures" / "curves.png"
    if figure.exists():
        console.say(f"figure  {figure}")
    console.say(f"record  {folder / 'record.json'}")
    for path in sorted(folder.glob("*-profile*.txt")):
        console.say(f"profile {path}")


def show_finished(record: Record, folder: Path) -> Record:
    """Prints that a run is finished already, and its results; returns the record."""
    console.say(f"this run is finished; nothing was done. To train it again, change seed or move {folder} away")
    show_record(record, folder)
    return record
