import pytest
from conftest import ROOT, config, process
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from cosinegate import cli
from cosinegate.config.checks import validate
from cosinegate.config.commands import COMMANDS
from cosinegate.config.identity import identity
from cosinegate.config.schema import ranges
from cosinegate.terminal.errors import UserError

BAD = [
    # a typo, in a group, a key and an experiment
    ("objective.lambda_flop=3", "objective.lambda_flop", "did you mean lambda_flops"),
    ("optimzer.lr=0.1", "optimzer", "did you mean optimizer"),
    ("+experiment=conservativ", "experiment/conservativ", "conservative"),
    ("experiment=balanced", "+experiment=balanced"),
    ("gate=cosin", "gate/cosin", "cosine"),
    ("gate.polarity=papre", "gate.polarity", "papre", "novelty"),
    # a wrong type
    ("trainer.max_epochs=many", "trainer.max_epochs", "many"),
    ("optimizer.lr=fast", "optimizer.lr", "fast"),
    ("data.flip=sometimes", "data.flip", "sometimes"),
    ("objective.weighting=3", "objective.weighting", "3"),
    # out of range
    ("objective.tau_target=0", "objective.tau_target", "0", "at most 1"),
    ("objective.tau_target=1.01", "objective.tau_target", "1.01", "at most 1"),
    ("objective.lambda_flops=-1", "objective.lambda_flops", "-1", "at least 0"),
    ("optimizer.gate_lr_factor=-1", "optimizer.gate_lr_factor", "-1", "at least 0"),
    ("objective.lambda_cons=-0.1", "objective.lambda_cons", "-0.1", "at least 0"),
    ("gate.threshold=0", "gate.threshold", "0", "between 0 and 1"),
    ("gate.threshold=1", "gate.threshold", "1", "between 0 and 1"),
    ("gate.gamma.init=0", "gate.gamma.init", "below 0", "polarity=paper"),
    ("gate.gamma.init=2.5", "gate.gamma.init", "2.5", "below 0"),
    ("objective.warmup_epochs=-1", "objective.warmup_epochs", "-1", "at least 0"),
    ("network.depth=21", "network.depth", "21", "6n+2"),
    ("network.depth=2", "network.depth", "2", "6n+2"),
    ("network.width=0", "network.width", "at least 1"),
    ("network.widths=[16,32]", "network.widths", "three numbers"),
    ("network.widths=[16,32,24]", "network.widths", "none below the one before"),
    ("network.widths=[0,32,64]", "network.widths", "from 1"),
    ("optimizer.lr=nan", "optimizer.lr", "finite"),
    ("objective.lambda_flops=inf", "objective.lambda_flops", "finite"),
    ("data.batch_size=0", "data.batch_size", "at least 1"),
    ("data.std=[0.2,0,0.2]", "data.std", "above 0"),
    ("seed=-1", "seed", "-1"),
    ("trainer.limit_train_batches=0", "trainer.limit_train_batches"),
    ("name=a/b", "name", "folder name"),
    ("trainer.check_val_every_n_epoch=500", "trainer.check_val_every_n_epoch", "at most"),
    ("data.mean=[1,nan]", "data.mean", "finite"),
    ("data.mean=3", "data.mean", "list"),
    ("gate.controller.reduction=0", "gate.controller.reduction", "at least 1"),
    ("gate.relaxation.temperature=0", "gate.relaxation.temperature", "above 0"),
    ("gate=aig gate.hidden=0", "gate.hidden", "at least 1"),
    ("gate=aig gate.start=0", "gate.start", "null or between 0 and 1"),
    ("gate=constant gate.start=null", "gate.start"),
    ("gate=random gate.rate=0", "gate.rate", "above 0 and at most 1"),
    ("network.blocks=[2,2]", "network.blocks", "three numbers"),
    ("objective.sided=three", "objective.sided", "two"),
    ("gate.relaxation.noise_until=2", "gate.relaxation.noise_until", "from 0 to 1"),
    # a key that another gate has
    ("gate=random gate.gamma.init=-2", "gate.gamma: no such key (gate has kind, first_blocks, rate)"),
    ("gate=none gate.threshold=0.3", "gate.threshold: no such key (gate has kind)"),
    ("gate=aig +gate.rate=1",
     "gate.rate: no such key (gate has kind, first_blocks, threshold, relaxation, start, hidden)"),
    ("+experiment=balanced gate=none",
     "gate.gamma: no such key (gate has kind); conf/experiment/balanced.yaml sets it"),
    ("gate.kind=aig", "gate.kind = aig: has other keys than this gate", "as in gate=aig"),
    ("gate=skipnet gate.kind=controller", "gate.kind = controller: has other keys"),
    ("gate={kind:none}", "gate.kind = none: has other keys"),
    # not Hydra's grammar
    ("optimizer.lr=[0.1", "optimizer.lr"),
]  # fmt: skip


