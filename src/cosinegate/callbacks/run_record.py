"""Keeps record.json up to date: running from the first step; stopped, failed or finished at the end."""

import contextlib
import math
import resource
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

from cosinegate.callbacks.cut import Cut
from cosinegate.callbacks.loggers import MetricsCSV
from cosinegate.callbacks.schedule import AtEpochStart
from cosinegate.hardware.memory import give_back_freed_memory
from cosinegate.lit import LitCosineGate
from cosinegate.runs.lineage import spans, what_changed
from cosinegate.runs.record import Epochs, Record, accuracies, now, provenance, write_record
from cosinegate.terminal.errors import UserError
from cosinegate.terminal.signals import Stopped


class RunRecord(AtEpochStart):
    """A callback that writes record.json; `facts` is what is known before the run starts."""

    def __init__(self, *, folder: Path, metrics: MetricsCSV, facts: dict[str, Any]) -> None:
        self.folder = folder
        self.metrics = metrics
        self.record = Record(status="running", epochs=Epochs(done=0), **facts)
        self.first_step_at: float | None = None
        self.tested: dict[str, Any] = {}

    def start(self, trainer: L.Trainer, before: Record | None, epochs: int, inside: bool) -> str | None:
        """Marks the folder as this run's before anything else is written there.

        `before` is the record that the folder held; the run resumes after so many `epochs`, perhaps `inside` the next.
        Returns in words how the program has changed since, or None.
        """
        self.seconds_before = (before and before.seconds) or 0.0
        self.started = (before and before.started) or now()
        self.first_step_at = before and before.first_step_at
        self.begin = time.monotonic()
        self.record = self.record.replace(started=self.started, **provenance())
        self.record.trained_by = spans(before, epochs, inside, trainer.max_epochs, self.record)
        self._write(trainer)
        return what_changed(before, self.record) if before is not None and epochs + inside > 0 else None

    def on_fit_start(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        gates = {p for block in pl_module.network.blocks if block.gate for p in block.gate.parameters()}
        self.record.parameters = sum(p.numel() for p in pl_module.network.parameters())
        self.record.gate_parameters = sum(p.numel() for p in gates)
        self._write(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        super().on_train_start(trainer, pl_module)
        if ended_by(trainer) is not None:  # before this start, which only its test is left for
            trainer.should_stop = True

    def on_fit_end(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        steps = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches) * trainer.max_epochs
        if trainer.global_step < steps:
            self.record.ended_early = by = ended_by(trainer) or "trainer.should_stop"
            if not accuracies(self.metrics.rows):
                raise UserError(f"{by} ended the run before its first validation: it has no accuracy")

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        self.images = 0
        self.validated = False
        self.epoch_begin = self.last_step = time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LitCosineGate, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.images += len(batch[1]) * trainer.world_size
        self.last_step = time.monotonic()
        if self.first_step_at is None:
            self.first_step_at = time.time()

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        self.validated = True

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: LitCosineGate) -> None:
        """Writes metrics and record before the epoch's checkpoint: a resumed run finds its past on disk."""
        speed = {"speed/images_per_second": self.images / max(self.last_step - self.epoch_begin, 1e-9)}
        pl_module.log_dict(speed, sync_dist=True)
        known = {name: float(value) for name, value in trainer.callback_metrics.items() if self._is_news(name)}
        self.metrics.log_metrics(known | speed | {"epoch": trainer.current_epoch})
        self.metrics.save()
        self._write(trainer)
        give_back_freed_memory()

    def _is_news(self, name: str) -> bool:
        """Returns whether a metric is of this epoch: lightning keeps the last validation's where an epoch has none."""
        kept = name.startswith(("train/", "schedule/", "speed/", "gates/relaxed"))
        return kept or (self.validated and name.startswith(("val/", "gates/", "cir/", "flops/")))

    def on_exception(self, trainer: L.Trainer, pl_module: LitCosineGate, exception: BaseException) -> None:
        if isinstance(exception, Stopped):
            self.record.status, self.record.error = "stopped", exception.reason
        else:
            words = " ".join(f"{type(exception).__name__}: {exception}".split())
            words = words.encode(errors="backslashreplace").decode()  # names of files need not be UTF-8
            self.record.status, self.record.error = "failed", words[:500]
        with contextlib.suppress(OSError):  # of a disk that is full, the first error says so
            self._write(trainer)

    def finish(self, trainer: L.Trainer, tested: dict[str, Any], results: dict[str, Any]) -> None:
        """Writes the results of the test, and the status `finished`."""
        self.tested = tested
        self._write(trainer, results | {"status": "finished"})

    def _write(self, trainer: L.Trainer, results: dict[str, Any] | None = None) -> None:
        rows = self.metrics.rows
        span = self.record.trained_by[-1].epochs
        span[1] = max(*span, *rows)
        last = rows[max(rows)] if rows else {}
        figures = {
            "epochs": {"planned": trainer.max_epochs, "done": max(rows, default=0)},
            "accuracy": accuracies(rows) | self.tested,
            "mean_gate": last.get("gates/mean"),
            "skip_percent": last.get("gates/skip_percent"),
            "flops": {"counted": last.get("flops/counted"), "executed": last.get("flops/executed")},
            "dynamic_blocks": last.get("gates/dynamic_blocks"),
            "paths": last.get("gates/paths"),
            "images_per_second": last.get("speed/images_per_second"),
            "seconds": self.seconds_before + time.monotonic() - self.begin,
            "peak_memory_mib": peak_memory_mib(),
            "first_step_at": self.first_step_at,
            "updated": now(),
        }
        self.record = self.record.replace(**figures | (results or {}))
        if trainer.is_global_zero:
            write_record(self.folder, self.record)


def ended_by(trainer: L.Trainer) -> str | None:
    """Returns what ended the training before its last epoch, or None."""
    for callback in trainer.callbacks:
        if isinstance(callback, EarlyStopping) and callback.stopping_reason is not EarlyStoppingReason.NOT_STOPPED:
            return f"EarlyStopping on {callback.monitor}"
        if isinstance(callback, Timer) and (left := callback.time_remaining()) is not None and left <= 0:
            return "Timer"
        if isinstance(callback, Cut) and callback.cut is not None:
            return f"trainer.{callback.cut}"
    return None


def peak_memory_mib() -> float:
    """Returns the most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
