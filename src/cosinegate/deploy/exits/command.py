"""Fits early exits to a finished run, and writes a folder like a run's: record, weights, frontier, figure."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosinegate.config.commands import ExitsConfig
from cosinegate.deploy.card import CARD, WEIGHTS, described, sha256, write_card, write_weights
from cosinegate.deploy.exits.budget import default_budgets, path_costs, require_budget, set_budget
from cosinegate.deploy.exits.figure import MARK, draw_frontier
from cosinegate.deploy.exits.fit import default_exits, fit_exits, new_exits
from cosinegate.deploy.exits.frontier import FRONTIER, measure_frontier
from cosinegate.deploy.exits.network import EarlyExitNetwork
from cosinegate.deploy.source import Source, load_source
from cosinegate.runs.dynamic import DYNAMIC, routed_percent
from cosinegate.runs.lock import LOCK, locked
from cosinegate.runs.outputs import naming, require_own, write_text
from cosinegate.runs.record import Record, now, provenance, read_record, write_record
from cosinegate.terminal import console
from cosinegate.terminal.errors import UserError

FIGURE = "figures/frontier.png"
OWN = r'\{\s*"source": .*"fitted_to": '
RUN = re.compile(r"[0-9a-f]{10}-s\d+")


def exits(options: ExitsConfig) -> dict[str, Any]:
    """Fits the exits, sets the threshold for every budget and writes the folder; returns the frontier."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    source = load_source(options.run, options.checkpoint, options.root, options.data_folder)
    if isinstance(source.network, EarlyExitNetwork):
        raise UserError(
            f"run = {options.run}: has exits already; export and benchmark take budget=... for another budget"
        )
    _require_finished(source)
    network, _ = source.compile(options.dynamic, options.tolerance)
    images, labels = training_images(source, options.images)
    after = default_exits(network, images[:1]) if options.after is None else sorted(set(options.after))
    if options.after is None and not after:
        raise UserError(f"run = {options.run}: its last stage has one block alone; after=[...] names where exits stand")
    folder = output_folder(source, options)
    _require_own(folder)
    costs = path_costs(EarlyExitNetwork(network, new_exits(network, after, images[:1])), images[:1])
    budgets = default_budgets(costs) if options.budgets is None else list(options.budgets)
    for budget in budgets:
        require_budget(budget, costs)
    console.say(f"fitting exits to {len(images)} training images, after blocks {', '.join(map(str, after))}")
    early = EarlyExitNetwork(network, fit_exits(network, after, images, labels)).eval()
    early.requires_grad_(False)
    facts = {"source": str(source.path), "fitted_to": len(images), "folder": str(folder)}
    frontier = facts | measure_frontier(source, network, early, budgets) | {"identity": identity_of(source, options)}
    set_budget(early, budgets[0], source.held_out())
    with naming(folder), locked(folder, wait=False):
        _write(source, early, frontier, folder)
    return frontier


def training_images(source: Source, number: int | None) -> tuple[Tensor, Tensor]:
    """Returns training images without augmentation, and mirrored ones if training mirrors; never held-out ones."""
    images, labels = source.data.whole_images("train", number)
    if source.config.data.flip:
        return torch.cat((images, images.flip(3))), labels.repeat(2)
    return images, labels


def output_folder(source: Source, options: ExitsConfig) -> Path:
    """Returns `output`, or a folder beside the run's experiment named by the exits' identity."""
    if options.output is not None:
        return Path(options.output)
    run = source.folder if RUN.fullmatch(source.folder.name) else source.folder.parent
    runs_dir = run.parent.parent if RUN.fullmatch(run.name) else Path("runs")
    return runs_dir / f"{source.config.name}_exits" / f"{identity_of(source, options)}-s{source.config.seed}"


def identity_of(source: Source, options: ExitsConfig) -> str:
    """Returns ten hex digits that follow from the weights, the exits' positions and how they are fitted."""
    weights = source.path if source.path.is_file() else source.path / WEIGHTS
    budgets = None if options.budgets is None else list(options.budgets)
    choices = [str(options.after), options.dynamic.name, options.tolerance, options.images, budgets]
    return hashlib.sha256(json.dumps([sha256(weights), *choices]).encode()).hexdigest()[:10]


def _trained(source: Source) -> Record | None:
    """Returns the record of the run that was trained; an export lies in that run's folder."""
    return read_record(source.folder) or read_record(source.folder.parent)