@pytest.mark.parametrize("case", BAD, ids=lambda case: case[0])
def test_a_bad_config_is_answered_with_one_line(case):
    override, *fragments = case
    with pytest.raises((UserError, HydraException, OmegaConfBaseException)) as caught:
        validate(config(*override.split()))
    line = cli.one_line(caught.value)
    assert "\n" not in line
    for fragment in fragments:
        assert fragment in line


# of every command each key that has a range, with values that it does not allow
OUT_OF_RANGE = {
    "evaluate": {"threads": ["0", "1025"], "limit_batches": ["0", "-2", "1.5"]},
    "export": {"threads": ["0"], "tolerance": ["0.5", "-0.1", "nan"], "images": ["0"], "budget": ["0", "nan"]},
    "exits": {
        "threads": ["0"],
        "tolerance": ["0.5"],
        "images": ["0"],
        "budgets": ["[]", "[0.7,-1]", "[nan]"],
        "after": ["[]", "[-1]"],
    },
    "benchmark": {
        "threads": ["0"],
        "tolerance": ["0.5"],
        "images": ["0"],
        "budget": ["-1"],
        "batches": ["[]", "[0]"],
        "rounds": ["0"],
    },
    "pareto": {"runs": ["[]", "5", "[5]", "['']"], "sweep": ["../x"], "reference": ["[1]", "[nan,1]"]},
    "table": {"runs": ["[]"], "sweep": ["a/b"], "path": ["peers.png"]},
    "report": {"runs": ["[]"], "sweep": [".x"], "threads": ["0"], "limit_batches": ["0"]},
    "training_speed": {"threads": ["0"], "steps": ["0"], "batches": ["0"], "val_batches": ["0"], "rounds": ["0"]},
    "dashboard": {},
}
SEARCH = ["search.trials=0", "search.population=1", "search.cost=latency", "search.study=../x", "gate=none"]
SEARCH += ["search.space.tau_target.low=7", "search.space.tau_target.key=a..b", "trainer.fast_dev_run=true"]
TRAIN = ["objective.tau_target=2", "optimizer.lr=fast", "gate=random gate.gamma.init=-2", "gate.kind=aig", "weights="]
TRAIN += ["+seeed=1", "gate.gamma.init=1", "network.depth=21", "optimizer.nesterov=true optimizer.momentum=0"]
MISTAKES = [f"train {words}" for words in TRAIN] + [f"search {words}" for words in SEARCH] + ["report", "exits"]
ABOUT_A_RUN = ("evaluate", "export", "exits", "benchmark")
REFUSED = [  # command, key and value
    (f"{command} run=x" if command in ABOUT_A_RUN else command, key, value)
    for command, keys in OUT_OF_RANGE.items()
    for key, values in keys.items()
    for value in values
]
RUN_EACH = """
import os, runpy, sys
for mistake in sys.argv[1:]:
    command, *words = mistake.split()
    sys.argv = [f"src/{command}.py", *words]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        del os.environ["HYDRA_FULL_ERROR"]
        print(ended.code, *sorted({"torch", "lightning"} & set(sys.modules)))
"""


def test_a_mistake_is_answered_before_torch_is_imported():
    words = MISTAKES + [f"{command} {key}={value}" for command, key, value in REFUSED]
    done = process("-c", RUN_EACH, *words, afresh=True)
    assert done.stdout.splitlines() == ["2"] * len(words), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(words), done.stderr
    for (command, key, value), line in zip(REFUSED, lines[len(MISTAKES) :], strict=True):
        assert line.startswith(f"error: {key} = "), (command, value, line)
        assert ": must be " in line


