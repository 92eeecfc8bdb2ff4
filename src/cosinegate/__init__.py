"""CosineGate: residual networks whose blocks a gate opens or closes for each sample.

    net = cosinegate.add_gates(model, gate="cosine", gamma=-2.5, example=images[:2])
    loss = cosinegate.CosineGateLoss(lambda_flops=3, lambda_cons=0.01, tau_target=0.7, warmup_epochs=40)
    small, changes = cosinegate.compile_gates(net, held_out_images)
    early = cosinegate.add_exits(small, loader, budget=0.7)
    again = cosinegate.load("runs/balanced/<run>")

Import it before timm or torchvision, whose import it mends beside a CPU build of torch.
"""

import importlib
import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cosinegate.api import add_exits, compile_gates, load
    from cosinegate.networks.adapt import Part, add_gates, parts
    from cosinegate.objective import CosineGateLoss

__all__ = ["CosineGateLoss", "Part", "add_exits", "add_gates", "compile_gates", "load", "parts"]

_ROOMS = {  # imported when they are first used: a command's mistake is answered before torch is there
    "add_gates": "networks.adapt",
    "parts": "networks.adapt",
    "Part": "networks.adapt",
    "CosineGateLoss": "objective",
    "compile_gates": "api",
    "add_exits": "api",
    "load": "api",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'cosinegate' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"cosinegate.{_ROOMS[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _BeforeTorchvision(MetaPathFinder):
    """Mends torchvision right before its first import, by lightning, torchmetrics or us. Commands that need none of
    them, nor torch, then do not wait for it.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            from cosinegate.hardware.operators import define_missing

            define_missing()


sys.meta_path.insert(0, _BeforeTorchvision())
