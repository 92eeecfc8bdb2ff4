"""Exports a run for deployment, and measures on the test set that every form is the network that was trained."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cosinegate import console
from cosinegate.commands import ExportConfig
from cosinegate.config import require_positive
from cosinegate.deploy.flops import dense_flops, flops_moved
from cosinegate.deploy.int8 import CALIBRATION_IMAGES, write_int8
from cosinegate.deploy.onnx_forms import BatchForm, BranchForm, require_exportable, run_onnx, session, write_onnx
from cosinegate.deploy.skipping import SkippingNetwork
from cosinegate.deploy.specialise import routed_otherwise, specialise
from cosinegate.deploy.trained import Trained, load_trained
from cosinegate.deploy.weights import described, write_weights
from cosinegate.errors import UserError
from cosinegate.files import write_atomically
from cosinegate.foreign import read_json
from cosinegate.record import provenance
from cosinegate.saved import run_folder_of

CLOSE = 1e-4  # folding BatchNorm reorders sums of some hundred float32 products: scores move in the sixth digit


def export(asked: ExportConfig) -> dict[str, Any]:
    """The card of what was written: `branch.onnx`, `batch.onnx`, `int8.onnx`, `weights.safetensors`, `card.json`."""
    require_positive(asked, "threads", "images")
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    if not 0 <= asked.tolerance < 0.5:
        raise UserError(f"tolerance = {asked.tolerance}: must be at least 0 and below 0.5")
    trained = load_trained(asked.run, asked.checkpoint, asked.root, asked.data_folder)
    folder = Path(asked.folder) if asked.folder is not None else run_folder_of(trained.path) / "export"
    if os.path.lexists(folder) and (not folder.is_dir() or (any(folder.iterdir()) and not is_export(folder))):
        raise UserError(f"folder = {folder}: is there and is no export; choose another, or remove it")
    require_exportable(trained.folded, trained.path)
    held_out = trained.held_out()
    if asked.budget is not None:
        trained.calibrate(asked.budget, held_out)
    whole = trained.folded
    changes = trained.settle()
    if asked.specialise:
        trained.folded, more = specialise(trained.folded, held_out, asked.tolerance)
        changes += more
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-")
    except OSError as error:
        raise UserError(f"folder = {folder}: cannot be written: {error.strerror}") from error
    with scratch as made:
        card = _write(trained, Path(made), asked, held_out, changes, trained.flops_settled(whole))
        write_atomically(Path(made) / "card.json", json.dumps(card, indent=2) + "\n")
        folder.mkdir(exist_ok=True)
        (folder / "card.json").unlink(missing_ok=True)  # while files of two exports lie there, none is described
        for path in sorted(Path(made).iterdir(), key=lambda path: path.name == "card.json"):
            path.replace(folder / path.name)
    return card | {"folder": str(folder)}


def is_export(folder: Path) -> bool:
    """Whether the folder's card is one of ours."""
    try:
        card = read_json(folder / "card.json")
    except (UserError, FileNotFoundError):
        return False
    return isinstance(card, dict) and {"network", "forms", "files"} <= card.keys()


def _write(
    trained: Trained,
    folder: Path,
    asked: ExportConfig,
    held_out: Tensor,
    changes: list[dict[str, Any]],
    more: float,
) -> dict[str, Any]:
    channels, height, width = held_out.shape[1:]
    shape, network = (channels, height, width), trained.folded
    write_weights(network, folder / "weights.safetensors")
    console.say("exporting branch.onnx (one image, an If a gate) and batch.onnx (any number of images)")
    write_onnx(BranchForm(network), folder / "branch.onnx", shape, one_image=True)
    write_onnx(BatchForm(network), folder / "batch.onnx", shape, one_image=False)
    console.say(f"quantising int8.onnx with the activations of {min(CALIBRATION_IMAGES, len(held_out))} images")
    write_int8(folder / "batch.onnx", folder / "int8.onnx", held_out[:CALIBRATION_IMAGES])
    images, labels = trained.data.whole_images("test", asked.images)
    console.say(f"comparing every form with the trained network on {len(images)} test images")
    forms = compared(trained, folder, images, labels, asked.threads or torch.get_num_threads(), more)
    data = trained.config.data
    return {
        "name": trained.config.name,
        "checkpoint": str(trained.path),
        "data": data.name.name,
        "classes": list(trained.data.image_set.classes),
        "input": {
            "name": "images",
            "shape": ["batch", *shape],
            "mean": list(data.mean),
            "std": list(data.std),
            "formula": "(pixel / 255 - mean) / std, of pixels from 0 to 255, a mean and std a channel",
        },
        "output": {
            "scores": ["batch", len(trained.data.image_set.classes)],
            "gates": [i for i, block in enumerate(network.blocks) if block.head is not None],  # a column each
        },
        "network": described(network),
        "budget": asked.budget,
        "calibrated_on": f"{len(held_out)} {trained.held_out_words}",
        "specialise": asked.specialise,
        "specialised": changes,
        "tolerance": {"scores": CLOSE, "why": "BatchNorm is folded into float32 convolutions; int8 promises nothing"},
        "test_images": len(images),
        "mean_gate": forms["runtime"]["mean_gate"],
        "executed": forms["runtime"]["executed"],
        "forms": forms,
        "files": {path.name: _sha256(path) for path in sorted(folder.iterdir())},
        "provenance": provenance(),
    }