@pytest.mark.parametrize("command", COMMANDS)
def test_every_range_of_a_command_refuses_something(command):
    assert set(ranges(COMMANDS[command])) == set(OUT_OF_RANGE[command])


@pytest.mark.parametrize("name", sorted(path.stem for path in cli.CONF.glob("*.yaml")))
def test_no_command_takes_a_key_that_it_does_not_have(name):
    with pytest.raises(UserError, match="nonsense: no such key"):
        cli.compose("++nonsense=1", config_name=name)


def test_what_has_no_schema_takes_any_key():
    taken = config("+callbacks.mine._target_=a.B", "+logger.mine={_target_: a.C, x: {y: 1}}", "~callbacks.curves")
    assert taken.logger.mine.x.y == 1
    assert "curves" not in taken.callbacks


def test_novelty_takes_gamma_of_either_sign():
    for gamma in (-2.0, 2.0):
        validate(config("gate.polarity=novelty", f"gate.gamma.init={gamma}"))
    with pytest.raises(UserError):
        validate(config("gate.gamma.init=2.0"))


def test_identity_follows_what_a_run_computes_and_nothing_else():
    same = ["seed=5", "runs_dir=elsewhere", "run_dir=here", "name=other", "logger=wandb", "data.root=x", "threads=1"]
    other = ["optimizer.lr=0.2", "gate.polarity=novelty", "data.validation=holdout", "trainer.max_epochs=3"]
    for override in same:
        assert identity(config(override)) == identity(config()), override
    found = {identity(config(override)) for override in other} | {identity(config())}
    assert len(found) == len(other) + 1


def test_a_dense_run_is_the_same_whatever_the_objective():
    dense = identity(config("gate=none"))
    assert {identity(config("gate=none", f"objective.{word}")) for word in ("warmup_epochs=3", "per_step=true")} == {
        dense
    }
    assert identity(config("gate=none", "callbacks.progress=null")) != dense


def test_a_key_that_comes_later_changes_no_run_that_does_without_it():
    assert identity(config("+experiment=balanced")) == "de290c20bb"
    assert identity(config("+experiment=resnet20")) == "b6a98cc40b"


PAPER = {
    "aggressive": (5.0, 0.01, 0.60, -3.0),
    "balanced": (3.0, 0.01, 0.70, -2.5),
    "conservative": (2.5, 0.05, 0.72, -2.0),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_configurations_are_the_papers(name):
    chosen = config(f"+experiment={name}")
    objective, optimizer = chosen.objective, chosen.optimizer
    found = (objective.lambda_flops, objective.lambda_cons, objective.tau_target, chosen.gate.gamma.init)
    assert found == PAPER[name]
    assert (optimizer.lr, optimizer.momentum, optimizer.weight_decay) == (0.1, 0.9, 5e-4)
    assert (chosen.trainer.max_epochs, objective.warmup_epochs, chosen.data.batch_size) == (160, 40, 128)
    assert (chosen.gate.threshold, chosen.gate.relaxation.temperature, chosen.network.depth) == (0.45, 1.0, 20)
    assert list(chosen.data.mean) == [0.4914, 0.4822, 0.4465]
    assert list(chosen.data.std) == [0.2023, 0.1994, 0.2010]
    assert (chosen.data.crop_padding, chosen.data.flip, chosen.data.validation.name) == (4, True, "test")


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_experiment_opens_with_its_command_and_what_to_expect(path):
    text = path.read_text()
    assert f"+experiment={path.stem}" in text
    for word in ("# Shows:", "# Expect:", "# Takes:"):
        assert word in text
    assert "MEASURED" not in text
    assert "TIME" not in text
    assert config(f"+experiment={path.stem}").name == path.stem


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_every_key_of_a_command(name):
    first, _, *lines = cli.explained(name).splitlines()
    assert first.startswith(f"# python src/{name}.py")
    assert [line.partition(":")[0] for line in lines] == list(config(config_name=name))
    for line in lines:
        value, _, about = line.partition(": ")[2].partition(" # ")
        assert value
        assert len(about) > 5, line


def test_help_is_that_through_a_process():
    done = process("src/export.py", "--help")
    assert done.returncode == 0
    assert "tolerance: 0.0 # a block counts as closed, or open, for all where" in done.stdout
