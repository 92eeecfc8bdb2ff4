"""One checkpoint at many budgets: thresholds from held-out images, accuracy and executed FLOPs from the test set, or
from the held-out images as well, for a search.

Beside it what the routes know: the accuracy with the gates of another image (`shuffled`), and with every block open for
all images or closed for all, by what most of them have (`rounded`). Gates that route by input are better than both.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from cosinegate import console
from cosinegate.choices import MeasuredOn, Validation
from cosinegate.commands import CalibrateConfig
from cosinegate.config import require_positive
from cosinegate.deploy.eyes import ExitEye
from cosinegate.deploy.flops import dense_flops, forward_flops
from cosinegate.deploy.folded import FoldedNetwork
from cosinegate.deploy.skipping import SkippingNetwork
from cosinegate.deploy.trained import load_trained
from cosinegate.dynamic import DYNAMIC
from cosinegate.errors import UserError
from cosinegate.files import require_writable
from cosinegate.outputs import require_own, save_figure, write_text
from cosinegate.saved import run_folder_of

MARK, OWN = "CosineGate calibrate", r'\{\s*"checkpoint": .*"calibrated_on": '
plt.rcParams["text.parse_math"] = False  # a name with dollars in it is a name


def frontier(asked: CalibrateConfig) -> dict[str, Any]:
    """A point a budget, written to `frontier.json` and `figures/frontier.png` of the run, or to `frontier_held_out`."""
    require_positive(asked, "threads", "images")
    if asked.budgets is not None and not asked.budgets:
        raise UserError("budgets = []: give at least one mean gate, as in budgets=[0.6,0.7]")
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    trained = load_trained(asked.run, asked.checkpoint, asked.root, asked.data_folder)
    on_test = asked.measured_on is MeasuredOn.test
    if not on_test and trained.config.data.validation is not Validation.holdout:
        raise UserError("measured_on = held_out: the run kept no images aside; train with data.validation=holdout")
    least, most = trained.budgets()
    budgets = asked.budgets or [round(most - (most - least) * part * 0.15, 3) for part in range(6)]
    for budget in budgets:
        trained.check_budget(budget)
    folder = run_folder_of(trained.path)
    name = "frontier" if on_test else "frontier_held_out"
    path, figure = folder / f"{name}.json", folder / "figures" / f"{name}.png"
    require_own({path: OWN}, {figure: MARK})
    for place in (folder, folder / "figures"):
        require_writable(place)
    held_out, held_out_labels = trained.data.held_out()
    images, labels = held_out[: asked.images], held_out_labels[: asked.images]
    if on_test:
        images, labels = trained.data.whole_images("test", asked.images)
    dense = dense_flops(trained.eager, trained.data.image_set.shape)
    measured_on = f"{len(images)} {'test images' if on_test else 'of them'}"
    console.say(f"calibrating on {len(held_out)} {trained.held_out_words}; measuring on {measured_on}")
    points = []
    for budget in sorted(budgets):
        trained.calibrate(budget, held_out)
        runtime = SkippingNetwork(trained.folded)
        scores = runtime(images)
        another = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        opened = runtime.gates.float().mean(0)
        flops = sum(forward_flops(trained.eager, part) for part in images.split(250))
        points.append(
            {
                "budget": budget,
                "accuracy": (scores.argmax(1) == labels).float().mean().item(),
                "shuffled": _accuracy(trained.folded, images, labels, runtime.gates[another]),
                "rounded": _accuracy(trained.folded, images, labels, (opened > 0.5).expand_as(runtime.gates)),
                "counted": opened.mean().item(),
                "counted_rounded": (opened > 0.5).float().mean().item(),
                "executed": flops / (len(images) * dense),
                "dynamic_blocks": int(((opened >= DYNAMIC[0]) & (opened <= DYNAMIC[1])).sum()),
                "paths": len(torch.unique(runtime.gates, dim=0)),
                "open": opened.tolist(),
            }
        )
    found = {
        "checkpoint": str(trained.path),
        "calibrated_on": f"{len(held_out)} {trained.held_out_words}",
        "measured_on": asked.measured_on.name,
        "images": len(images),
        "points": points,
    }
    write_text(path, json.dumps(found, indent=2) + "\n")
    _draw(points, trained.config.name, asked.measured_on, figure)
    return found | {"figure": str(figure)}


@torch.no_grad()
def forced(network: FoldedNetwork, images: Tensor, gates: Tensor) -> Tensor:
    """Class scores of images that are given gates (B, N), whatever the network's own would be."""
    x, said = network.enter(images), []
    for block, gate in zip(network.blocks, gates.T, strict=True):
        if isinstance(block.eye, ExitEye):
            said.append((block.eye(x, None)[1], gate))
        x = torch.where(gate[:, None, None, None], block.full(x), block.identity(x))
    scores = network.classify(x)
    for at_exit, gate in reversed(said):  # the first that is closed is where an image leaves
        scores = torch.where(gate[:, None], scores, at_exit)
    return scores


def _accuracy(network: FoldedNetwork, images: Tensor, labels: Tensor, gates: Tensor) -> float:
    parts = zip(images.split(250), gates.split(250), strict=True)
    scores = torch.cat([forced(network, part, of_part) for part, of_part in parts])
    return (scores.argmax(1) == labels).float().mean().item()


def _draw(points: list[dict[str, Any]], name: str, on: MeasuredOn, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    executed, accuracy = ([point[key] for point in points] for key in ("executed", "accuracy"))
    axes.plot(executed, [100 * value for value in accuracy], "o-", color="tab:blue")
    for point in points:
        axes.annotate(
            f"{point['budget']:g}",
            (point["executed"], 100 * point["accuracy"]),
            textcoords="offset points",
            xytext=(0, 6),
            ha="center",
            fontsize=8,
        )
    axes.set(xlabel="FLOPs executed (dense network = 1)", ylabel=f"accuracy (%), {on.name.replace('_', '-')} images")
    axes.set_title(f"{name}: one checkpoint, thresholds calibrated to each budget", fontsize=10)
    axes.grid(alpha=0.3)
    axes.margins(0.1)
    save_figure(figure, path, MARK, dpi=150)
    plt.close(figure)


def show(found: dict[str, Any]) -> None:
    rows = [
        (
            f"{point['budget']:g}",
            console.percent(point["accuracy"]),
            console.percent(point["shuffled"]),
            console.percent(point["rounded"]),
            f"{point['counted']:.3f}",
            f"{point['executed']:.3f}",
            str(point["dynamic_blocks"]),
            str(point["paths"]),
            console.bars(point["open"]),
        )
        for point in found["points"]
    ]
    columns = ("budget", "accuracy", "shuffled", "rounded", "counted", "executed", "dynamic", "paths", "open by block")
    console.show_table(f"{found['checkpoint']}, calibrated on {found['calibrated_on']}", columns, rows)
    console.say(
        "shuffled: with the gates of another image; rounded: every block as most images have it, for all images"
    )
    console.say(f"figure  {found['figure']}")
