"""Compiles a run and exports it for deployment, and measures every form on the test set beside the trained network."""

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cosinegate import console
from cosinegate.choices import Dynamic
from cosinegate.commands import ExportConfig
from cosinegate.config import require_positive
from cosinegate.deploy.compile import BATCH, Action, BlockChange, Changes
from cosinegate.deploy.flops import dense_flops, flops_moved
from cosinegate.deploy.int8 import CALIBRATION_IMAGES, write_int8
from cosinegate.deploy.onnx_forms import BatchForm, BranchForm, require_exportable, run_onnx, session, write_onnx
from cosinegate.deploy.skipping import SkippingNetwork
from cosinegate.deploy.trained import Trained, is_the_records, load_gated
from cosinegate.deploy.weights import described, is_export, sha256, write_weights
from cosinegate.errors import UserError
from cosinegate.files import write_atomically
from cosinegate.foreign import read_json
from cosinegate.lock import is_locked, locked
from cosinegate.networks import GatedNetwork
from cosinegate.outputs import naming
from cosinegate.record import provenance, read_record, write_record
from cosinegate.saved import run_folder_of

CLOSE = 1e-4  # of 1 or of the largest score: folding BatchNorm reorders sums of float32, scores move in the sixth digit
CARD, WHOLE = "card.json", "network.onnx"  # the second is of a network that does not route
FILES = ("weights.safetensors", WHOLE, "branch.onnx", "batch.onnx", "int8.onnx", CARD)


def export(asked: ExportConfig) -> dict[str, Any]:
    """The card of what was written: ONNX and int8 files, `weights.safetensors`, `card.json`."""
    require_positive(asked, "threads", "images")
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    if not 0 <= asked.tolerance < 0.5:
        raise UserError(f"tolerance = {asked.tolerance}: must be at least 0 and below 0.5")
    trained = load_gated(asked.run, asked.checkpoint, asked.root, asked.data_folder)
    folder = Path(asked.folder) if asked.folder is not None else run_folder_of(trained.path) / "export"
    _require_own(folder)
    held_out = trained.held_out()
    if asked.budget is not None:
        trained.calibrate(asked.budget, held_out)
    console.say(f"asking the gates for {len(held_out)} {trained.held_out_words}")
    changes = trained.compile(held_out, asked.dynamic, asked.tolerance)
    require_exportable(trained.folded, trained.path)
    with naming(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-")
    with naming(folder), scratch as made:
        card = _write(trained, Path(made), asked, held_out, changes)
        write_atomically(Path(made) / CARD, json.dumps(card, indent=2) + "\n")
        folder.mkdir(exist_ok=True)
        for name in (CARD, *FILES):  # while files of two exports lie there, none is described
            (folder / name).unlink(missing_ok=True)
        for path in sorted(Path(made).iterdir(), key=lambda path: path.name == CARD):
            path.replace(folder / path.name)
    is_exact = asked.dynamic is Dynamic.keep and asked.tolerance == 0 and asked.budget is None and asked.images is None
    if is_exact and is_the_records(trained.path):
        _into_record(run_folder_of(trained.path), card, changes)
    return card | {"folder": str(folder)}


def _require_own(folder: Path) -> None:
    """Ends with one line where the folder, or a file in it that would be replaced, is not of an export."""
    if os.path.lexists(folder) and (not folder.is_dir() or (any(folder.iterdir()) and not is_export(folder))):
        raise UserError(f"folder = {folder}: is there and is no export; choose another, or remove it")
    for path in (folder / name for name in FILES):
        if os.path.lexists(path) and (path.is_symlink() or not path.is_file() or not _is_described(path)):
            raise UserError(f"{path}: is there, and is no file of the export; choose another folder, or move it away")


def _is_described(path: Path) -> bool:
    return path.name == CARD or path.name in read_json(path.parent / CARD)["files"]


def _write(trained: Trained, folder: Path, asked: ExportConfig, held_out: Tensor, changes: Changes) -> dict[str, Any]:
    channels, height, width = held_out.shape[1:]
    shape, network = (channels, height, width), trained.folded
    write_weights(network, folder / "weights.safetensors")
    if network.routes:
        console.say("exporting branch.onnx (one image, an If a gate) and batch.onnx (any number of images)")
        write_onnx(BranchForm(network), folder / "branch.onnx", shape, one_image=True)
    else:
        console.say(f"exporting {WHOLE} (any number of images)")
    source = folder / ("batch.onnx" if network.routes else WHOLE)
    write_onnx(BatchForm(network), source, shape, one_image=False)
    console.say(f"quantising int8.onnx with the activations of {min(CALIBRATION_IMAGES, len(held_out))} images")
    write_int8(source, folder / "int8.onnx", held_out[:CALIBRATION_IMAGES])
    images, labels = trained.data.whole_images("test", asked.images)
    console.say(f"comparing every form with the trained network on {len(images)} test images")
    forms = compared(trained, folder, images, labels, asked.threads or torch.get_num_threads())
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
        "compiled": {
            "dynamic": asked.dynamic.name,
            "tolerance": asked.tolerance,
            "asked": f"{len(held_out)} {trained.held_out_words}",
            "blocks": [asdict(change) | {"action": change.action.name} for change in changes.blocks],
            "computed": changes.computed,
        },
        "tolerance": {"scores": CLOSE, "why": "BatchNorm is folded into float32 convolutions; int8 promises nothing"},
        "test_images": len(images),
        "mean_gate": forms["compiled"]["mean_gate"],
        "executed": forms["compiled"]["executed"],
        "dense_flops": dense_flops(trained.eager, trained.data.image_set.shape),
        "forms": forms,
        "files": {path.name: sha256(path) for path in sorted(folder.iterdir())},
        "provenance": provenance(),
    }


