"""Evaluates a checkpoint, or what was exported of one, with hard gates."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from cosinegate import console
from cosinegate.analysis.routes import Routes
from cosinegate.callbacks.flops import ExecutedFlops
from cosinegate.callbacks.gate_statistics import GateStatistics
from cosinegate.callbacks.route_collector import RouteCollector
from cosinegate.cli import compose
from cosinegate.commands import EvaluateConfig
from cosinegate.config import is_batches, is_number, is_plain_name, require_positive, validate
from cosinegate.data import IMAGE_SETS
from cosinegate.data.module import ImageData
from cosinegate.deploy.flops import dense_flops, deployed_flops
from cosinegate.deploy.skipping import SkippingNetwork
from cosinegate.deploy.weights import read_export
from cosinegate.dynamic import routed_percent
from cosinegate.errors import UserError
from cosinegate.foreign import first_line
from cosinegate.lit import LitCosineGate
from cosinegate.networks import Output, Routing
from cosinegate.routing import RoutingMetric, RoutingSummary
from cosinegate.run import asked_too_much, build_trainer, check_limit, quiet
from cosinegate.saved import checkpoint_path, load_checkpoint


def evaluate(asked: EvaluateConfig) -> tuple[dict[str, Any], RoutingSummary, tuple[str, ...]]:
    """What the test set says of a checkpoint: as plain values, as the routing summary, and the names of the classes."""
    quiet()
    require_positive(asked, "threads")
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    if not is_batches(asked.limit_batches):
        raise UserError(f"limit_batches = {asked.limit_batches}: must be null, a number of batches or a share")
    if is_exported(Path(asked.run)):
        return _evaluate_exported(asked)
    path = checkpoint_path(Path(asked.run), asked.checkpoint.name)
    module, config = load_checkpoint(path)
    config.data.root, config.data.folder = asked.root or config.data.root, asked.folder or config.data.folder
    config.trainer.enable_progress_bar = config.trainer.enable_progress_bar and not asked.json
    data = ImageData(config.data, config.seed)
    statistics, executed = GateStatistics(), ExecutedFlops(dense_flops(module.network, data.image_set.shape))
    tested = _test(module, config, data, [statistics, executed], asked.accelerator, asked.limit_batches)
    summary, classes = statistics.summary, data.image_set.classes
    flops = {"counted": summary.mean_gate, "executed": executed.executed, "dense_per_image": executed.dense}
    facts = {"checkpoint": str(path), "experiment": config.name, "data": config.data.name.name}
    return _result(facts, tested["test/acc"], tested["test/loss"], summary, flops, classes), summary, classes


def is_exported(run: Path) -> bool:
    """Whether a folder holds an export and no run."""
    return (run / "card.json").exists() and not (run / "checkpoints").exists()


@torch.inference_mode()
def _evaluate_exported(asked: EvaluateConfig) -> tuple[dict[str, Any], RoutingSummary, tuple[str, ...]]:
    """The same of an export's folder, by its weights and its card."""
    if asked.accelerator not in ("cpu", "auto"):
        raise UserError(f"accelerator = {asked.accelerator}: what was exported is evaluated on the cpu")
    card, network = read_export(asked.run)
    data = _data_of(card, asked)
    classes, loader = data.image_set.classes, data.test_dataloader()
    if network.classes != len(classes):
        raise UserError(f"run = {asked.run}: has {network.classes} classes, {data.image_set.name} {len(classes)}")
    limit = asked.limit_batches or 1.0
    batches = int(len(loader) * limit) if isinstance(limit, float) else limit
    runtime, metric = SkippingNetwork(network), RoutingMetric(len(classes), len(network.blocks))
    loss, routes = 0.0, []
    for images, labels in itertools.islice(loader, batches):
        scores = runtime(images)
        loss += torch.nn.functional.cross_entropy(scores, labels, reduction="sum").item()
        routes.append(runtime.gates)
        unknown = torch.full(runtime.gates.shape, torch.nan)
        metric.update(Output(scores, Routing(runtime.gates, *[unknown] * 5)), labels)
    if not routes:
        raise UserError(f"limit_batches = {asked.limit_batches}: is not one of the {len(loader)} batches")
    summary = dataclasses.replace(metric.compute(), cir=None)
    images = int(summary.count.sum())
    executed = deployed_flops(network, torch.cat(routes), data.image_set.shape) / card["dense_flops"]
    flops = {"counted": summary.mean_gate, "executed": executed, "dense_per_image": card["dense_flops"]}
    facts = {"checkpoint": str(asked.run), "experiment": card["name"], "data": data.image_set.name}
    accuracy = summary.correct.sum().item() / images
    return _result(facts, accuracy, loss / images, summary, flops, classes), summary, classes