def compared(
    trained: Trained, folder: Path, images: Tensor, labels: Tensor, threads: int, more: float
) -> dict[str, Any]:
    """Accuracy of every form, and how far its scores and its routes are from those of the trained network, whose
    gates take so many FLOPs an image `more` than there."""
    with FlopCounterMode(display=False) as counter:
        scores, gates = eager_forward(trained, images)
    shape = trained.data.image_set.shape
    own, dense = counter.get_total_flops() / len(images) + more, dense_flops(trained.eager, shape)
    array = images.contiguous().numpy()
    runtime = SkippingNetwork(trained.folded)
    runs: dict[str, Callable[[], tuple[np.ndarray, np.ndarray | None]]] = {
        "runtime": lambda: (runtime(images).numpy(), None),
        "branch.onnx": lambda: run_onnx(session(folder / "branch.onnx", threads), array, 1),
        "batch.onnx": lambda: run_onnx(session(folder / "batch.onnx", threads), array, 64),
        "int8.onnx": lambda: run_onnx(session(folder / "int8.onnx", threads), array, 64),
    }
    found = {"trained": {"accuracy": _accuracy(scores, labels)}}
    always = torch.ones_like(gates)
    always[:, [i for i, block in enumerate(trained.folded.blocks) if block.removed]] = False
    gated = [i for i, block in enumerate(trained.folded.blocks) if block.head is not None]
    for name, run in runs.items():
        theirs, decided = run()
        theirs = torch.from_numpy(np.asarray(theirs))
        route = always.clone()
        if name == "runtime":
            route = runtime.gates
        elif decided is not None:
            route[:, gated] = torch.from_numpy(decided)
        found[name] = {
            "accuracy": _accuracy(theirs, labels),
            "same_class": (theirs.argmax(1) == scores.argmax(1)).float().mean().item(),
            "same_route": 1 - routed_otherwise(gates, route),
            "largest_difference": (theirs - scores).abs().max().item(),
            "mean_gate": route.float().mean().item(),
            "executed": (own + flops_moved(trained.eager, shape, gates, route)) / dense,
        }
        if name != "int8.onnx":
            form = found[name]
            form["equal"] = form["same_class"] == form["same_route"] == 1 and form["largest_difference"] <= CLOSE
    return found


@torch.inference_mode()
def eager_forward(trained: Trained, images: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and gates (B, N) of the network as it was trained."""
    outputs = [trained.eager(part) for part in images.split(250)]
    return torch.cat([o.logits for o in outputs]), torch.cat([o.routing.gates for o in outputs]).bool()


def show(card: dict[str, Any]) -> None:
    rows = [
        (
            name,
            console.percent(form["accuracy"]),
            *(console.percent(form[key]) if key in form else "" for key in ("same_class", "same_route")),
            *(f"{form[key]:.3f}" if key in form else "" for key in ("mean_gate", "executed")),
            f"{form['largest_difference']:.1e}" if "largest_difference" in form else "",
        )
        for name, form in card["forms"].items()
    ]
    console.show_table(
        f"{card['name']} on {card['test_images']} test images of {card['data']}",
        ("form", "accuracy", "same class", "same route", "mean gate", "executed", "largest difference"),
        rows,
    )
    for name, form in card["forms"].items():
        if form.get("equal") is False and not (card["specialise"] and card["specialised"]):
            console.say(f"warning: {name} is not the trained network: a route, a class or a score differs")
    for change in card["specialised"]:
        console.say(
            f"block {change['block']}: {change['done']}; {console.percent(change['otherwise'])} of the calibration "
            "images would have routed otherwise"
        )
    if card["specialise"] and not card["specialised"]:
        console.say("no gate was the same for all calibration images: nothing to specialise")
    gained = card["forms"]["int8.onnx"]["accuracy"] - card["forms"]["runtime"]["accuracy"]
    console.say(
        f"int8 changes the accuracy by {100 * gained:+.2f} points; its rounding sends some images on other routes"
    )
    console.say(f"mean gate {card['mean_gate']:.3f} over all blocks, of {card['checkpoint']}")
    console.say(f"written to {card['folder']}")


def _accuracy(scores: Tensor, labels: Tensor) -> float:
    return (scores.argmax(1) == labels).float().mean().item()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
