"""Fits early exits to a finished run and writes a folder like a run's: record, weights, frontier figure and table."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosinegate.config.checks import require_positive
from cosinegate.config.commands import ExitsConfig
from cosinegate.deploy.card import CARD, WEIGHTS, described, sha256, write_card, write_weights
from cosinegate.deploy.exits.budget import path_costs, require_budget, set_budget
from cosinegate.deploy.exits.figure import MARK, draw_frontier
from cosinegate.deploy.exits.fit import default_exits, fit_exits, new_exits
from cosinegate.deploy.exits.network import EarlyExitNetwork
from cosinegate.deploy.export import forward
from cosinegate.deploy.source import Source, load_source
from cosinegate.networks.name import network_name
from cosinegate.runs.dynamic import DYNAMIC, routed_percent
from cosinegate.runs.lock import LOCK, locked
from cosinegate.runs.outputs import naming, require_own, write_text
from cosinegate.runs.record import Record, now, provenance, read_record, write_record
from cosinegate.terminal import console
from cosinegate.terminal.errors import UserError

FRONTIER, FIGURE = "frontier.json", "figures/frontier.png"
OWN = r'\{\s*"source": .*"fitted_to": '
RUN = re.compile(r"[0-9a-f]{10}-s\d+")


def exits(asked: ExitsConfig) -> dict[str, Any]:
    """Fits the exits, sets the threshold for every budget, and writes the folder; returns what the frontier holds."""
    require_positive(asked, "threads", "images")
    if asked.budgets is not None and not (asked.budgets and all(budget > 0 for budget in asked.budgets)):
        words = "must be FLOPs over the network's own, as in budgets=[0.6,0.7]"
        raise UserError(f"budgets = {list(asked.budgets)}: {words}")
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    source = load_source(asked.run, asked.checkpoint, asked.root, asked.data_folder)
    if isinstance(source.network, EarlyExitNetwork):
        raise UserError(
            f"run = {asked.run}: has exits already; export and benchmark take budget=... for another budget"
        )
    _require_finished(source)
    network, _ = source.compile(asked.dynamic, asked.tolerance)
    images, labels = training_images(source, asked.images)
    after = default_exits(network, images[:1]) if asked.after is None else sorted(set(asked.after))
    if asked.after is None and not after:
        raise UserError(f"run = {asked.run}: its last stage has one block alone; after=[...] names where exits stand")
    folder = output_folder(source, asked)
    _require_own(folder)
    costs = path_costs(EarlyExitNetwork(network, new_exits(network, after, images[:1])), images[:1])
    budgets = default_budgets(costs) if asked.budgets is None else list(asked.budgets)
    for budget in budgets:
        require_budget(budget, costs)
    console.say(f"fitting exits to {len(images)} training images, after blocks {', '.join(map(str, after))}")
    early = EarlyExitNetwork(network, fit_exits(network, after, images, labels)).eval()
    early.requires_grad_(False)
    facts = {"source": str(source.path), "fitted_to": len(images), "folder": str(folder)}
    found = facts | frontier(source, network, early, budgets) | {"identity": identity_of(source, asked)}
    set_budget(early, budgets[0], source.held_out())
    with naming(folder), locked(folder, wait=False):
        _write(source, early, found, folder)
    return found


def default_budgets(costs: Tensor) -> list[float]:
    """Three budgets between the least and the most that paths of these costs (E + 1,) take, the middle one first."""
    least, most = costs[0].item(), min(costs[-1].item(), 1.0)
    return [round(least + part * (most - least), 3) for part in (0.5, 0.25, 0.75)]


def training_images(source: Source, number: int | None) -> tuple[Tensor, Tensor]:
    """Whole training images, and mirrored ones where training mirrors; none that were held out."""
    images, labels = source.data.whole_images("train", number)
    if source.config.data.flip:
        return torch.cat((images, images.flip(3))), labels.repeat(2)
    return images, labels


def output_folder(source: Source, asked: ExitsConfig) -> Path:
    """What was asked for, or a folder beside the run's experiment that follows from the run and where exits stand."""
    if asked.output is not None:
        return Path(asked.output)
    run = source.folder if RUN.fullmatch(source.folder.name) else source.folder.parent
    runs_dir = run.parent.parent if RUN.fullmatch(run.name) else Path("runs")
    return runs_dir / f"{source.config.name}_exits" / f"{identity_of(source, asked)}-s{source.config.seed}"


def identity_of(source: Source, asked: ExitsConfig) -> str:
    """Ten hex digits that follow from the network's weights, where exits stand and how they are fitted."""
    weights = source.path if source.path.is_file() else source.path / WEIGHTS
    budgets = None if asked.budgets is None else list(asked.budgets)
    options = [str(asked.after), asked.dynamic.name, asked.tolerance, asked.images, budgets]
    return hashlib.sha256(json.dumps([sha256(weights), *options]).encode()).hexdigest()[:10]