def _require_finished(source: Source) -> None:
    record = read_record(source.folder)
    if record is not None and record.status != "finished":
        raise UserError(f"run = {source.folder}: is not trained to its end ({record.status})")


def _require_own(folder: Path) -> None:
    """Raises UserError if the folder holds files that this command did not write."""
    held = {path.name for path in folder.iterdir()} - {LOCK} if folder.is_dir() else set()
    if held and FRONTIER not in held:
        raise UserError(f"output = {folder}: already exists and holds no exits; choose another, or remove it")
    require_own({folder / FRONTIER: OWN}, {folder / FIGURE: MARK})


def _write(source: Source, early: EarlyExitNetwork, frontier: dict[str, Any], folder: Path) -> None:
    (folder / CARD).unlink(missing_ok=True)  # while files of two calls lie there, none is described
    write_text(folder / FRONTIER, json.dumps(frontier, indent=2) + "\n")  # first: by it a folder is this command's own
    draw_frontier(frontier, folder / FIGURE)
    write_record(folder, _record(source, early, frontier))
    write_weights(early, folder / WEIGHTS)
    card = {
        "name": f"{source.config.name}_exits",
        "source": str(source.path),
        "data": source.data.image_set.name,
        "network": described(early, source.config, source.actions),
        "dense_flops": source.dense_flops,
        "files": {WEIGHTS: sha256(folder / WEIGHTS)},
        "provenance": provenance(),
    }
    write_card(card, folder)


def _record(source: Source, early: EarlyExitNetwork, frontier: dict[str, Any]) -> Record:
    """Returns the record for the first budget, with epochs and speed of the training run's record, if there is one."""
    before, point, config = _trained(source), frontier["points"][0], source.config
    dynamic = sum(DYNAMIC[0] <= fraction <= DYNAMIC[1] for fraction in point["open"])
    dense = source.dense_flops
    executed = {"counted": point["mean_gate"], "executed": point["flops"] / dense, "dense_per_image": dense}
    record = {
        "status": "finished",
        "experiment": f"{config.name}_exits",
        "identity": frontier["identity"],
        "data": source.data.image_set.name,
        "seed": config.seed,
        "gate": "exits",
        "selected_on": config.data.validation.name,
        "network": frontier["network"],
        "sweep": config.sweep,
        "epochs": {"planned": None, "done": None} if before is None else before.epochs.as_dict(),
        "accuracy": {"test": point["accuracy"]},
        "mean_gate": point["mean_gate"],
        "skip_percent": 100 * (1 - point["mean_gate"]),
        "routed_percent": routed_percent(point["open"]),
        "blocks_open": point["open"],
        "dynamic_blocks": dynamic,
        "paths": point["paths"],
        "flops": executed,
        "parameters": sum(parameter.numel() for parameter in early.parameters()),
        "images_per_second": before and before.images_per_second,
        "seconds": before and before.seconds,
        "exits": {
            "source": frontier["source"],
            "after": frontier["after"],
            "budget": point["budget"],
            "own_accuracy": frontier["own"]["accuracy"],
            "own_executed": frontier["own"]["executed"],
        },
        "started": now(),
        "updated": now(),
    }
    return Record.model_validate(record | provenance())


def show(frontier: dict[str, Any]) -> None:
    """Prints the frontier as a table, the network without exits first."""
    own = frontier["own"]
    rows = [("none", console.percent(own["accuracy"]), "0", "1.000", f"{own['executed']:.3f}", "", "")]
    rows += [
        (
            f"{point['budget']:g}",
            console.percent(point["accuracy"]),
            f"{point['other_class']}",
            f"{point['executed_of_own']:.3f}",
            f"{point['executed']:.3f}",
            f"{point['mean_gate']:.3f}",
            console.bars(point["open"]),
        )
        for point in frontier["points"]
    ]
    columns = ("budget", "accuracy", "other class", "FLOPs of its own", "FLOPs of dense", "mean gate", "open by block")
    console.show_table(f"{frontier['name']} with exits after blocks {frontier['after']}", columns, rows)
    console.say(
        f"early exit (BranchyNet, Teerapittayanon et al. 2016): thresholds set on {frontier['thresholds_by']}, "
        f"measured on {frontier['images']} test images; FLOPs of dense: over those of the dense network of its depth "
        "and width"
    )
    console.say(f"figure  {Path(frontier['folder']) / FIGURE}")
    console.say(f"record  {Path(frontier['folder']) / 'record.json'}")
