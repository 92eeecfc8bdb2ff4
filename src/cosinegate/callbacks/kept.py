"""The callbacks that the integrity of a run rests on. Those that a person may switch are in conf/callbacks."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
from omegaconf import DictConfig

from cosinegate.callbacks.checkpoints import Checkpoints
from cosinegate.callbacks.compiled import CompiledNetwork
from cosinegate.callbacks.console import EpochLine
from cosinegate.callbacks.cut import Cut
from cosinegate.callbacks.epoch_sums import EpochSums
from cosinegate.callbacks.flops import ExecutedFlops
from cosinegate.callbacks.gate_statistics import TestRouting
from cosinegate.callbacks.loggers import MetricsCSV
from cosinegate.callbacks.not_finite import NotFiniteState
from cosinegate.callbacks.route_collector import RouteCollector
from cosinegate.callbacks.run_record import RunRecord
from cosinegate.callbacks.schedule import Anneal, LearningRate, Reseed, ShareOut
from cosinegate.callbacks.training_statistics import TrainingStatistics
from cosinegate.config.ranges import seconds
from cosinegate.runs.dynamic import routed_percent
from cosinegate.runs.folder import run_stamp
from cosinegate.runs.record import Record
from cosinegate.terminal.signals import StopRequest


class KeptCallbacks:
    """The callbacks `first` set the schedule; those in `last` keep what was logged."""

    def __init__(
        self, config: DictConfig, *, folder: Path, facts: dict[str, Any], dense_flops: int, job: str | None
    ) -> None:
        self.config, self.metrics, self.stop = config, MetricsCSV(folder), StopRequest()
        self.record = RunRecord(folder=folder, metrics=self.metrics, facts=facts)
        self.routing, self.executed = TestRouting(), ExecutedFlops(dense_flops)
        self.compiled, self.limits = CompiledNetwork(dense_flops), _limits(config.trainer)
        sums = EpochSums()
        self.first: list[L.Callback] = [
            Reseed(config.seed),
            ShareOut(),
            LearningRate(),
            Anneal(config.gate.get("relaxation")),
            *self.limits,
            sums,
            TrainingStatistics(sums),
        ]
        self.last: list[L.Callback] = [
            self.routing,
            self.executed,
            self.compiled,
            RouteCollector(),
            self.record,
            NotFiniteState(folder),
            EpochLine(job),
            Checkpoints(
                folder=folder,
                metrics=self.metrics,
                stop=self.stop,
                minutes=config.save_minutes,
                run_stamp=run_stamp(config),
            ),
        ]

    def finish(self, trainer: L.Trainer, accuracy: float, test_of: str) -> Record:
        """Writes the test results of the `test_of` epoch (best or last), and returns the record."""
        summary, compiled = self.routing.summary, self.compiled.figures
        flops = {
            "counted": summary.mean_gate,
            "executed": self.executed.executed,
            "dense_per_image": self.executed.dense,
        }
        results = {
            "mean_gate": summary.mean_gate,
            "skip_percent": summary.skip_percent,
            "routed_percent": routed_percent(summary.open.tolist()),
            "blocks_open": summary.open.tolist(),
            "dynamic_blocks": summary.dynamic_blocks,
            "paths": summary.paths,
            "flops": flops if compiled is None else flops | {"compiled": compiled["executed"]},
        }
        results |= {} if compiled is None else {"compiled": compiled}
        cut = [limit.cut for limit in self.limits if limit.cut]
        cut += ["overfit_batches"] * (self.config.trainer.overfit_batches > 0)
        results |= {"cut": {key: self.config.trainer[key] for key in cut}} if cut else {}
        self.record.finish(trainer, {"test": accuracy, "test_of": test_of}, results)
        return self.record.record


def _limits(trainer: DictConfig) -> list[Cut]:
    """Returns the callbacks that end training early, as the config asks."""
    if trainer.max_steps == -1 and trainer.max_time is None:
        return []
    return [Cut(trainer.max_steps, None if trainer.max_time is None else seconds(trainer.max_time))]
