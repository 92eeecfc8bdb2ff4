"""What a sweep is made of: its jobs, its names, what is refused, and what it leaves."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from conftest import ROOT, assert_one_line, process, started
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf
from wandb.sdk.launch.sweeps import utils as wandb_sweeps

from cosinegate import cli
from cosinegate.callbacks.loggers import wandb_logger
from cosinegate.config.identity import identity, leaves, primitives
from cosinegate.runs.manifest import add_to_manifest, read_manifest
from cosinegate.runs.record import read_record
from cosinegate.sweeps import jobs as sweep
from cosinegate.terminal.errors import UserError

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
    first, second = (
        leaves(primitives(job.config) | {"callbacks": OmegaConf.to_container(job.config.callbacks)}) for job in (a, b)
    )
    return {key for key in first if first[key] != second[key]}


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
    (["+sweeps=nope"], ["sweeps/nope", "ablation paper pareto peers peers_mnist quick seeds"]),
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


def test_commands_of_one_sweep_add_to_its_list_and_unnamed_ones_have_a_list_each(tmp_path):
    tiny = [*SHORT, "trainer.max_epochs=1", "callbacks.curves=null", f"runs_dir={tmp_path}/runs"]
    sweep = ["src/train.py", "-m", *tiny]
    beside = started(*sweep, "+sweeps=seeds", "seed=0")
    for words in (["+sweeps=seeds", "seed=1,2"], ["seed=0,1"], ["seed=2,1"]):
        done = process(*sweep, *words)
        assert done.returncode == 0, done.stderr
    assert beside.wait() == 0, beside.errors()
    assert "2 jobs, 2 finished before, 0 to train" in done.stdout  # of this command, whatever the lists hold
    lists = [json.loads(path.read_text())["runs"] for path in (tmp_path / "runs" / ".sweeps").glob("*.json")]
    assert sorted("".join(sorted(run[-1] for run in runs)) for runs in lists) == ["01", "012", "12"]
    drawn = process("src/pareto.py", "sweep=seeds", f"runs_dir={tmp_path}/runs", f"output={tmp_path}/pareto")
    assert drawn.returncode == 0, drawn.stderr
    assert len((tmp_path / "pareto" / "digits-resnet8-w8-1epochs-counted.csv").read_text().splitlines()) == 1 + 3


def test_processes_that_add_to_a_list_at_once_lose_nothing(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        tuple(pool.map(lambda n: add_to_manifest("mine", str(tmp_path), [tmp_path / str(n)]), range(64)))
    path = tmp_path / ".sweeps" / "mine.json"
    assert sorted(map(int, read_manifest(path))) == list(range(64))


def test_a_list_that_cannot_be_read_is_left_as_it_is(tmp_path):
    path = tmp_path / ".sweeps" / "mine.json"
    path.parent.mkdir()
    path.write_text('{"runs": 5}')
    done = process("src/train.py", "-m", *SHORT, "sweep=mine", "seed=0,1", f"runs_dir={tmp_path}")
    assert_one_line(done, str(path), "lists no runs")
    assert path.read_text() == '{"runs": 5}'
    assert not (tmp_path / "digits").exists()


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
    (folder,) = (tmp_path / "balanced").glob("*-s*")
    record = read_record(folder)
    assert (record.status, record.sweep, record.lambda_flops) == ("finished", "wandb", 5.0)
    assert list(folder.glob("wandb/offline-run-*/run-run1.wandb"))
    assert "Ignoring run_id" not in done.stdout + done.stderr
