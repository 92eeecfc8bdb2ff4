"""Times models in turns, round by round, and compares each with the dense network on the same engine."""

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cosinegate.deploy.engines import DENSE, IMAGES_A_ROUND, Model, Run

ALLOWED = {"many": 0.10, "one": 0.15}  # how much a time ratio may lie above the executed FLOPs where images are routed
ALLOWED_COMPILED = 0.05  # and where nothing is left to route
MANY = 64
PAUSE = 0.03  # seconds: threads that wait for work keep a core busy for a while, and would slow the next engine down

Times = dict[tuple[str, str, str], list[float]]  # ms an image in each round, by model, engine and way to run


@dataclass
class Row:
    """A model at a batch size, in its fastest way to run."""

    model: str
    engine: str  # torch or onnxruntime
    batch: int
    way: str
    ms_per_image: float
    spread: float  # the middle half of the rounds' ratios, over their median; of dense, of its times
    counted: float
    executed: float
    time_ratio: float  # to the dense network on the same engine in the same round, the median over rounds
    to_fastest: float  # to the fastest dense network of any engine
    bar: float | None
    met: bool | None
    ways: dict[str, float]  # ms an image of every way
    rounds: list[float]  # ms an image in each, of the fastest way


def round_times(ways: dict[tuple[str, str], dict[str, Run]], batch: int, images: Tensor, rounds: int) -> Times:
    """Times every model on each round's images, enough of them that no single route decides."""
    times: Times = {(*model, way): [] for model, by_way in ways.items() for way in by_way}
    number = batch * -(-IMAGES_A_ROUND // batch)
    for index in range(-1, rounds):  # the first warms up
        start = max(index, 0) * number % max(1, len(images) - number + 1)
        part = images[start : start + number]
        layouts = {"torch": part.contiguous(memory_format=torch.channels_last), "onnx": part.contiguous()}
        for model, by_way in ways.items():
            for way, run in by_way.items():
                batches = layouts["torch" if model[1] == "torch" else "onnx"].split(batch)
                milliseconds = _milliseconds(run, batches)
                if index >= 0:
                    times[*model, way].append(milliseconds / len(part))
    return times


def _milliseconds(run: Run, batches: tuple[Tensor, ...]) -> float:
    """Returns the time of all batches after a pause and a first batch that is not counted."""
    time.sleep(PAUSE)
    run(batches[0])
    begin = time.perf_counter()
    for batch in batches:
        run(batch)
    return (time.perf_counter() - begin) * 1000


def table_rows(times: Times, models: dict[str, Model], int8: dict[str, float], batch: int) -> list[Row]:
    """Returns a row for each model and engine; `int8` has the FLOPs of the run's network with int8 convolutions."""
    medians = {key: statistics.median(rounds) for key, rounds in times.items()}
    fastest: dict[tuple[str, str], str] = {}
    for model, engine, way in times:
        best = fastest.get((model, engine), way)
        fastest[model, engine] = min(best, way, key=lambda name: medians[model, engine, name])
    dense = {engine: times[name, engine, way] for (name, engine), way in fastest.items() if name == DENSE}
    fastest_dense = min(statistics.median(rounds) for rounds in dense.values())
    rows = []
    for (name, engine), way in fastest.items():
        model, rounds = models[name], times[name, engine, way]
        ratios = [own / other for own, other in zip(rounds, dense[engine], strict=True)]
        ratio = statistics.median(ratios)  # of one round: a machine that slows down slows both
        bar = time_bar(model, engine, batch)
        counted, executed = model.counted, model.executed
        if model.is_own and "int8" in engine:
            counted, executed = int8["counted"], int8["executed"]
        median = medians[name, engine, way]
        rows.append(
            Row(
                model=name,
                engine=engine,
                batch=batch,
                way=way,
                ms_per_image=median,
                spread=_middle_half(rounds) / median if name == DENSE else _middle_half(ratios) / ratio,
                counted=counted,
                executed=executed,
                time_ratio=ratio,
                to_fastest=median / fastest_dense,
                bar=bar,
                met=None if bar is None else ratio <= bar,
                ways={other[2]: medians[other] for other in times if other[:2] == (name, engine)},
                rounds=rounds,
            )
        )
    return sorted(rows, key=lambda row: row.engine)


def _middle_half(values: list[float]) -> float:
    """Returns the distance between the quartiles."""
    low, high = np.percentile(values, [25, 75])
    return high - low


def time_bar(model: Model, engine: str, batch: int) -> float | None:
    """Returns the time ratio that the run's network may have, or None."""
    if not model.is_own or "int8" in engine or (batch != 1 and batch < MANY):
        return None
    if not model.routes:
        return model.executed + ALLOWED_COMPILED
    if batch >= MANY:
        return model.executed + ALLOWED["many"]
    return model.executed + ALLOWED["one"] if engine == "onnxruntime" else None
