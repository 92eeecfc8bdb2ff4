import json
import signal
import subprocess
import time
from concurrent.futures import BrokenExecutor
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, Started, assert_one_line, process, started
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import OmegaConf
from wandb.sdk.launch.sweeps import utils as wandb_sweeps

from cosinegate import cli, sweep
from cosinegate.config import identity, leaves, primitives
from cosinegate.errors import UserError
from cosinegate.lock import is_locked
from cosinegate.loggers import wandb_logger
from cosinegate.record import read_metrics, read_record, write_record

SHORT = ["+experiment=digits", "trainer.max_epochs=3", "trainer.limit_train_batches=4"]


def plan(*arguments: str) -> list[sweep.Job]:
    """The jobs of `python src/train.py -m <arguments>`."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(cli.CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        master = loader.load_configuration("train", list(arguments), run_mode=RunMode.MULTIRUN)
        node = OmegaConf.to_container(master.hydra.sweeper)
        return sweep.plan(loader, master, node["params"], node["points"], list(master.hydra.overrides.task))


def differences(a: sweep.Job, b: sweep.Job) -> set[str]:
    first, second = (leaves(primitives(job.config)) for job in (a, b))
    return {key for key in first if first[key] != second[key]}


def results(runs: Path) -> dict[str, object]:
    """What a run computed, by its folder: the record without times, and the metrics without speed."""
    found = {}
    for path in runs.glob("*/*/record.json"):
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


def test_pareto_is_a_grid_around_the_papers_three_and_holds_them():
    jobs = plan("+sweeps=pareto")
    named = {job.config.name: job.config.objective for job in jobs if job.config.name != "pareto"}
    assert set(named) == {"aggressive", "balanced", "conservative", "resnet20"}
    grid = {(job.config.objective.lambda_flops, job.config.objective.tau_target) for job in jobs}
    assert grid >= {(x, y) for x in (1.5, 3, 5) for y in (0.5, 0.6, 0.7, 0.8)} | {(2.5, 0.72)}
    assert len(jobs) == 15  # 12 + 4, and the grid's (3, 0.7) is `balanced` itself
    assert len({identity(job.config) for job in jobs}) == 15
    assert {job.config.sweep for job in jobs} == {"pareto"}


def test_seeds_is_one_configuration_over_seeds():
    jobs = plan("+sweeps=seeds", "+experiment=balanced")
    assert [job.config.seed for job in jobs] == [0, 1, 2, 3, 4]
    assert {(job.config.name, identity(job.config)) for job in jobs} == {("balanced", identity(jobs[0].config))}


def test_quick_has_gated_and_dense_runs_with_the_same_seeds():
    jobs = plan("+sweeps=quick")
    assert {job.config.data.name.name for job in jobs} == {"digits"}
    dense = [job for job in jobs if job.config.gate.kind.name == "none"]
    assert [job.config.seed for job in dense] == [0, 1, 2]
    assert len(jobs) == 21


def test_ablation_changes_one_factor_at_a_time():
    base, *others = plan("+sweeps=ablation", "+experiment=digits")
    assert [differences(base, job) for job in others] == [
        {"gate.polarity"},
        {"gate.relaxation.hard"},
        {"objective.lambda_cons"},
        {"gate.controller.enabled"},
        {"objective.warmup_epochs"},
    ]
    assert others[2].config.objective.lambda_cons == others[4].config.objective.warmup_epochs == 0


def test_the_command_line_works_on_top_of_a_sweep():
    jobs = plan("+sweeps=quick", "objective.tau_target=0.4,0.6", "seed=7", "trainer.max_epochs=1")
    assert {job.config.objective.tau_target for job in jobs} == {0.4, 0.6}
    assert {(job.config.seed, job.config.trainer.max_epochs) for job in jobs} == {(7, 1)}
    assert len(jobs) == 2 * 2 + 1  # λ x τ, and the dense point, which looks at neither


def test_names_and_folders_on_the_command_line_are_runs_of_their_own():
    assert [job.config.name for job in plan("+experiment=digits", "name=a,b")] == ["a", "b"]
    assert [job.config.runs_dir for job in plan("+experiment=digits", "runs_dir=a,b")] == ["a", "b"]
    assert len(plan("+experiment=digits", "threads=1,2")) == 1


def test_an_empty_grid_is_refused():
    for arguments in (["seed=range(0,0)"], ["+sweeps=quick", "+hydra.sweeper.params.seed_=''"]):
        with pytest.raises(UserError, match="an empty grid"):
            plan(*arguments)


BAD = [
    (["+sweeps=nope"], ["sweeps/nope", "ablation pareto peers peers_mnist quick seeds"]),
    (["+sweeps=wandb"], ["wandb sweep sweeps/wandb.yaml"]),
    (["+experiment=digits", "seed=range(0,0)"], ["seed=range(0,0)", "an empty grid"]),
    (["+experiment=digits", "objective.tau=0.5,0.6"], ["objective.tau: no such key"]),
    (["seed=-1,-2"], ["seed = -1: must be", "nor can the other 1 of the 2 jobs run"]),
    (["+experiment=digits", "seed=0,1", "trainer=ddp"], ["trainer.devices = 2", "multirun", "one by one"]),
    (["+experiment=digits", "seed=0,1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=0"], ["n_jobs = 0"]),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: " ".join(case[0]))
def test_a_bad_sweep_ends_with_one_line_and_nothing_written(case, tmp_path):
    arguments, fragments = case
    assert_one_line(process("src/train.py", "-m", *arguments, f"runs_dir={tmp_path}/runs"), *fragments)
    assert list(tmp_path.iterdir()) == []


REFUSED = [
    (["objective.tau_target=interval(0,1)"], r"src/search\.py"),
    (["seed=0,1", "run_dir=here"], "run_dir = here.*runs_dir"),
    (["+sweeps=quick,seeds"], "one sweep at a time"),
    (["+sweeps=quick", "+hydra.sweeper.params.seed_=[0,1]"], "without brackets"),
    (["+sweeps=ablation", "hydra.sweeper.points=[]"], "an empty grid"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=lambda value: str(value))
def test_what_no_sweep_can_be_is_refused(arguments, words):
    with pytest.raises(UserError, match=words):
        plan("+experiment=digits", *arguments)


def test_a_dry_run_lists_the_jobs_and_trains_none(tmp_path):
    words = ["+sweeps=quick", "seed=0", "objective.tau_target=0.5,7", "hydra.sweeper.dry_run=true"]
    done = process("src/train.py", "-m", *words, f"runs_dir={tmp_path}/runs")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert lines[0] == "job 1 of 6  objective.lambda_flops=1 objective.tau_target=0.5  (8 epochs left)"
    assert sum("cannot run: objective.tau_target = 7.0" in line for line in lines) == 3
    assert list(tmp_path.iterdir()) == []


def test_a_job_whose_record_is_corrupt_fails_alone(tmp_path):
    first, second = plan(*SHORT, "trainer.max_epochs=1", "seed=0,1", f"runs_dir={tmp_path}")
    for text in ('{"format": 1}', '{"format": 1, "status": "failed"}', "{"):
        first.folder.mkdir(parents=True, exist_ok=True)
        (first.folder / "record.json").write_text(text)
        assert not first.is_finished()
        assert first.epochs_done() == 0
    done = process("src/train.py", "-m", *SHORT, "trainer.max_epochs=1", "seed=0,1", f"runs_dir={tmp_path}")
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if "record.json cannot be read" in line]
    assert "Traceback" not in done.stdout + done.stderr
    assert second.is_finished()


# running them


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
        return sum(json.loads(path.read_text())["epochs"]["done"] for path in tmp_path.glob("*/*/record.json"))

    for moment in (1, 5):  # in the first job and in the second
        running = started(*command, merged=True)
        until(lambda moment=moment: epochs() >= moment, running)
        running.send_signal(signal.SIGKILL)
        running.wait()
    assert epochs() < 9
    done = process(*command)
    assert done.returncode == 0, done.stderr
    assert "1 finished before, 2 to train" in done.stdout
    assert "goes on after epoch" in done.stdout
    assert results(tmp_path) == results(whole[0])


def test_a_killed_parallel_sweep_leaves_no_process_behind(tmp_path):
    command = ["src/train.py", "-m", *SHORT, "seed=0,1", f"runs_dir={tmp_path}", "hydra/launcher=joblib"]
    running = started(*command, "hydra.launcher.n_jobs=2", "trainer.max_epochs=500", merged=True)
    until(lambda: len(list(tmp_path.glob("*/*/checkpoints/last.ckpt"))) == 2, running)
    running.send_signal(signal.SIGKILL)
    running.wait()
    folders, deadline = [path.parent for path in tmp_path.glob("*/*/record.json")], time.monotonic() + 30
    while any(map(is_locked, folders)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_locked, folders))  # nobody trains there
    assert [read_record(folder)["status"] for folder in folders] == ["stopped"] * 2


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
    states = {path.parent.name[-2:]: json.loads(path.read_text()) for path in tmp_path.glob("*/*/record.json")}
    assert {seed: record["status"] for seed, record in states.items()} == {"s0": "failed", "s1": "finished"}
    assert "digits, resnet8-w8, 3 epochs" in done.stdout  # the table of what finished
    assert not list(tmp_path.glob("*/*-s1/traceback.txt"))
    again = process(*command, PYTHONPATH=str(ROOT / "tests"))
    assert again.returncode == 1  # the two that cannot run are still there
    assert "1 finished before, 1 to train" in again.stdout
    assert "RuntimeError" not in again.stderr
    assert not list(tmp_path.glob("*/*/traceback.txt"))
    assert {json.loads(path.read_text())["status"] for path in tmp_path.glob("*/*/record.json")} == {"finished"}


@pytest.mark.slow
def test_submitit_runs_jobs_through_its_local_executor(tmp_path):
    command = [*SHORT, "trainer.max_epochs=1", "seed=0,1", f"runs_dir={tmp_path}", "hydra/launcher=submitit_local"]
    done = process("src/train.py", "-m", *command)
    assert done.returncode == 0, done.stderr
    assert "[2 of 2 finished, 0:00:00 left]" in done.stdout
    logs = [path.read_text() for path in (tmp_path / ".sweeps" / ".submitit").glob("*/*_log.out")]
    assert sorted("job 1 of 2" in log for log in logs) == [False, True]
    assert {json.loads(path.read_text())["status"] for path in tmp_path.glob("*/*/record.json")} == {"finished"}


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
        write_record(job.folder, {"status": "finished", "epochs": {"done": 3}})


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


def test_make_trains_what_is_missing_and_draws_it():
    command = ["make", "--dry-run", "--old-file=.venv/ready", "pareto", "SWEEP=quick", "ARGS=seed=0 runs_dir=there"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "src/train.py -m +sweeps=quick seed=0 runs_dir=there" in lines
    assert "src/pareto.py sweep=quick x=counted runs_dir=there" in lines


# W&B


def test_a_sweeps_jobs_are_one_wandb_group(tmp_path):
    arguments = {"mode": "disabled", "run_dir": str(tmp_path), "project": "p", "group": "digits", "tags": ["digits"]}
    init = wandb_logger(**arguments, sweep="quick")._wandb_init
    assert (init["group"], init["tags"]) == ("quick", ["digits", "quick"])
    alone = wandb_logger(**arguments, sweep=None)._wandb_init
    assert (alone["group"], alone["tags"]) == ("digits", ["digits"])
    (job, *_) = plan("+sweeps=quick", "logger=wandb")
    node = job.config.logger.wandb
    init = wandb_logger("disabled", str(tmp_path), "p", node.group, node.tags, node.sweep)._wandb_init
    assert (init["group"], init["tags"]) == ("quick", ["quick", "digits"])


def test_wandbs_own_sweep_drives_the_same_entry_point(tmp_path):
    """The command that `wandb agent` makes of sweeps/wandb.yaml, run as the agent runs it, on the digits."""
    content = yaml.safe_load((ROOT / "sweeps" / "wandb.yaml").read_text())
    assert content["metric"]["name"] == "val/acc"
    chosen = {key: {"value": node["values"][-1]} for key, node in content["parameters"].items()}
    made = wandb_sweeps.create_sweep_command_args({"args": chosen})
    made |= {"env": [], "interpreter": [], "program": [content["program"]]}
    command = []
    for part in wandb_sweeps.create_sweep_command(content["command"]):
        command += made[part[2:-1]] if part.startswith("${") else [part]
    small = ["data=digits", "network.depth=8", "network.width=8", "trainer.max_epochs=1", f"runs_dir={tmp_path}"]
    agent = {"WANDB_SWEEP_ID": "sweep1", "WANDB_RUN_ID": "run1", "WANDB_PROJECT": "cosinegate"}
    done = process(*command, *small, **agent)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "balanced").iterdir()
    record = read_record(folder)
    assert (record["status"], record["sweep"], record["lambda_flops"]) == ("finished", "wandb", 5.0)
    assert list(folder.glob("wandb/offline-run-*/run-run1.wandb"))
    assert "Ignoring run_id" not in done.stdout + done.stderr
