"""Lets a torchvision that was built for CUDA be imported beside a CPU build of torch.

Such a torchvision cannot load its compiled operators, and its import then fails on `torchvision::nms`, which takes
torchmetrics and lightning down with it. We use only its data sets and transforms, so defining the schemas of the
two operators that the import asks for is enough. Where the operators load, nothing is defined.
"""

import importlib.util
from pathlib import Path

import torch

SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_libraries: list[torch.library.Library] = []  # a definition lives as long as its library object


def define_missing() -> None:
    """Defines the schemas of the operators that torchvision's import needs, if its library does not load."""
    if _operators_load():
        return
    for name, schema in SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library = torch.library.Library("torchvision", "FRAGMENT")
            library.define(name + schema)
            _libraries.append(library)


def _operators_load() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True  # nothing to mend
    for path in Path(spec.origin).parent.glob("_C.*so"):
        try:
            torch.ops.load_library(str(path))
            return True
        except OSError:
            return False
    return False
