"""Keeps record.json up to date: running from the first step, failed when an exception ends it."""

import resource
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning.pytorch as L

from cosinegate.lit import LitCosineGate
from cosinegate.loggers import MetricsCSV
from cosinegate.record import accuracies, provenance, write_record


class RunRecord(L.Callback):
    """`facts` is what is known before the run starts; `record` is what record.json holds."""

    def __init__(self, folder: Path, metrics: MetricsCSV, facts: dict[str, Any], before: dict[str, Any] | None) -> None:
        self.folder = folder
        self.metrics = metrics
        self.record = facts
        self.seconds_before = (before or {}).get("seconds", 0.0)
        self.started = (before or {}).get("started", _now())
        self.first_step_at: float | None = None

    def start(self, trainer: L.Trainer) -> None:
        """Marks the folder as this run's before anything else is written there."""
        self.begin = time.monotonic()
        self.record |= {"status": "running", "started": self.started} | provenance()
        self._write(trainer, done=len(self.metrics.rows))

    def on_fit_start(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        gates = [p for block in pl_module.network.blocks if block.gate for p in block.gate.parameters()]
        self.record["parameters"] = sum(p.numel() for p in pl_module.network.parameters())
        self.record["gate_parameters"] = sum(p.numel() for p in gates)
        self._write(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        self.images = 0
        self.epoch_begin = self.last_step = time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LitCosineGate, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.images += len(batch[1]) * trainer.world_size
        self.last_step = time.monotonic()
        if self.first_step_at is None:
            self.first_step_at = time.time()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        """Before the checkpoint of this epoch: whatever a resumed run starts from, its past is on disk."""
        speed = {
            "speed/images_per_second": self.images / max(self.last_step - self.epoch_begin, 1e-9),  # training alone
            "speed/epoch_seconds": time.monotonic() - self.epoch_begin,  # with validation
        }
        pl_module.log_dict(speed, sync_dist=True)
        known = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.metrics.log_metrics(known | speed | {"epoch": trainer.current_epoch})
        self.metrics.save()
        self._write(trainer, done=trainer.current_epoch + 1)

    def on_exception(self, trainer: L.Trainer, pl_module: LitCosineGate, exception: BaseException) -> None:
        words = " ".join(f"{type(exception).__name__}: {exception}".split())
        interrupted = isinstance(exception, KeyboardInterrupt)
        self.record |= {"status": "failed", "error": "interrupted" if interrupted else words[:500]}
        self._write(trainer)

    def finish(self, trainer: L.Trainer, results: dict[str, Any]) -> None:
        """Adds what the last evaluation found."""
        self.record |= results | {"status": "finished"}
        self._write(trainer)

    def _write(self, trainer: L.Trainer, done: int | None = None) -> None:
        if not trainer.is_global_zero:
            return
        rows = self.metrics.rows
        last = rows[max(rows)] if rows else {}
        self.record["epochs"] = {"planned": trainer.max_epochs, "done": trainer.current_epoch if done is None else done}
        self.record["accuracy"] = accuracies(rows) | self.record.get("accuracy", {})
        self.record |= {
            "images_per_second": last.get("speed/images_per_second"),
            "seconds": self.seconds_before + time.monotonic() - self.begin,
            "peak_memory_mib": peak_memory_mib(),
            "first_step_at": self.first_step_at,
            "updated": _now(),
        }
        write_record(self.folder, self.record)


def peak_memory_mib() -> float:
    """The most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
