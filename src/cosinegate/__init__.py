"""CosineGate: residual networks whose blocks a gate opens or closes for each sample."""

import sys
from importlib.abc import MetaPathFinder
from typing import Any


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
