"""Times the deployed forms of a run against the dense network in its fastest form, in one process, taking turns."""

import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cosinegate.config.checks import require_positive
from cosinegate.config.choices import Checkpoint, Dynamic
from cosinegate.config.commands import BenchmarkConfig
from cosinegate.config.identity import reference
from cosinegate.data import image_set
from cosinegate.deploy.benchmark_table import MARK, as_markdown, draw
from cosinegate.deploy.engines import DENSE, IMAGES_A_ROUND, Engines, Model, Run
from cosinegate.deploy.exits import EarlyExitNetwork
from cosinegate.deploy.export import forward, move_budget
from cosinegate.deploy.int8 import CALIBRATION_IMAGES
from cosinegate.deploy.onnx_forms import require_exportable, run_onnx, session
from cosinegate.deploy.source import Source, is_the_records, load_source, require_something_to_deploy
from cosinegate.networks.flops import block_flops, dense_flops
from cosinegate.networks.name import network_name
from cosinegate.runs.files import require_writable
from cosinegate.runs.lock import is_locked, locked
from cosinegate.runs.outputs import naming, require_own, write_text
from cosinegate.runs.record import now, provenance, read_record, write_record
from cosinegate.terminal import console
from cosinegate.terminal.errors import UserError
from cosinegate.training.load import chosen_path, load_checkpoint, run_folder_of

ALLOWED = {"many": 0.10, "one": 0.15}  # how much a time ratio may lie above the executed FLOPs where images are routed
ALLOWED_COMPILED = 0.05  # and where nothing is left to route
MANY = 64
PAUSE = 0.03  # seconds: threads that wait for work keep a core busy for a while, and would slow the next engine down
OWN_JSON, OWN_TABLE = r'\{\s*"run": .*"rows": \[', r"# [^\n]* on \w+, \d+ thread\(s\)\n\nTest accuracy "
LATENCY_BATCH = 1  # what `latency_ms` of the record is measured at


@dataclass
class Row:
    """One model at one batch size, in the fastest of its ways to run."""

    model: str
    engine: str  # torch or onnxruntime
    batch: int
    way: str
    ms_per_image: float
    spread: float  # the middle half of the rounds' ratios, as a share of their median; of dense, of its times
    counted: float
    executed: float
    time_ratio: float  # to the dense network on the same engine in the same round, the median over rounds
    to_fastest: float  # to the fastest dense network of any engine
    bar: float | None
    met: bool | None
    ways: dict[str, float]  # ms an image of every way
    rounds: list[float]  # ms an image in each, of the fastest way


