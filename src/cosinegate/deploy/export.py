"""Compiles a run, exports it, and compares every form with the trained network on the test set."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cosinegate.config.choices import Dynamic
from cosinegate.config.commands import ExportConfig
from cosinegate.deploy.card import CARD, WEIGHTS, Network, described, is_card_folder, sha256, write_card, write_weights
from cosinegate.deploy.exits import EarlyExitNetwork
from cosinegate.deploy.exits.budget import set_budget
from cosinegate.deploy.fold import folded
from cosinegate.deploy.forward import forward
from cosinegate.deploy.int8 import CALIBRATION_IMAGES, write_int8
from cosinegate.deploy.onnx_forms import (
    BatchForm,
    OneImageForm,
    has_one_image_form,
    require_exportable,
    run_onnx,
    session,
    write_onnx,
)
from cosinegate.deploy.runtime import Runtime
from cosinegate.deploy.source import Source, is_the_records, load_source, require_something_to_deploy
from cosinegate.networks.compile import Action, BlockChange, Changes
from cosinegate.runs.lock import is_locked, locked
from cosinegate.runs.outputs import naming
from cosinegate.runs.record import provenance, read_record, write_record
from cosinegate.runs.untrusted import read_json
from cosinegate.terminal import console
from cosinegate.terminal.errors import UserError

# Of 1 or of the largest score. Folding BatchNorm reorders sums of float32: scores move in the sixth digit.
CLOSE = 1e-4
ONNX, ONE, INT8 = "network.onnx", "one.onnx", "int8.onnx"
FILES = (WEIGHTS, ONNX, ONE, INT8, CARD)
OLD_FILES = ("branch.onnx", "batch.onnx")  # what earlier versions wrote
MANY = 64  # images at a time


def export(options: ExportConfig) -> dict[str, Any]:
    """Writes ONNX and int8 files, `weights.safetensors` and `card.json`; returns the card."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    source = load_source(options.run, options.checkpoint, options.root, options.data_folder)
    require_something_to_deploy(source)
    folder = Path(options.output) if options.output is not None else source.folder / "export"
    _require_own(folder)
    trained, held_out = source.network, source.held_out()
    move_budget(source, options.budget)
    if source.network.has_gates:
        console.say(f"running the gates on {len(held_out)} {source.held_out_words}")
    deployed, changes = source.compile(options.dynamic, options.tolerance)
    require_exportable(deployed, source.path)
    with naming(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-")
    with naming(folder), scratch as written:
        card = _write(source, trained, deployed, changes, Path(written), options)
        write_card(card, Path(written))
        folder.mkdir(exist_ok=True)
        for name in (CARD, *FILES, *OLD_FILES):  # while files of two exports lie there, none is described
            (folder / name).unlink(missing_ok=True)
        for path in sorted(Path(written).iterdir(), key=lambda path: path.name == CARD):
            path.replace(folder / path.name)
    is_exact = (
        options.dynamic is Dynamic.keep and options.tolerance == 0 and options.budget is None and options.images is None
    )
    if is_exact and changes is not None and is_the_records(source.path):
        _into_record(source.folder, card, changes)
    return card | {"folder": str(folder)}


def move_budget(source: Source, budget: float | None) -> None:
    """Sets the exits' threshold for a budget, on held-out images."""
    if budget is None:
        return
    if not isinstance(source.network, EarlyExitNetwork):
        raise UserError(f"budget = {budget}: {source.path} has no exits; python src/exits.py run=... gives it some")
    set_budget(source.network, budget, source.held_out())


def _require_own(folder: Path) -> None:
    """Raises UserError if the folder, or a file that would be replaced, is not an export's."""
    if os.path.lexists(folder) and (not folder.is_dir() or (any(folder.iterdir()) and not _is_export(folder))):
        raise UserError(f"output = {folder}: already exists and is not an export; choose another, or remove it")
    for path in (folder / name for name in (*FILES, *OLD_FILES)):
        if os.path.lexists(path) and (path.is_symlink() or not path.is_file() or not _is_described(path)):
            words = "already exists and is not a file of an export; choose another folder, or move it away"
            raise UserError(f"{path}: {words}")


def _is_export(folder: Path) -> bool:
    """Returns whether the folder's card is an export's rather than that of exits."""
    return is_card_folder(folder) and "forms" in read_json(folder / CARD)


def _is_described(path: Path) -> bool:
    return path.name == CARD or path.name in read_json(path.parent / CARD)["files"]


def _write(
    source: Source, trained: Network, deployed: Network, changes: Changes | None, folder: Path, options: ExportConfig
) -> dict[str, Any]:
    held_out, network = source.held_out(), folded(deployed)
    shape = tuple(held_out.shape[1:])
    write_weights(deployed, folder / WEIGHTS)
    console.say(f"exporting {ONNX} (any number of images)")
    write_onnx(BatchForm(network), folder / ONNX, shape)
    if has_one_image_form(network):
        console.say(f"exporting {ONE} (one image, an If at every exit)")
        write_onnx(OneImageForm(network), folder / ONE, shape)
    console.say(f"quantising {INT8} with the activations of {min(CALIBRATION_IMAGES, len(held_out))} images")
    write_int8(folder / ONNX, folder / INT8, held_out[:CALIBRATION_IMAGES])
    images, labels = source.data.whole_images("test", options.images)
    console.say(f"comparing every form with the trained network on {len(images)} test images")
    forms = compared(source, trained, deployed, folder, images, labels, options.threads or torch.get_num_threads())
    data, classes = source.config.data, list(source.data.image_set.classes)
    compiled = None
    if changes is not None:
        compiled = {
            "dynamic": options.dynamic.name,
            "tolerance": options.tolerance,
            "images": f"{len(held_out)} {source.held_out_words}",
            "blocks": [asdict(change) | {"action": change.action.name} for change in changes.blocks],
            "computed": changes.computed,
        }
    return {
        "name": source.config.name,
        "source": str(source.path),
        "data": source.data.image_set.name,
        "classes": classes,
        "input": {
            "name": "images",
            "shape": ["batch", *shape],
            "mean": list(data.mean),
            "std": list(data.std),
            "formula": "(pixel / 255 - mean) / std, of pixels from 0 to 255, a mean and std a channel",
        },
        "output": {"scores": ["batch", len(classes)], "route": ["batch", len(deployed.blocks)]},
        "network": described(deployed, source.config, source.actions),
        "budget": options.budget,
        "compiled": compiled,
        "tolerance": {"scores": CLOSE, "why": "BatchNorm is folded into float32 convolutions; int8 promises nothing"},
        "test_images": len(images),
        "mean_gate": forms["deployed"]["mean_gate"],
        "executed": forms["deployed"]["executed"],
        "dense_flops": source.dense_flops,
        "forms": forms,
        "files": {path.name: sha256(path) for path in sorted(folder.iterdir())},
        "provenance": provenance(),
    }


def compared(
    source: Source, trained: Network, deployed: Network, folder: Path, images: Tensor, labels: Tensor, threads: int
) -> dict[str, Any]:
    """Returns accuracy, route and scores of every form beside those of the trained network.

    `equal` is whether a form gives the deployed network's scores, within CLOSE, for images on the same route. A
    decision within rounding of its threshold may differ; `rerouted` counts those images.
    """
    dense = source.dense_flops
    scores, route, flops = forward(trained, images)
    own_scores, own_route, own_flops = forward(deployed, images)
    array, runtime = images.contiguous().numpy(), Runtime(folded(deployed))
    runs: dict[str, Callable[[], tuple[np.ndarray, np.ndarray | None]]] = {"torch": lambda: _on_torch(runtime, images)}
    for name, batch in ((ONE, 1), (ONNX, MANY), (INT8, MANY)):
        if (folder / name).exists():
            runs[name] = lambda name=name, batch=batch: run_onnx(session(folder / name, threads), array, batch)
    forms = {
        "trained": _form(scores, route, labels) | {"executed": flops / dense} | _sizes(trained),
        "deployed": _form(own_scores, own_route, labels, scores, route)
        | {"executed": own_flops / dense}
        | _sizes(deployed),
    }
    for name, run in runs.items():
        theirs, taken = run()
        theirs = torch.from_numpy(np.asarray(theirs))
        taken = own_route if taken is None else torch.from_numpy(np.asarray(taken)).bool()
        forms[name] = _form(theirs, taken, labels, scores, route)
        if name != INT8:
            same = ~torch.ne(taken, own_route).any(1)
            close = CLOSE * max(1.0, own_scores.abs().max().item())
            apart = (theirs - own_scores)[same].abs().max().item() if same.any() else float("inf")
            forms[name] |= {"equal": apart <= close, "rerouted": int((~same).sum())}
    return forms


def _on_torch(runtime: Runtime, images: Tensor) -> tuple[np.ndarray, np.ndarray | None]:
    outputs = [runtime(part) for part in images.split(MANY)]
    route = None if outputs[0].routing is None else torch.cat([output.routing.gates for output in outputs]).numpy()
    return torch.cat([output.logits for output in outputs]).numpy(), route


def _form(
    scores: Tensor, route: Tensor, labels: Tensor, trained: Tensor | None = None, its_route: Tensor | None = None
) -> dict[str, float]:
    """Returns a form's accuracy and mean gate, and its agreement with the `trained` network's scores and route."""
    figures = {"accuracy": (scores.argmax(1) == labels).float().mean().item(), "mean_gate": route.float().mean().item()}
    if trained is None:
        return figures
    same = ~torch.ne(its_route, route).any(1)
    return figures | {
        "same_class": (scores.argmax(1) == trained.argmax(1)).float().mean().item(),
        "same_route": same.float().mean().item(),
        "largest_difference": (scores - trained)[same].abs().max().item() if same.any() else None,  # on the same route
    }


def _sizes(network: Network) -> dict[str, int]:
    """Returns the numbers of parameters and of blocks that compute."""
    return {
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "blocks": sum(block.residual is not None for block in network.blocks),
    }


def _into_record(folder: Path, card: dict[str, Any], changes: Changes) -> None:
    """Adds the compiled network's figures to the record of a run that an earlier version trained."""
    record = read_record(folder)
    if record.compiled is not None or "flops" not in record.model_fields_set or is_locked(folder):
        return
    form, images = card["forms"]["deployed"], card["test_images"]
    compiled = changes.recorded(form["executed"], round(form["same_class"] * images), images)
    with locked(folder, wait=False):
        flops = record.flops.replace(compiled=form["executed"])
        write_record(folder, record.replace(flops=flops, compiled=compiled))


def show(card: dict[str, Any]) -> None:
    """Prints the forms that were written, and how each compares with the trained network."""
    images, blocks = card["test_images"], card["output"]["route"][1]
    rows = [
        (
            name,
            console.percent(form["accuracy"]),
            *(f"{round((1 - form[key]) * images)}" if key in form else "" for key in ("same_class", "same_route")),
            f"{form['mean_gate']:.3f}",
            f"{form['executed']:.3f}" if "executed" in form else "",
            f"{form['parameters']:,}" if "parameters" in form else "",
            f"{form['blocks']} of {blocks}" if "blocks" in form else "",
            f"{form['largest_difference']:.1e}" if form.get("largest_difference") is not None else "",
        )
        for name, form in card["forms"].items()
    ]
    columns = ("form", "accuracy", "other class", "other route", "mean gate", "FLOPs", "parameters", "blocks")
    title = f"{card['name']} on {images} test images of {card['data']}"
    console.show_table(title, (*columns, "largest difference"), rows)
    for change in card["compiled"]["blocks"] if card["compiled"] else ():
        console.say(str(BlockChange(**change | {"action": Action[change["action"]]})))
    for name, form in card["forms"].items():
        if form.get("equal") is False:
            console.say(f"warning: {name} is not the deployed network: a score differs on the same route")
        if form.get("rerouted"):
            console.say(f"{name}: {form['rerouted']} images lie within rounding of a threshold and take another route")
    if card["executed"] >= 1:
        console.say("no block is closed for all images, and none is skipped before F: nothing is saved")
    gained = card["forms"][INT8]["accuracy"] - card["forms"]["deployed"]["accuracy"]
    console.say(f"int8 changes the accuracy by {100 * gained:+.2f} points")
    on = f"gates ran on {card['compiled']['images']}; " if card["compiled"] else ""
    console.say(
        f"{on}other class, other route: number of test images, beside the trained network; "
        f"FLOPs: executed, the dense network = 1; largest difference: of scores, on the same route; {card['source']}"
    )
    console.say(f"written to {card['folder']}")
