"""Two heat maps of the gates: block x epoch and class x block."""

import matplotlib
import numpy as np

from cosinegate.runs.record import Row

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

plt.rcParams["text.parse_math"] = False  # a name with dollars in it is a name


def block_by_epoch(rows: dict[int, Row]) -> Figure:
    """Returns a heat map of the fraction of samples that compute each block, over the validated epochs."""
    names = sorted({name for row in rows.values() for name in row if name.startswith("gates/block_")})
    epochs = sorted(epoch for epoch, row in rows.items() if names and names[0] in row)
    table = np.array([[rows[epoch][name] for epoch in epochs] for name in names])
    return _drawn(table, "block x epoch", "epoch", "block", epochs, list(range(len(names))))


def class_by_block(shares: np.ndarray, classes: tuple[str, ...]) -> Figure:
    """Returns a heat map of the fraction of each class's images that compute each block."""
    return _drawn(shares, "class x block", "block", "class", list(range(shares.shape[1])), list(classes))


def _drawn(table: np.ndarray, title: str, x: str, y: str, columns: list, lines: list) -> Figure:
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    image = axis.imshow(table, aspect="auto", vmin=0, vmax=1, cmap="cividis", interpolation="nearest")
    step = max(1, len(columns) // 16)
    axis.set_xticks(range(0, len(columns), step), [str(name) for name in columns[::step]])
    step = max(1, len(lines) // 32)
    axis.set_yticks(range(0, len(lines), step), [str(name) for name in lines[::step]])
    axis.set(title=f"fraction of samples that compute: {title}", xlabel=x, ylabel=y)
    figure.colorbar(image, ax=axis)
    return figure