def benchmark(asked: BenchmarkConfig) -> dict[str, Any]:
    """Written to `benchmark.json`, `benchmark.md` and `benchmark.png`; latency goes into the run's record."""
    require_positive(asked, "threads", "rounds", "images")
    if not asked.batches or min(asked.batches) < 1:
        raise UserError(f"batches = {list(asked.batches)}: must be numbers of images, each at least 1")
    torch.set_num_threads(asked.threads)
    source = load_source(asked.run, asked.checkpoint, asked.root, asked.data_folder)
    require_something_to_deploy(source)
    folder = Path(asked.output) if asked.output is not None else source.folder / "benchmark"
    path, table, figure = (folder / f"benchmark.{kind}" for kind in ("json", "md", "png"))
    require_own({path: OWN_JSON, table: OWN_TABLE}, {figure: MARK})
    held_out = source.held_out()
    move_budget(source, asked.budget)
    network, _ = source.compile(asked.dynamic, asked.tolerance)
    require_exportable(network, source.path)
    images, labels = source.data.whole_images("test", asked.images)
    if len(images) < max(asked.batches):
        raise UserError(f"batches = {list(asked.batches)}: there are {len(images)} test images")
    others: dict[str, Model] = {}
    for run in asked.against:
        name, model = _dense_run(run, asked.checkpoint, source)
        others[name if name not in others else f"{name} ({len(others) + 1})"] = model
    require_writable(folder)
    console.say(f"counting FLOPs and accuracy on {len(images)} test images")
    scores, route, flops = forward(network, images)
    accuracy = (scores.argmax(1) == labels).float().mean().item()
    counted, executed = route.float().mean().item(), flops / source.reference_flops
    # else the record's accuracy is of another network
    is_exact = asked.budget is None and asked.dynamic is Dynamic.keep and asked.tolerance == 0
    own = source.folder if is_exact and is_the_records(source.path) else None
    name = "exits" if isinstance(network, EarlyExitNetwork) else "routed" if network.has_gates else "compiled"
    models = {
        DENSE: Model(source.dense(), 1.0, 1.0, None),
        name: Model(network, counted, executed, own, is_own=True),
    } | others
    with tempfile.TemporaryDirectory() as scratch, naming(Path(scratch)):
        engines = Engines(models, images[:CALIBRATION_IMAGES], held_out, Path(scratch), asked.threads, asked.compile)
        rows, int8 = [], _int8(name, models[name], source, route, Path(scratch), images, labels)
        for batch in sorted(set(asked.batches)):
            console.say(f"timing batch {batch}: {asked.rounds} rounds of every model in turn")
            rows += _rows(models, int8, engines.at(batch), batch, images, asked.rounds)
        console.say("profiling both engines")
        kernels = {str(batch): engines.kernels(batch, images) for batch in _profiled(rows)}
    found = {
        "run": str(source.folder),
        "data": source.data.image_set.name,
        "threads": asked.threads,
        "dense": network_name(reference(source.config.network)),
        "budget": asked.budget,
        "dynamic": asked.dynamic.name,
        "tolerance": asked.tolerance,
        "model": name,
        "blocks": [sum(block.residual is not None for block in network.blocks), len(network.blocks)],
        "accuracy": accuracy,
        "counted": counted,
        "executed": executed,
        "int8": int8,
        "rows": [asdict(row) for row in rows],
        "kernels": kernels,
        "provenance": provenance(),
    }
    write_text(path, json.dumps(found, indent=2) + "\n")
    write_text(table, as_markdown(found))
    draw(found, figure)
    _into_records(models, rows, asked.threads)
    return found | {"folder": str(folder)}


def _int8(
    name: str, model: Model, source: Source, route: Tensor, folder: Path, images: Tensor, labels: Tensor
) -> dict[str, float]:
    """Of the run's network: accuracy, and FLOPs, for rounding moves some images over a threshold."""
    scores, taken = run_onnx(session(folder / f"{name}-int8.onnx", 1), images.contiguous().numpy(), MANY)
    found = {"accuracy": (torch.from_numpy(np.asarray(scores)).argmax(1) == labels).float().mean().item()}
    if taken is None:
        return found | {"counted": model.counted, "executed": model.executed}
    taken = torch.from_numpy(np.asarray(taken)).float()
    inner = model.network.network if isinstance(model.network, EarlyExitNetwork) else model.network
    moved = (taken.mean(0) - route.float().mean(0)) * block_flops(inner, source.data.image_set.shape)
    executed = model.executed + moved.sum().item() / source.reference_flops
    return found | {"counted": taken.mean().item(), "executed": executed}