def compared(trained: Trained, folder: Path, images: Tensor, labels: Tensor, threads: int) -> dict[str, Any]:
    """Accuracy of every form, and how far its scores and its routes are from those of the trained network; `equal`
    says whether it is the compiled network.
    """
    shape = trained.data.image_set.shape
    dense = dense_flops(trained.eager, shape)
    scores, gates, flops = eager_forward(trained.eager, images)
    of_compiled, route, own = eager_forward(trained.compiled, images)
    array = images.contiguous().numpy()
    runtime = SkippingNetwork(trained.folded)
    runs: dict[str, Callable[[], tuple[np.ndarray, np.ndarray | None]]] = {
        "runtime": lambda: (runtime(images).numpy(), None),
    }
    for name, batch in (("branch.onnx", 1), ("batch.onnx", 64), (WHOLE, 64), ("int8.onnx", 64)):
        if (folder / name).exists():
            runs[name] = lambda name=name, batch=batch: run_onnx(session(folder / name, threads), array, batch)
    found = {
        "trained": _form(scores, gates, labels) | {"executed": flops / dense} | _sizes(trained.eager),
        "compiled": _form(of_compiled, route, labels, scores, gates)
        | {"executed": own / dense}
        | _sizes(trained.compiled),
    }
    gated = [i for i, block in enumerate(trained.folded.blocks) if block.head is not None]
    for name, run in runs.items():
        theirs, decided = run()
        theirs, taken = torch.from_numpy(np.asarray(theirs)), route.clone()
        if name == "runtime":
            taken = runtime.gates
        elif decided is not None:
            taken[:, gated] = torch.from_numpy(decided)
        moved = flops_moved(trained.compiled, shape, route, taken) if trained.folded.routes else 0.0
        found[name] = _form(theirs, taken, labels, scores, gates) | {"executed": (own + moved) / dense}
        if name != "int8.onnx":
            same = torch.equal(theirs.argmax(1), of_compiled.argmax(1)) and torch.equal(taken, route)
            close = CLOSE * max(1.0, of_compiled.abs().max().item())
            found[name]["equal"] = same and (theirs - of_compiled).abs().max().item() <= close
    return found