def _data_of(card: dict[str, Any], asked: EvaluateConfig) -> ImageData:
    """The data set that a card names, normalised as it says."""
    path, name, given, dense = (
        Path(asked.run) / "card.json",
        *(card.get(key) for key in ("data", "input", "dense_flops")),
    )
    words = [isinstance(word, str) and is_plain_name(word) for word in (name, card.get("name"))]
    is_known = all(words) and name in IMAGE_SETS and isinstance(given, dict)
    if not is_known or not is_number(dense) or dense < 1:
        raise UserError(f"{path}: not a card of this version: it lacks name, data, input or dense_flops; export again")
    config = compose(f"data={name}")
    try:
        config.data.mean, config.data.std = given["mean"], given["std"]
        validate(config)
    except (UserError, LookupError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: {first_line(error)}") from error
    config.data.root, config.data.folder = asked.root or config.data.root, asked.folder
    data = ImageData(config.data, seed=0)
    data.setup()
    return data


def _result(
    facts: dict[str, str],
    accuracy: float,
    loss: float,
    summary: RoutingSummary,
    flops: dict[str, float],
    classes: tuple[str, ...],
) -> dict[str, Any]:
    cir = [None] * len(summary.open) if summary.cir is None else [c if c == c else None for c in summary.cir.tolist()]
    share = summary.correct / summary.count.clamp_min(1)
    return facts | {
        "images": int(summary.count.sum()),
        "accuracy": accuracy,
        "loss": loss,
        "mean_gate": summary.mean_gate,
        "skip_percent": summary.skip_percent,
        "routed_percent": routed_percent(summary.open.tolist()),
        "dynamic_blocks": summary.dynamic_blocks,
        "paths": summary.paths,
        "flops": flops,
        "blocks": [{"open": o, "cir": c} for o, c in zip(summary.open.tolist(), cir, strict=True)],
        "classes": [
            {"name": name, "images": int(summary.count[k]), "accuracy": share[k].item(), "open": opened.tolist()}
            for k, (name, opened) in enumerate(zip(classes, summary.open_by_class, strict=True))
        ],
    }


def find_routes(module: LitCosineGate, config: DictConfig, limit_batches: Any = None) -> tuple[Routes, ImageData]:
    """The route of every test image, and the data that they are the places of."""
    quiet()
    data, collector = ImageData(config.data, config.seed), RouteCollector()
    _test(module, config, data, [collector], "cpu", limit_batches)
    return collector.routes, data


def _test(
    module: LitCosineGate,
    config: DictConfig,
    data: ImageData,
    callbacks: list[L.Callback],
    accelerator: str,
    limit_batches: Any,
) -> dict[str, float]:
    """Runs the test set through the module on one device, with these callbacks alone."""
    config.callbacks, config.logger = {}, {}
    config.trainer.accelerator, config.trainer.strategy = accelerator, "auto"
    config.trainer.devices = config.trainer.num_nodes = 1
    config.trainer.limit_test_batches = limit_batches
    check_limit("limit_batches", limit_batches, data.batches(1)["test"])
    trainer = build_trainer(config, callbacks, metrics=None)
    with asked_too_much():
        (found,) = trainer.test(module, datamodule=data, verbose=False)
    return found


def show(result: dict[str, Any], summary: RoutingSummary, classes: tuple[str, ...]) -> None:
    """The same for a person."""
    flops = result["flops"]
    console.say(f"{result['experiment']} on {result['data']}: {result['images']} test images, {result['checkpoint']}")
    console.say(f"accuracy {console.percent(result['accuracy'])}   loss {result['loss']:.4f}")
    console.say(
        f"mean gate {result['mean_gate']:.3f}   skip {result['skip_percent']:.1f}%, of which "
        f"{result['routed_percent']:.1f} in dynamic blocks   "
        f"dynamic blocks {result['dynamic_blocks']} of {len(result['blocks'])}   distinct paths {result['paths']}"
    )
    console.say(f"FLOPs counted {flops['counted']:.3f}   executed {flops['executed']:.3f}   (dense network = 1)")
    console.show_routing(summary, classes)
