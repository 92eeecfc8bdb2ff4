"""What a deployed gate sees. Eyes are apart from heads, for one may look for the heads of later blocks too."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.deploy.heads import GateHead
from cosinegate.gates import STATISTICS, Seen
from cosinegate.gates.exit import doubt
from cosinegate.gates.random import fingerprint
from cosinegate.gates.skipnet_recurrent import Cell


class Eye(nn.Module):
    """What is seen of a block's input x, and of what was seen before."""

    kind: str  # its name in a card
    carries = False  # whether it needs what was seen before
    exports = True  # whether ONNX can say it

    def begin(self, images: Tensor) -> Seen:
        return None

    def forward(self, x: Tensor, seen: Seen) -> Seen:
        raise NotImplementedError

    def described(self) -> dict[str, Any]:
        return {"kind": self.kind}


class Statistics(Eye):
    kind = "statistics"

    def forward(self, x: Tensor, seen: Seen) -> Tensor:
        return geometry.pooled_statistics(x)


class ExitEye(Eye):
    """The score of the channels' statistics and of the doubt about the class; that of an image which has left is minus
    infinity, as no block is open to it. It has left if what the eye before saw lay below `past`, the threshold there.
    """

    kind = "exit"
    carries = True

    def __init__(self, channels: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(channels, classes)  # a copy of the network's
        self.layers = GateHead(STATISTICS * channels + 1, hidden)
        self.register_buffer("past", torch.tensor(-math.inf))

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        return self.scored(geometry.pooled_statistics(x).chunk(STATISTICS, dim=1), seen)

    def scored(self, statistics: tuple[Tensor, ...], seen: Tensor | None) -> Tensor:
        """Of the channels' means (B, C) first, and the other statistics."""
        score = self.layers.score(torch.cat((*statistics, doubt(self.classifier(statistics[0]))), dim=1))
        return score if seen is None else torch.where(seen > self.past, score, -math.inf)

    def described(self) -> dict[str, Any]:
        sizes = {"channels": self.classifier.in_features, "classes": self.classifier.out_features}
        return super().described() | sizes | {"hidden": self.layers.w1.out_features}


class Mean(Eye):
    kind = "mean"

    def forward(self, x: Tensor, seen: Seen) -> Tensor:
        return geometry.global_average_pool(x)


class Whole(Eye):
    kind = "whole"

    def forward(self, x: Tensor, seen: Seen) -> Tensor:
        return x


class Memory(Eye):
    """A step of the LSTM whose state went through the blocks before."""

    kind = "memory"
    carries = True

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.embed, self.cell = nn.Linear(channels, hidden), Cell(hidden, hidden)

    def begin(self, images: Tensor) -> tuple[Tensor, Tensor]:
        zero = images.new_zeros(images.shape[0], self.cell.hidden)  # a length would be fixed by tracing
        return zero, zero

    def forward(self, x: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        return self.cell(self.embed(x.mean((2, 3))), seen)

    def described(self) -> dict[str, Any]:
        return super().described() | {"channels": self.embed.in_features, "hidden": self.cell.hidden}


class Fingerprint(Eye):
    """Of the image itself, taken before the first block."""

    kind = "fingerprint"
    carries = True
    exports = False

    def begin(self, images: Tensor) -> Tensor:
        return fingerprint(images)

    def forward(self, x: Tensor, seen: Seen) -> Seen:
        return seen
