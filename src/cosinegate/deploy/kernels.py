"""Where the time of a deployed network goes, by onnxruntime's profiler and by torch's."""

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from cosinegate.deploy.onnx_forms import session
from cosinegate.deploy.runtime import Runtime

KINDS = {  # of operators; those that are not here are "other"
    "convolutions": ("Conv", "FusedConv"),
    "layout": ("ReorderInput", "ReorderOutput", "Transpose", "MaxPool"),
    "branches": ("If",),  # without what runs in them
    "selecting": ("NonZero", "Gather", "GatherND", "ScatterND", "ScatterElements"),
    "statistics": ("ReduceMean", "ReduceMax", "ReduceL2", "GlobalAveragePool", "GlobalMaxPool", "AveragePool"),
    "matrix products": ("Gemm", "FusedGemm", "MatMul", "FusedMatMul"),
}
TORCH_KINDS = {  # the same, by a part of the operators' names; the first that fits
    "convolutions": ("conv",),
    "selecting": ("index", "nonzero", "arange", "copy_"),
    "statistics": ("statistics", "mean", "var", "std", "max", "sum", "sqrt", "square"),
    "matrix products": ("mm", "linear"),
}
CALLS = 64  # of a network that torch's profiler watches: it takes 40 ms for each
KIND_OF = {operator: kind for kind, operators in KINDS.items() for operator in operators}


def kernel_times(path: Path, images: np.ndarray, batch: int, scratch: Path) -> dict[str, float]:
    """ms an image of every kind of operator of an ONNX file, on one thread; `between` is what no operator takes."""
    model = session(path, 1, profile=scratch / path.stem)
    for start in range(0, len(images), batch):
        model.run(None, {"images": images[start : start + batch]})
    events = json.loads(Path(model.end_profiling()).read_text())
    whole = sum(event["dur"] for event in events if event["name"] == "model_run")
    nodes = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
    outer = [event for event in nodes if event["args"]["op_name"] == "If"]
    spent: Counter[str] = Counter()
    for event in nodes:
        spent[KIND_OF.get(event["args"]["op_name"], "other")] += event["dur"]
        around = [o for o in outer if o is not event and _within(event, o)]
        if around:
            spent["branches"] -= event["dur"]
    spent["between"] = whole - sum(spent.values())
    return {kind: spent[kind] / 1000 / len(images) for kind in (*KINDS, "other", "between")}


def operator_times(runtime: Runtime, images: Tensor, batch: int) -> dict[str, float]:
    """ms an image of every kind of operator on torch, on one thread; `between` is what none takes."""
    parts = images.split(batch)[:CALLS]
    runtime(parts[0])
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler would print when it starts and stops
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for part in parts:
            with torch.profiler.record_function("whole"):
                runtime(part)
    spent: Counter[str] = Counter()
    for event in profiled.key_averages():
        if event.key == "whole":
            spent["between"] += event.self_cpu_time_total
        else:
            spent[torch_kind(event.key)] += event.self_cpu_time_total
    number = sum(map(len, parts))
    return {kind: spent[kind] / 1000 / number for kind in (*TORCH_KINDS, "other", "between")}


def torch_kind(operator: str) -> str:
    return next((kind for kind, parts in TORCH_KINDS.items() if any(part in operator for part in parts)), "other")


def _within(event: dict, other: dict) -> bool:
    return other["ts"] <= event["ts"] and event["ts"] + event["dur"] <= other["ts"] + other["dur"]