def _rows(
    models: dict[str, Model],
    int8: dict[str, float],
    ways: dict[tuple[str, str], dict[str, Run]],
    batch: int,
    images: Tensor,
    rounds: int,
) -> list[Row]:
    """Every round takes other images, the same for all models, and enough of them that no single route decides."""
    times: dict[tuple[str, str, str], list[float]] = {
        (*model, way): [] for model, by_way in ways.items() for way in by_way
    }
    number = batch * -(-IMAGES_A_ROUND // batch)
    for place in range(-1, rounds):  # the first warms up
        start = max(place, 0) * number % max(1, len(images) - number + 1)
        rows = images[start : start + number]
        layouts = {"torch": rows.contiguous(memory_format=torch.channels_last), "onnx": rows.contiguous()}
        for model, by_way in ways.items():
            for way, run in by_way.items():
                batches = layouts["torch" if model[1] == "torch" else "onnx"].split(batch)
                time.sleep(PAUSE)
                run(batches[0])
                begin = time.perf_counter()
                for part in batches:
                    run(part)
                if place >= 0:
                    times[*model, way].append((time.perf_counter() - begin) * 1000 / len(rows))
    best: dict[tuple[str, str], tuple[str, list[float]]] = {}
    for (model, engine, way), found in times.items():
        if (model, engine) not in best or statistics.median(found) < statistics.median(best[model, engine][1]):
            best[model, engine] = way, found
    medians = {key: statistics.median(found) for key, (_, found) in best.items()}
    all_ways = {key: {way: statistics.median(times[*key, way]) for way in by_way} for key, by_way in ways.items()}
    fastest = min(value for (name, _), value in medians.items() if name == DENSE)
    made = []
    for (name, engine), (way, found) in best.items():
        model, median = models[name], medians[name, engine]
        ratios = [own / dense for own, dense in zip(found, best[DENSE, engine][1], strict=True)]
        ratio = statistics.median(ratios)  # of one round: a machine that slows down slows both
        bar = _bar(model, engine, batch)
        low, high = np.percentile(found if name == DENSE else ratios, [25, 75])
        middle = median if name == DENSE else ratio
        met = None if bar is None else ratio <= bar
        flops = model.counted, model.executed
        if model.is_own and "int8" in engine:
            flops = int8["counted"], int8["executed"]
        made.append(
            Row(
                name,
                engine,
                batch,
                way,
                median,
                (high - low) / middle,
                *flops,
                ratio,
                median / fastest,
                bar,
                met,
                all_ways[name, engine],
                found,
            )
        )
    return sorted(made, key=lambda row: row.engine)


def _profiled(rows: list[Row]) -> list[int]:
    """The smallest batch, the largest, and those at which a bar is missed."""
    batches = [row.batch for row in rows]
    return sorted({min(batches), max(batches), *(row.batch for row in rows if row.met is False)})


def _bar(model: Model, engine: str, batch: int) -> float | None:
    """The time ratio that the run's network is allowed."""
    if not model.is_own or "int8" in engine or (batch != 1 and batch < MANY):
        return None
    if not model.routes:
        return model.executed + ALLOWED_COMPILED
    if batch >= MANY:
        return model.executed + ALLOWED["many"]
    return model.executed + ALLOWED["one"] if engine == "onnxruntime" else None


def _dense_run(run: str, checkpoint: Checkpoint | None, beside: Source) -> tuple[str, Model]:
    """A run of a dense network on the same data, with its FLOPs over those that are 1 in the table."""
    path = chosen_path(run, checkpoint)
    module, config = load_checkpoint(path)
    if module.network.has_gates:
        raise UserError(f"against = {run}: has gates; give runs of dense networks")
    theirs, ours = image_set(config.data).name, beside.data.image_set.name
    if theirs != ours:
        raise UserError(f"against = {run}: is on {theirs}, not on {ours}")
    executed = dense_flops(module.network, beside.data.image_set.shape) / beside.reference_flops
    name = f"{config.name} {network_name(config.network)} s{config.seed}"
    own = run_folder_of(path) if is_the_records(path) else None
    return name, Model(module.network, executed, executed, own)


def _into_records(models: dict[str, Model], rows: list[Row], threads: int) -> None:
    """`latency_ms`: the fastest form of a run at batch 1, all measured in the same minutes.

    `time_ratio`, to the dense network on the same engine, can be compared with what another minute measured.
    """
    for name, model in models.items():
        measured = [row for row in rows if row.batch == LATENCY_BATCH and row.model == name]
        measured = [row for row in measured if "int8" not in row.engine]  # its accuracy is not the record's
        if model.folder is None or not (model.folder / "record.json").exists() or not measured:
            continue
        if is_locked(model.folder):
            console.say(f"a process is at work in {model.folder}: its record gets no latency")
            continue
        best = min(measured, key=lambda row: row.ms_per_image)
        how = {"batch": best.batch, "engine": best.engine, "threads": threads, "time_ratio": best.time_ratio}
        latency = {"latency_ms": best.ms_per_image, "latency": how | {"measured": now()}}
        with locked(model.folder, wait=False), naming(model.folder / "record.json"):
            write_record(model.folder, read_record(model.folder).replace(**latency))