def frontier(source: Source, network: Any, early: EarlyExitNetwork, budgets: list[float]) -> dict[str, Any]:
    """Accuracy and FLOPs of the test set at every budget, beside those of the network without exits."""
    held_out = source.held_out()
    images, labels = source.data.whole_images("test", None)
    costs = path_costs(early, images[:1])
    console.say(
        f"setting thresholds on {len(held_out)} {source.held_out_words}; measuring on {len(images)} test images"
    )
    whole, _, own_flops = forward(network, images)
    points = []
    for budget in budgets:
        set_budget(early, budget, held_out)
        scores, route, flops = forward(early, images)
        opened = route.float().mean(0)
        points.append(
            {
                "budget": budget,
                "threshold": early.threshold.item(),
                "accuracy": _accuracy(scores, labels),
                "other_class": int((scores.argmax(1) != whole.argmax(1)).sum()),
                "executed_of_own": flops / own_flops,
                "executed": flops / source.reference_flops,
                "flops": flops,
                "mean_gate": opened.mean().item(),
                "open": opened.tolist(),
                "paths": len(torch.unique(route, dim=0)),
            }
        )
    return {
        "name": source.config.name,
        "network": network_name(source.config.network),
        "after": early.after,
        "path_costs": costs.tolist(),
        "own": {"accuracy": _accuracy(whole, labels), "executed": own_flops / source.reference_flops},
        "images": len(images),
        "thresholds_by": f"{len(held_out)} {source.held_out_words}",
        "points": points,
    }


def _accuracy(scores: Tensor, labels: Tensor) -> float:
    return (scores.argmax(1) == labels).float().mean().item()


def _trained(source: Source) -> Record | None:
    """The record of the run that was trained; an export lies in that run's folder."""
    return read_record(source.folder) or read_record(source.folder.parent)


def _require_finished(source: Source) -> None:
    record = read_record(source.folder)
    if record is not None and record.status != "finished":
        raise UserError(f"run = {source.folder}: is not trained to its end ({record.status})")


def _require_own(folder: Path) -> None:
    """Ends with one line where the folder holds anything but exits that this command wrote, or began to write."""
    held = {path.name for path in folder.iterdir()} - {LOCK} if folder.is_dir() else set()
    if held and FRONTIER not in held:
        raise UserError(f"output = {folder}: is there and holds no exits; choose another, or remove it")
    require_own({folder / FRONTIER: OWN}, {folder / FIGURE: MARK})


def _write(source: Source, early: EarlyExitNetwork, found: dict[str, Any], folder: Path) -> None:
    (folder / CARD).unlink(missing_ok=True)  # while files of two calls lie there, none is described
    write_text(folder / FRONTIER, json.dumps(found, indent=2) + "\n")  # first: by it a folder is this command's own
    draw_frontier(found, folder / FIGURE)
    write_record(folder, _record(source, early, found))
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


def _record(source: Source, early: EarlyExitNetwork, found: dict[str, Any]) -> Record:
    """Of the first budget, with what the record of the run that has no exits says of its training."""
    before, point, config = _trained(source), found["points"][0], source.config
    last = before.epochs.done if before is not None else 0
    dynamic = sum(DYNAMIC[0] <= fraction <= DYNAMIC[1] for fraction in point["open"])
    dense = source.dense_flops
    executed = {"counted": point["mean_gate"], "executed": point["flops"] / dense, "dense_per_image": dense}
    record = {
        "status": "finished",
        "experiment": f"{config.name}_exits",
        "identity": found["identity"],
        "data": source.data.image_set.name,
        "seed": config.seed,
        "gate": "exits",
        "tau_target": point["budget"] if point["budget"] <= 1 else 1.0,
        "lambda_flops": 0.0,
        "selected_on": config.data.validation.name,
        "network": found["network"],
        "sweep": config.sweep,
        "epochs": before.epochs.as_dict() if before is not None else {"planned": 1, "done": 0},
        "accuracy": {
            "test": point["accuracy"],
            "test_of": "last",
            "last": point["accuracy"],
            "last_epoch": last,
            "best": point["accuracy"],
            "best_epoch": last,
        },
        "mean_gate": point["mean_gate"],
        "skip_percent": 100 * (1 - point["mean_gate"]),
        "routed_percent": routed_percent(point["open"]),
        "blocks_open": point["open"],
        "dynamic_blocks": dynamic,
        "paths": point["paths"],
        "flops": executed,
        "parameters": sum(parameter.numel() for parameter in early.parameters()),
        "images_per_second": (before and before.images_per_second) or 0.0,
        "seconds": (before and before.seconds) or 0.0,
        "exits": {
            "source": found["source"],
            "after": found["after"],
            "budget": point["budget"],
            "own_accuracy": found["own"]["accuracy"],
            "own_executed": found["own"]["executed"],
        },
        "started": now(),
        "updated": now(),
    }
    return Record.model_validate(record | provenance())


def show(found: dict[str, Any]) -> None:
    """Prints the frontier as a table, the network without exits first."""
    own = found["own"]
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
        for point in found["points"]
    ]
    columns = ("budget", "accuracy", "other class", "FLOPs of its own", "FLOPs of dense", "mean gate", "open by block")
    console.show_table(f"{found['name']} with exits after blocks {found['after']}", columns, rows)
    console.say(
        f"early exit (BranchyNet, Teerapittayanon et al. 2016): thresholds set on {found['thresholds_by']}, measured "
        f"on {found['images']} test images; FLOPs of dense: over those of the dense network of its depth and width"
    )
    console.say(f"figure  {Path(found['folder']) / FIGURE}")
    console.say(f"record  {Path(found['folder']) / 'record.json'}")
