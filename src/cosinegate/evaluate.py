"""Evaluates a checkpoint, an export or exits with hard gates."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from cosinegate.callbacks.flops import ExecutedFlops
from cosinegate.callbacks.gate_statistics import TestRouting
from cosinegate.callbacks.route_collector import RouteCollector
from cosinegate.callbacks.routes import Routes
from cosinegate.config.choices import Checkpoint
from cosinegate.config.commands import EvaluateConfig
from cosinegate.config.ranges import is_plain_name
from cosinegate.data.folder import move
from cosinegate.data.module import ImageData
from cosinegate.deploy.card import read_network
from cosinegate.deploy.source import is_written_network
from cosinegate.lit import LitCosineGate
from cosinegate.networks.flops import dense_flops
from cosinegate.networks.routing import RoutingSummary
from cosinegate.runs.dynamic import routed_percent
from cosinegate.terminal import console
from cosinegate.terminal.errors import UserError
from cosinegate.training.build import build_objective, dense_network
from cosinegate.training.load import chosen_path, load_checkpoint
from cosinegate.training.trainer import build_trainer, check_limit, lightning_mistakes, quiet


def evaluate(options: EvaluateConfig) -> tuple[dict[str, Any], RoutingSummary, tuple[str, ...]]:
    """Returns the results of the test set as plain values, the routing summary, and the names of the classes."""
    quiet()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    path, module, config, name = load_module(options.run, options.checkpoint)
    move(config.data, options.root, options.data_folder)
    config.trainer.enable_progress_bar = config.trainer.enable_progress_bar and not options.json
    data = ImageData(config.data, config.seed)
    routing, executed = TestRouting(), ExecutedFlops(dense_flops(dense_network(config), data.image_set.shape))
    tested = _test(module, config, data, [routing, executed], options.accelerator, options.limit_batches)
    summary, classes = routing.summary, data.image_set.classes
    flops = {"counted": summary.mean_gate, "executed": executed.executed, "dense_per_image": executed.dense}
    facts = {"checkpoint": str(path), "experiment": name, "data": data.image_set.name}
    return _result(facts, tested["test/acc"], tested["test/loss"], summary, flops, classes), summary, classes


def load_module(run: str, checkpoint: Checkpoint | None) -> tuple[Path, LitCosineGate, DictConfig, str]:
    """Returns path, module, config and name of a run, a checkpoint, or a folder of an export or of exits."""
    if not is_written_network(Path(run)):
        path = chosen_path(run, checkpoint)
        module, config = load_checkpoint(path)
        return path, module, config, config.name
    card, network, config = read_network(run)
    name = card.get("name")
    if not isinstance(name, str) or not is_plain_name(name):
        raise UserError(f"{run}/card.json: name = {str(name)[:80]}: must be a plain name")
    module = LitCosineGate(
        network=network,
        objective=build_objective(config, network),
        optimizer=config.optimizer,
        num_classes=network.num_classes,
        hparams={},
    )
    return Path(run), module, config, name


def _result(
    facts: dict[str, str],
    accuracy: float,
    loss: float,
    summary: RoutingSummary,
    flops: dict[str, float],
    classes: tuple[str, ...],
) -> dict[str, Any]:
    """Returns the results as plain values, for JSON."""
    cir = [None] * len(summary.open) if summary.cir is None else [c if c == c else None for c in summary.cir.tolist()]
    accuracies = summary.correct / summary.count.clamp_min(1)
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
            {"name": name, "images": int(summary.count[k]), "accuracy": accuracies[k].item(), "open": opened.tolist()}
            for k, (name, opened) in enumerate(zip(classes, summary.open_by_class, strict=True))
        ],
    }


def find_routes(module: LitCosineGate, config: DictConfig, limit_batches: Any = None) -> tuple[Routes, ImageData]:
    """Returns the route of every test image, and the data that its indices refer to."""
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
    """Runs the test set through the module on one device, with only these callbacks."""
    config.callbacks, config.logger = {}, {}
    config.trainer.accelerator, config.trainer.strategy = accelerator, "auto"
    config.trainer.devices = config.trainer.num_nodes = 1
    config.trainer.limit_test_batches = limit_batches
    check_limit("limit_batches", limit_batches, data.batches(1)["test"])
    trainer = build_trainer(config, [], callbacks, metrics=None)
    with lightning_mistakes():
        (metrics,) = trainer.test(module, datamodule=data, verbose=False)
    return metrics


def show(result: dict[str, Any], summary: RoutingSummary, classes: tuple[str, ...]) -> None:
    """Prints the results for a person."""
    flops = result["flops"]
    console.say(f"{result['experiment']} on {result['data']}: {result['images']} test images, {result['checkpoint']}")
    console.say(f"accuracy {console.percent(result['accuracy'])}   loss {result['loss']:.4f}")
    console.say(
        f"mean gate {result['mean_gate']:.3f}   skip {result['skip_percent']:.1f}%, of which "
        f"{result['routed_percent']:.1f} in dynamic blocks   "
        f"dynamic blocks {result['dynamic_blocks']} of {len(result['blocks'])}   distinct paths {result['paths']}"
    )
    console.say(f"FLOPs counted {flops['counted']:.3f}   executed {flops['executed']:.3f}   (dense network = 1)")
    show_routing(summary, classes)


def show_routing(summary: RoutingSummary, classes: tuple[str, ...]) -> None:
    """Prints class x block: the fraction of each class's images that compute each block."""
    table = Table(title="fraction of the images that compute each block", title_justify="left")
    table.add_column("class")
    table.add_column("accuracy", justify="right")
    for block in range(summary.open.numel()):
        table.add_column(f"{block}", justify="right")
    for index, name in enumerate(classes):
        right = summary.correct[index] / summary.count[index].clamp_min(1)
        open_fractions = (f"{fraction:.2f}" for fraction in summary.open_by_class[index].tolist())
        table.add_row(console.cell(name), console.percent(right.item()), *open_fractions)
    table.add_section()
    right = summary.correct.sum() / summary.count.sum()
    table.add_row("all", console.percent(right.item()), *(f"{fraction:.2f}" for fraction in summary.open.tolist()))
    if summary.cir is not None:
        table.add_row("CIR", "", *("" if value != value else f"{value:.2f}" for value in summary.cir.tolist()))
    widest = 28 + 7 * summary.open.numel()
    Console(width=max(Console().width, widest)).print(table)  # rather wrapped by the terminal than cut off
