"""How a sweep's jobs are launched: side by side, through a queue, killed and gone on with."""

import json
import signal
import subprocess
import time
from concurrent.futures import BrokenExecutor
from pathlib import Path

import pytest
from conftest import ROOT, Started, process, started
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import OmegaConf
from test_sweeps import SHORT, plan

from cosinegate import cli
from cosinegate.runs.lock import is_locked
from cosinegate.runs.record import Epochs, Record, read_metrics, read_record, write_record
from cosinegate.sweeps import jobs as sweep


def results(runs: Path) -> dict[str, object]:
    """What a run computed, by its folder: the record without times, and the metrics without speed."""
    found = {}
    for path in runs.glob("*/*-s*/record.json"):
        record = json.loads(path.read_text())
        kept = {key: record[key] for key in ("status", "epochs", "accuracy", "mean_gate", "flops", "blocks_open")}
        rows = read_metrics(path.parent)
        for row in rows.values():
            del row["speed/images_per_second"]
        found[f"{path.parent.parent.name}/{path.parent.name}"] = (kept, rows)
    return found


def until(condition, running: Started) -> None:
    while not condition():
        assert running.poll() is None, running.stdout.read()
        time.sleep(0.02)


# what the files of sweeps/ ask for


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """A sweep that nothing stopped: two jobs beside each other, through joblib."""
    root = tmp_path_factory.mktemp("whole")
    command = [*SHORT, "seed=0,1,2", "threads=1", f"runs_dir={root}", "hydra/launcher=joblib"]
    done = process("src/train.py", "-m", *command, "hydra.launcher.n_jobs=2")
    assert done.returncode == 0, done.stderr
    return root, done


def test_joblib_trains_side_by_side_and_says_how_far_it_is(whole):
    _, done = whole
    lines = [line.partition(" [")[0] for line in done.stdout.splitlines()]
    places = {}
    for number in (1, 2, 3):
        (places["starts", number],) = [k for k, line in enumerate(lines) if f"job {number} of 3 starts: seed=" in line]
        (places["ends", number],) = [k for k, line in enumerate(lines) if f"job {number} of 3 finished with" in line]
    assert places["starts", 2] < places["ends", 1]  # both at work
    assert "[3 of 3 finished, 0:00:00 left]" in done.stdout
    assert "★" in done.stdout


def test_a_sweep_killed_at_any_moment_ends_with_the_same_records(whole, tmp_path):
    command = ["src/train.py", "-m", *SHORT, "seed=0,1,2", "threads=1", f"runs_dir={tmp_path}"]

    def epochs() -> int:
        return sum(json.loads(path.read_text())["epochs"]["done"] for path in tmp_path.glob("*/*-s*/record.json"))

    for moment in (1, 5):  # in the first job and in the second
        running = started(*command, merged=True)
        until(lambda moment=moment: epochs() >= moment, running)
        running.send_signal(signal.SIGKILL)
        running.wait()
    assert epochs() < 9
    done = process(*command)
    assert done.returncode == 0, done.stderr
    assert "1 finished before, 2 to train" in done.stdout
    assert "resumes after epoch" in done.stdout
    assert results(tmp_path) == results(whole[0])


