"""What a deployed gate sees. Eyes are apart from heads, for one may look for the heads of later blocks too."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from cosinegate import geometry
from cosinegate.deploy.heads import GateHead
from cosinegate.gates import STATISTICS, Seen
from cosinegate.gates.exit import ExitClassifier, doubt, told
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


def classifier(channels: int, classes: int, own: int | None) -> nn.Linear | ExitClassifier:
    """A network's, of a map's means, or an exit's with so many units of its `own`, of all statistics."""
    return nn.Linear(channels, classes) if own is None else ExitClassifier(channels, own, classes)


class ExitEye(Eye):
    """The score (B, 1) of the channels' statistics and of the doubt about the class, and the class scores (B, K) with
    which an image would leave. One which has left keeps its own, and no block is open to it: its score is minus
    infinity. It has left if the score of the eye before lay below `past`, the threshold there.
    """

    kind = "exit"
    carries = True

    def __init__(self, channels: int, hidden: int, classes: int, own: int | None = None) -> None:
        super().__init__()
        self.sizes = {"channels": channels, "hidden": hidden, "classes": classes, "own": own}
        self.classifier = classifier(channels, classes, own)  # a copy of the network's, or the exit's own
        self.layers = GateHead(STATISTICS * channels + 1, hidden)
        self.register_buffer("past", torch.tensor(-math.inf))

    def forward(self, x: Tensor, seen: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        return self.scored(geometry.pooled_statistics(x), seen)

    def scored(self, statistics: Tensor, seen: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Of statistics (B, 3C)."""
        said = told(self.classifier, statistics)
        score = self.layers.score(torch.cat((statistics, doubt(said)), dim=1))
        if seen is None:
            return score, said
        is_here = seen[0] > self.past
        return torch.where(is_here, score, -math.inf), torch.where(is_here, said, seen[1])

    def described(self) -> dict[str, Any]:
        return super().described() | self.sizes


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
