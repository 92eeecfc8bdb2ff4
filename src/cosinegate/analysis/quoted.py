"""What the paper publishes (Tables 2 and 3; section "MNIST Validation"): quoted, never measured here."""

from typing import NamedTuple


class Quoted(NamedTuple):
    name: str
    counted: float  # the mean gate, which the paper calls the FLOPs ratio
    accuracy: float


QUOTED = {
    "cifar10": [
        Quoted("aggressive, epoch 160", 0.759, 0.899),
        Quoted("balanced, epoch 160", 0.715, 0.913),
        Quoted("balanced, peak in epoch 154", 0.722, 0.918),
        Quoted("conservative, epoch 160", 0.888, 0.822),
        Quoted("conservative, peak in epoch 146", 0.871, 0.932),
        Quoted("ResNet-20, epoch 160", 1.0, 0.913),
        Quoted("SkipNet, epoch 160", 0.4, 0.885),
        Quoted("SkipNet, peak in epoch 200", 0.4, 0.910),  # Table 3 gives the same accuracy at 0.6
        Quoted("SLAT", 0.75, 0.921),
    ],
    "mnist": [Quoted("MNIST, within 10 epochs", 0.63, 0.995)],
}