def _form(
    scores: Tensor, route: Tensor, labels: Tensor, trained: Tensor | None = None, gates: Tensor | None = None
) -> dict[str, float]:
    """What the test set says of a form's scores (B, K) and route (B, N), beside the `trained` network's."""
    found = {"accuracy": (scores.argmax(1) == labels).float().mean().item(), "mean_gate": route.float().mean().item()}
    if trained is None:
        return found
    return found | {
        "same_class": (scores.argmax(1) == trained.argmax(1)).float().mean().item(),
        "same_route": 1 - routed_otherwise(gates, route),
        "largest_difference": (scores - trained).abs().max().item(),
    }


def _sizes(network: GatedNetwork) -> dict[str, int]:
    return {
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "blocks": sum(block.residual is not None for block in network.blocks),
    }


def routed_otherwise(before: Tensor, after: Tensor) -> float:
    """The fraction of images whose route (B, N) is another."""
    return torch.ne(before, after).any(1).float().mean().item()


@torch.inference_mode()
def eager_forward(network: GatedNetwork, images: Tensor) -> tuple[Tensor, Tensor, float]:
    """Scores and gates (B, N) of a network as it is trained, and the FLOPs that an image took."""
    with FlopCounterMode(display=False) as counter:
        outputs = [network(part) for part in images.split(BATCH)]
    scores = torch.cat([output.logits for output in outputs])
    flops = counter.get_total_flops() / len(images)
    if outputs[0].routing is None:  # every gate has settled
        alike = torch.tensor([block.residual is not None for block in network.blocks])
        return scores, alike.expand(len(images), -1), flops
    return scores, torch.cat([output.routing.gates for output in outputs]).bool(), flops


def _into_record(folder: Path, card: dict[str, Any], changes: Changes) -> None:
    """What a run that was trained by an earlier version does not have."""
    record = read_record(folder)
    if record.compiled is not None or "flops" not in record.model_fields_set or is_locked(folder):
        return
    form, images = card["forms"]["compiled"], card["test_images"]
    compiled = changes.recorded(form["executed"], round(form["same_class"] * images), images)
    with locked(folder, wait=False):
        flops = record.flops.replace(compiled=form["executed"])
        write_record(folder, record.replace(flops=flops, compiled=compiled))


def show(card: dict[str, Any]) -> None:
    images, blocks = card["test_images"], len(card["compiled"]["blocks"])
    rows = [
        (
            name,
            console.percent(form["accuracy"]),
            *(f"{round((1 - form[key]) * images)}" if key in form else "" for key in ("same_class", "same_route")),
            *(f"{form[key]:.3f}" for key in ("mean_gate", "executed")),
            f"{form['parameters']:,}" if "parameters" in form else "",
            f"{form['blocks']} of {blocks}" if "blocks" in form else "",
            f"{form['largest_difference']:.1e}" if "largest_difference" in form else "",
        )
        for name, form in card["forms"].items()
    ]
    columns = ("form", "accuracy", "other class", "other route", "mean gate", "FLOPs", "parameters", "blocks")
    console.show_table(
        f"{card['name']} on {images} test images of {card['data']}", (*columns, "largest difference"), rows
    )
    for change in card["compiled"]["blocks"]:
        console.say(str(BlockChange(**change | {"action": Action[change["action"]]})))
    for name, form in card["forms"].items():
        if form.get("equal") is False:
            console.say(f"warning: {name} is not the compiled network: a route, a class or a score differs")
    if card["executed"] >= 1:
        console.say("no block is closed for all images, and none is skipped before F: nothing is saved")
    gained = card["forms"]["int8.onnx"]["accuracy"] - card["forms"]["compiled"]["accuracy"]
    console.say(f"int8 changes the accuracy by {100 * gained:+.2f} points")
    console.say(
        f"gates were asked for {card['compiled']['asked']}; other class, other route: of how many test images, beside "
        f"the trained network; FLOPs: executed, the dense network = 1; {card['checkpoint']}"
    )
    console.say(f"written to {card['folder']}")
