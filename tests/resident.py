"""A callback that writes down how much memory the process has taken, after every epoch."""

import json
from pathlib import Path

import lightning.pytorch as L


class Taken(L.Callback):
    """MiB by epoch, in the run's memory.json."""

    def __init__(self) -> None:
        self.after: dict[int, float] = {}

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.after[trainer.current_epoch + 1] = taken_mib()
        (Path(trainer.logger.save_dir) / "memory.json").write_text(json.dumps(self.after))


def taken_mib() -> float:
    """Of the process alone. What is resident beside it are pages of files, over 100 MiB of libraries, which the kernel
    takes and gives back as it sees fit.
    """
    rows = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    kib = {name: int(size) for name, size, *_ in rows}
    return (kib["Anonymous:"] + kib["Swap:"]) / 1024