@pytest.mark.slow
def test_a_killed_parallel_sweep_leaves_no_process_behind(tmp_path):
    command = ["src/train.py", "-m", *SHORT, "seed=0,1", f"runs_dir={tmp_path}", "hydra/launcher=joblib"]
    running = started(*command, "hydra.launcher.n_jobs=3", "trainer.max_epochs=500", merged=True)
    until(lambda: len(list(tmp_path.glob("*/*-s*/checkpoints/last.ckpt"))) == 2, running)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    assert len(children) >= 3  # one of them has no job
    running.send_signal(signal.SIGKILL)
    running.wait()
    folders, deadline = [path.parent for path in tmp_path.glob("*/*-s*/record.json")], time.monotonic() + 30
    while any(Path("/proc", child).exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [child for child in children if Path("/proc", child).exists()]
    assert not any(map(is_locked, folders))  # nobody trains there
    assert [read_record(folder).status for folder in folders] == ["stopped"] * 2


def test_a_failure_stops_and_hides_nothing_and_is_tried_again(tmp_path):
    fault = ["+callbacks.fault._target_=faults.Fault", "+callbacks.fault.seed=0"]
    command = ["src/train.py", "-m", *SHORT, "seed=0,1", "objective.tau_target=0.7,7", *fault, f"runs_dir={tmp_path}"]
    done = process(*command, PYTHONPATH=str(ROOT / "tests"), FAULT="1")
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert len(lines) == 3  # two that no config allows, and the fault
    assert sum("objective.tau_target = 7.0: must be" in line for line in lines) == 2
    (failed,) = [line for line in lines if "RuntimeError: a fault" in line]
    assert Path(failed.split("(more in ")[1].rstrip(")")).read_text().startswith("Traceback")
    states = {path.parent.name[-2:]: json.loads(path.read_text()) for path in tmp_path.glob("*/*-s*/record.json")}
    assert {seed: record["status"] for seed, record in states.items()} == {"s0": "failed", "s1": "finished"}
    assert "digits, resnet8-w8, 3 epochs" in done.stdout  # the table of what finished
    assert not list(tmp_path.glob("*/*-s1/traceback.txt"))
    again = process(*command, PYTHONPATH=str(ROOT / "tests"))
    assert again.returncode == 1  # the two that cannot run are still there
    assert "1 finished before, 1 to train" in again.stdout
    assert "RuntimeError" not in again.stderr
    assert not list(tmp_path.glob("*/*/traceback.txt"))
    assert {json.loads(path.read_text())["status"] for path in tmp_path.glob("*/*-s*/record.json")} == {"finished"}


@pytest.mark.slow
def test_submitit_runs_jobs_through_its_local_executor(tmp_path):
    command = [*SHORT, "trainer.max_epochs=1", "seed=0,1", f"runs_dir={tmp_path}", "hydra/launcher=submitit_local"]
    done = process("src/train.py", "-m", *command)
    assert done.returncode == 0, done.stderr
    assert "[2 of 2 finished, 0:00:00 left]" in done.stdout
    logs = [path.read_text() for path in (tmp_path / ".sweeps" / ".submitit").glob("*/*_log.out")]
    assert sorted("job 1 of 2" in log for log in logs) == [False, True]
    assert {json.loads(path.read_text())["status"] for path in tmp_path.glob("*/*-s*/record.json")} == {"finished"}


class Broken:
    """A launcher whose pool breaks `breaks` times, and whenever `killer` is among its jobs; `finishing` some first."""

    def __init__(self, jobs: list[sweep.Job], breaks: int, finishing: bool, killer: int | None) -> None:
        self.jobs = {f"hydra.job.name='job {job.number} of 3'": job for job in jobs}
        self.breaks, self.finishing, self.killer = breaks, finishing, killer
        self.launched: list[int] = []

    def launch(self, overrides: list[list[str]], first: int) -> list[JobReturn]:
        batch = [self.jobs[word] for line in overrides for word in line if word in self.jobs]
        self.launched.append(len(batch))
        if self.breaks > 0 or self.killer in [job.number for job in batch]:
            self.breaks -= 1
            if self.finishing:
                self._finish(batch[-1])
            raise BrokenExecutor("a worker was killed")
        for job in batch:
            self._finish(job)
        return [JobReturn(status=JobStatus.COMPLETED) for _ in batch]

    def _finish(self, job: sweep.Job) -> None:
        job.folder.mkdir(parents=True, exist_ok=True)
        write_record(job.folder, Record(status="finished", epochs=Epochs(done=3)))


@pytest.mark.parametrize(
    ("breaks", "finishing", "killer", "launched", "failed"),
    [
        (2, True, None, [3, 2, 1], []),  # started again while jobs get further
        (1, False, None, [3, 1, 1, 1], []),  # and after that for one job at a time
        (0, False, 2, [3, 1, 1, 1], [2]),  # so that one that is always killed takes no other with it
        (9, False, None, [3, 1, 1, 1], [1, 2, 3]),
    ],
)
def test_a_broken_pool_fails_only_the_job_that_breaks_it(tmp_path, breaks, finishing, killer, launched, failed):
    jobs = plan(*SHORT, "seed=0,1,2", f"runs_dir={tmp_path}")
    launcher = Broken(jobs, breaks, finishing, killer)
    sweep._launch(jobs, launcher, total=3, threads=None)
    assert launcher.launched == launched
    assert [job.number for job in jobs if job.error is not None] == failed


@pytest.mark.parametrize(
    ("launcher", "jobs", "threads"),
    [
        ({"n_jobs": 2}, 10, 4),
        ({"n_jobs": -1}, 3, 2),
        ({"n_jobs": -1}, 20, 1),
        ({"n_jobs": None, "cpus_per_task": 4}, 5, 4),
        ({"_target_": "submitit.LocalLauncher"}, 4, 2),
        ({"_target_": "hydra.BasicLauncher"}, 4, None),
    ],
)
def test_eight_cores_are_shared_out(monkeypatch, launcher, jobs, threads):
    monkeypatch.setattr("joblib.cpu_count", lambda: 8)
    monkeypatch.setattr("joblib.effective_n_jobs", lambda n: 8 if n == -1 else n)
    assert sweep._shared_threads(OmegaConf.create(launcher), jobs) == threads


def test_slurm_is_a_launcher_that_queues_again():
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(cli.CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        node = loader.load_configuration("train", ["hydra/launcher=slurm"], run_mode=RunMode.MULTIRUN).hydra.launcher
    assert node._target_.endswith("SlurmLauncher")
    assert node.max_num_timeout > 0
