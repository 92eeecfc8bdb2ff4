"""Whatever a person or a file gets wrong: one line, a code that is not 0, and nothing written or changed."""

import json
import os
import shutil
from pathlib import Path

import pytest
from bad_files import checkpoints, data_folders, records
from conftest import NO_NETWORK, ROOT, assert_one_line, config, process

from cosinegate.train import train


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with three trained runs and everything that is wrong with what others could look like."""
    folder = tmp_path_factory.mktemp("world")
    short = ["threads=1", "trainer.max_epochs=1", "trainer.limit_train_batches=2", "callbacks.curves=null"]
    for name, words in {
        "good": ["+experiment=digits", "network.depth=14"],
        "dense": ["+experiment=digits", "gate=none"],
        "random": ["+experiment=digits", "gate=random", "objective=plain"],
    }.items():
        train(config(*words, *short, f"run_dir={folder / name}"))
    checkpoints(folder / "good" / "checkpoints" / "last.ckpt", folder / "ckpt")
    records(json.loads((folder / "good" / "record.json").read_text()), folder / "odd")
    data_folders(folder / "data")
    (folder / "file").write_text("in the way\n")
    (folder / "loop").symlink_to("loop")
    (folder / "theirs").mkdir()
    (folder / "theirs" / "thesis.txt").write_text("keep me\n")
    (folder / "csv").mkdir()
    shutil.copy(folder / "good" / "record.json", folder / "csv")
    (folder / "csv" / "metrics.csv").write_text(f"epoch,val/acc\n1,{'9' * 200_000}x\n")
    (folder / "link.html").symlink_to("theirs/thesis.txt")
    (folder / "nowhere.html").symlink_to("not/there")
    os.mkfifo(folder / "pipe.html")
    (folder / "taken").mkdir()
    for name in ("benchmark.png", "training.json", "digits-resnet14-w8-1epochs-counted.svg"):
        (folder / "taken" / name).write_text("mine\n")
    (folder / "mixed").mkdir()
    (folder / "mixed" / "card.json").write_text('{"network": {}, "forms": {}, "files": {"batch.onnx": ""}}')
    (folder / "mixed" / "int8.onnx").write_text("mine\n")
    (folder / "mixed" / "frontier.json").write_text('{"mine": 1}\n')
    (folder / "runs" / ".sweeps" / "mine").mkdir(parents=True)
    (folder / "runs" / ".sweeps" / "mine" / "study.db").write_text("no study\n")
    (folder / "runs" / ".sweeps" / "listed.json").write_text('{"runs": [1, {}]}')
    return folder


DIGITS = "train +experiment=digits"
CASES = [  # the command line, what the line says, and the environment
    # overrides
    ("train objective.lambda_flop=3", "did you mean lambda_flops"),
    ("train +objective.lambda_flop=3", "did you mean lambda_flops"),
    ("train ++objective.tua_target=.5", "did you mean tau_target"),
    ("train +gate={kind:none,foo:1}", "gate.foo: no such key"),
    ("train +hydra.job.nam=x", "did you mean name"),
    ("train -m +experiment=digits +seeed=0,1", "did you mean seed"),
    ("train -m +experiment=digits +hydra.sweeper.foo=1", "hydra.sweeper.foo: no such key"),
    ("search +experiment=digits +search.trails=5", "did you mean trials"),
    ("evaluate run=good +data.batch_size=4", "data: no such key"),
    ("train ~seed", "seed: cannot be left out"),
    ("train ~trainer.max_epochs", "trainer.max_epochs: cannot be left out"),
    ("train -m ~name seed=0,1", "name: cannot be left out"),
    ("train ~run_dir", "~run_dir: there is no such key, or it has no value"),
    ("pareto ~runs", "runs: cannot be left out"),
    ("train name=日本", "needs quotes of its own, as in 'name=\"日本\"'"),
    ("train runs_dir=~no_such_user/x", "needs quotes of its own"),
    ("train trainer.max_steps=0", "trainer.max_steps = 0: must be at least 1"),
    ("train trainer.max_time=1h", "as in '00:12:00:00'"),
    ("train trainer.max_time=00:00:00:00", "above zero"),
    ("train trainer.profiler=fast", "simple or advanced or pytorch"),
    ("train trainer.overfit_batches=-1", "trainer.overfit_batches"),
    ("train trainer.fast_dev_run=-1", "trainer.fast_dev_run"),
    ("train -m +experiment=digits trainer.fast_dev_run=true seed=0,1", "tries one run"),
    ("search +experiment=digits trainer.fast_dev_run=true", "tries one run"),
    ("train trainer.max_epochs=many", "trainer.max_epochs"),
    ("train objective.tau_target=1.01", "at most 1"),
    ("train optimizer.lr=nan", "finite"),
    ("train optimizer.lr=[0.1", "optimizer.lr"),
    ("train +experiment=conservativ", "conservative"),
    ("train data=imagenet", "data/imagenet"),
    ("train data=null", "override must be a string"),
    ("train =5", "override must be a string"),
    ("train +experiment=digits hydra.sweeper.dry_run=true", "add -m"),
    ("evaluate runs/digits/a-run", "key=value"),
    ("train --nonsense", "unrecognized arguments: --nonsense"),
    ("train --config-name=nonsense", "Cannot find primary config"),
    ("train hydra/launcher=nonsense", "hydra/launcher/nonsense"),
    ("train name=${nope}", "nope"),
    ("train name=", "name = : must be a plain folder name"),
    ("train name=..", "plain folder name"),
    ("train name=.sweeps", "without a slash or a leading dot"),
    ("train name=a/b", "without a slash or a leading dot"),
    ("train -m seed=0,1 sweep=../x", "sweep = ../x: must be null or a plain file name"),
    ("train name=a\nb", "name=a b: not Hydra's grammar"),
    (f"train name={'a' * 300}", "plain folder name"),
    ("train name=\udcff", "is not UTF-8"),
    ("train seed=99999999999999999999999", "seed"),
    ("train network.width=1000000000", "network.width"),
    ("train network.depth=6000000002", "network.depth"),
    ("train network.width=4096 network.depth=1202", "million weights"),
    (f"{DIGITS} network.width=4096 network.widths=[4,8,16]", "network.width = 4096 with 3 blocks"),
    ("train network.widths=[4,8,16000] network.blocks=[1,1,9]", "network.widths = [4, 8, 16000] with 11 blocks"),
    (f"{DIGITS} network.widths=[16,8,64]", "network.widths"),
    ("train network.widths=wide", "network.widths"),
    ("train network.blocks=[1,1,1000000]", "network.blocks"),
    ("train data.batch_size=1000000000000000000000", "data.batch_size"),
    ("train data.crop_padding=1000000", "data.crop_padding"),
    ("train data.std=[1e-320,1,1]", "data.std"),
    ("train threads=1000000000", "threads"),
    ("train trainer.devices=1.5", "trainer.devices"),
    ("train trainer.devices=100000", "trainer.devices"),
    ("train logger=wandb +logger.wandb.api_key=0123456789abcdef", "a secret has no place in a config"),
    # gates and networks
    ("train gate=skipnets", "gate/skipnets"),
    ("train gate.kind=skipnets", "cosine, none, skipnet, aig"),
    ("train network=resnet21", "network/resnet21"),
    ("train network.library=keras network.model=vgg16", "timm, torchvision"),
    ("train gate=random gate.rate=1.5", "gate.rate = 1.5: must be above 0 and at most 1"),
    ("train gate=aig gate.start=1", "gate.start"),
    ("train gate=aig gate.hidden=10000000000000", "gate.hidden"),
    ("train gate=random gate.gamma.init=-2", "gate.gamma: no such key (gate has kind, first_blocks, rate)"),
    (
        "train gate=aig +gate.rate=1",
        "gate.rate: no such key (gate has kind, first_blocks, threshold, relaxation, start",
    ),
    ("train +experiment=balanced gate=none", "no such key (gate has kind); conf/experiment/balanced.yaml sets it"),
    ("train -m +experiment=balanced gate=random,aig", "conf/experiment/balanced.yaml sets it"),
    ("train gate.kind=aig", "gate.kind = aig: has other keys than this gate"),
    ("train gate=predictive", "gate/predictive"),
    ("train gate=controller_only gate.controller.enabled=false", "gate.controller.enabled"),
    # what only the built objects can know
    (f"{DIGITS} trainer=gpu", "accelerator=gpu"),
    (f"{DIGITS} trainer.accelerator=abacus", "accelerator=abacus"),
    (f"{DIGITS} trainer.devices=0", "devices=0"),
    (f"{DIGITS} trainer.devices=-3", "devices=-3"),
    (f"{DIGITS} trainer.strategy=nonsense", "strategy=nonsense"),
    (f"{DIGITS} trainer.num_nodes=2", "set MASTER_ADDR, MASTER_PORT and NODE_RANK on every node"),
    (f"{DIGITS} trainer.limit_test_batches=0.1", "trainer.limit_test_batches = 0.1: there are 2 batches; at least 0.5"),
    (f"{DIGITS} trainer.overfit_batches=0.001", "trainer.overfit_batches = 0.001: there are 23 batches"),
    (f"{DIGITS} trainer.precision=12-bit", "precision=12-bit"),
    (f"{DIGITS} trainer=ddp trainer.accelerator=cpu data.batch_size=65", "2 devices"),
    (f"{DIGITS} data.drop_last=true data.batch_size=2000", "1438"),
    (f"{DIGITS} data.mean=[0.1,0.2] data.std=[0.1,0.2]", "1 channel"),
    (f"{DIGITS} data.validation=holdout data.holdout=5000", "1438"),
    (f"{DIGITS} +callbacks.mine._target_=no.such.Callback", "no.such"),
    (f"{DIGITS} +callbacks.mine._target_=builtins.dict", "is not a lightning Callback"),
    (f"{DIGITS} +callbacks.mine=5", "callbacks"),
    (f"{DIGITS} +logger.mine._target_=builtins.dict", "is not a lightning Logger"),
    (f"{DIGITS} logger=wandb logger.wandb.mode=sometimes", "logger.wandb.mode"),
    # paths, and the folder of a run
    (f"{DIGITS} runs_dir=file", "a part of that path is a file"),
    (f"{DIGITS} run_dir=file", "file"),
    (f"{DIGITS} run_dir=loop", "loop"),
    (f"{DIGITS} run_dir=dense", "holds a run of another config"),
    (f"{DIGITS} run_dir=odd/deep", "record.json cannot be read"),
    (f"{DIGITS} run_dir=odd/bytes", "record.json cannot be read"),
    (f"{DIGITS} run_dir=odd/folder", "not a file"),
    ("train hydra.run.dir=file/x", "file/x"),
    # sweeps and searches
    ("train -m +sweeps=nonsense", "sweeps/nonsense"),
    ("train -m +sweeps=quick,seeds", "one sweep at a time"),
    ("train -m seed=", "seed"),
    ("train -m seed=range(0,1000000000)", "more than 10000 jobs"),
    ("train -m hydra.sweeper.params=5", "hydra.sweeper.params"),
    ("train -m run_dir=x seed=0,1", "run_dir"),
    ("evaluate +sweeps=quick", "+sweeps: a sweep is for src/train.py"),
    ("search +experiment=digits search.trials=0", "search.trials"),
    ("search +experiment=digits search.space.tau_target.key=a..b", "not the key of a number"),
    ("search +experiment=digits search.space.tau_target.low=7", "search.space"),
    ("search +experiment=digits search.study=../x", "search.study"),
    ("search +experiment=digits search.study=mine", "is not a study"),
    ("search +experiment=digits search.study=.submitit", "search.study"),
    (f"search +experiment=digits search.study={'a' * 300}", "search.study"),
    ("search -m +experiment=digits seed=0,1", "leave -m out"),
    # checkpoints
    *(
        (f"evaluate run=ckpt/{name}", "not a checkpoint")
        for name in ("empty.ckpt", "text.ckpt", "cut.ckpt", "flipped.ckpt", "pickle.ckpt", "onnx.ckpt", "npz.npz")
    ),
    ("evaluate run=ckpt/bare.ckpt", "not a checkpoint"),
    ("evaluate run=ckpt/folder.ckpt", "has no checkpoints/last.ckpt"),
    ("evaluate run=ckpt/pipe.ckpt", "no such folder or file"),
    ("evaluate run=loop", "no such folder or file"),
    ("evaluate run=", "has no checkpoints/last.ckpt"),
    ("evaluate", "run has no value"),
    ("evaluate run=ckpt/deep.ckpt", "network.depth"),
    ("evaluate run=ckpt/wide.ckpt", "network.width"),
    ("export run=ckpt/hollow.ckpt", "does not hold the network"),
    ("evaluate run=ckpt/version.ckpt", "another version"),
    ("evaluate run=ckpt/kind.ckpt", "another version"),
    ("evaluate run=ckpt/lacking.ckpt", "Missing key"),
    ("evaluate run=ckpt/nan.ckpt", "finite"),
    ("export run=ckpt/asks.ckpt", "${oc.env:HOME}"),
    ("exits run=ckpt/circle.ckpt", "too deep"),
    ("benchmark run=ckpt/bomb.ckpt", "values"),
    ("evaluate run=good limit_batches=-2", "limit_batches"),
    ("evaluate run=good limit_batches=0.001", "limit_batches = 0.001: there are 2 batches; at least 0.5"),
    ("evaluate run=good threads=100000000000", "threads"),
    ("evaluate run=good accelerator=abacus", "abacus"),
    # deployment
    ("export run=dense", "a dense network has no gates, so there is nothing to compile"),
    ("benchmark run=dense", "a dense network has no gates, so there is nothing to compile"),
    ("export run=random", "it cannot be exported; dynamic=round settles them"),
    ("benchmark run=random", "it cannot be exported"),
    ("exits run=dense", "its last stage has one block alone"),
    ("export run=good budget=nan", "budget = nan"),
    ("export run=good tolerance=0.7", "tolerance = 0.7"),
    ("benchmark run=good tolerance=-1", "tolerance = -1"),
    ("export run=good dynamic=guess", "dynamic"),
    ("export run=good specialise=true", "specialise"),
    ("export run=good output=theirs", "already exists and is not an export"),
    ("export run=good output=loop", "already exists and is not an export"),
    ("export run=good output=file/x", "cannot be written"),
    ("export run=odd/deep", "record.json cannot be read"),
    ("exits run=good budgets=[]", "budgets = []: must be null or a list of numbers, each above 0"),
    ("exits run=good budgets=[0.7,-1]", "budgets = [0.7, -1.0]"),
    ("exits run=good budgets=[nan]", "budgets = [nan]"),
    ("exits run=good after=[9]", "after = [9]: must be blocks that run and that another one follows"),
    ("exits run=good images=0", "images = 0"),
    ("exits run=good after=[0] output=theirs", "already exists and holds no exits"),
    ("exits run=good after=[0] output=file/x", "cannot be written"),
    ("benchmark run=good batches=[0]", "batches = [0]"),
    ("benchmark run=good batches=[4000]", "there are 359 test images"),
    ("benchmark run=good output=file", "cannot be written"),
    ("benchmark run=good against=[random]", "has gates"),
    ("training_speed steps=0", "steps = 0"),
    # records
    *(
        (f"pareto runs=odd/{name}", word)
        for name, word in {
            "list": "not a run record",
            "cut": "cannot be read",
            "deep": "RecursionError",
            "bytes": "UnicodeDecodeError",
            "status": "lacks a run's status",
            "big": "seed",
            "nan": "accuracy.test = nan",
            "words": "accuracy.test = 0.9",
            "path": "data = ../../evil",
            "line": "experiment = a b",
            "folder": "not a file",
            "bare": "seed = None",
            "yaml": "config.yaml cannot be read",
        }.items()
    ),
    ("pareto runs=5", "runs = 5"),
    ("pareto runs=[]", "runs = []"),
    ("pareto runs=/nowhere", "no such folder"),
    ("pareto runs=good reference=[nan,1]", "reference"),
    ("pareto runs=good output=file", "cannot be written"),
    ("pareto runs=good x=speed", "speed"),
    ("pareto sweep=../../x", "sweep = ../../x: must be null or a plain file name"),
    ("pareto sweep=listed", "lists no runs"),
    ("report", "runs has no value"),
    ("report runs=[odd/bare]", "has no experiment"),
    ("report runs=[odd/loop]", "symbolic links"),
    ("report runs=[odd/yaml]", "config.yaml cannot be read"),
    ("report runs=[csv]", "metrics.csv cannot be read"),
    ("report runs=[theirs]", "has no record.json"),
    ("report runs=[good] path=theirs limit_batches=1", "theirs: cannot be written: there is a folder"),
    # files of others, where a command would write
    ("report runs=[good] path=good/record.json", "good/record.json: already exists and was not written"),
    ("report runs=[good] path=file", "file: already exists and was not written"),
    ("report runs=[good] path=link.html", "link.html: cannot be written: there is a link of that name"),
    ("report runs=[good] path=nowhere.html", "there is a link of that name"),
    ("report runs=[good] path=pipe.html", "there is a pipe or a device of that name"),
    ("table sweep=null runs=[good] path=good/config.yaml", "good/config.yaml: already exists and was not written"),
    ("table sweep=null runs=[good] path=taken/benchmark.md", "taken/benchmark.png: already exists"),
    ("table sweep=null runs=[good] path=x.png", "path = x.png: must be null or the table's name"),
    ("pareto runs=good output=taken", "counted.svg: already exists and was not written"),
    ("benchmark run=good output=taken", "taken/benchmark.png: already exists and was not written"),
    ("training_speed output=taken", "taken/training.json: already exists and was not written"),
    ("exits run=good after=[0] output=mixed", "mixed/frontier.json: already exists and was not written"),
    ("export run=good output=mixed", "mixed/int8.onnx: already exists and is not a file of an export"),
    ("dashboard", "wandb login"),
    # data
    ("data imagenet", "cifar10"),
    ("data", "name"),
    ("data mnist --root file --folder /nowhere", "no such folder", NO_NETWORK),
    ("data mnist --root data/kept --folder file", "mnist.npz", NO_NETWORK),
    ("data mnist --root x --folder data/idx-cut", "cut off", NO_NETWORK),
    ("data mnist --root x --folder data/idx-shape", "SHA-256", NO_NETWORK),
    ("data mnist --root x --folder data/idx-huge", "cut off", NO_NETWORK),
    ("data mnist --root x --folder data/idx-text", "not an idx file", NO_NETWORK),
    ("data mnist --root x --folder data/idx-swapped", "SHA-256", NO_NETWORK),
    ("data cifar10 --root x --folder data/cifar-cut", "cut off", NO_NETWORK),
    ("data cifar10 --root x --folder data/cifar-shape", "3 x 32 x 32", NO_NETWORK),
    ("data cifar10 --root x --folder data/cifar-code", "names os.system", NO_NETWORK),
    ("train data.root=x data.folder=loop", "no such folder", NO_NETWORK),
    # the environment
    (DIGITS, "OMP_NUM_THREADS", {"OMP_NUM_THREADS": "abc"}),
    (DIGITS, "LOCAL_RANK", {"LOCAL_RANK": "abc"}),
    (DIGITS, "SLURM_NTASKS", {"SLURM_NTASKS": ""}),
    (f"{DIGITS} logger=wandb", "WANDB_MODE", {"WANDB_MODE": "nonsense"}),
    (f"{DIGITS} logger=wandb", "base_url", {"WANDB_BASE_URL": "nonsense"}),
    ("train seed=-1", "seed", {"HYDRA_FULL_ERROR": "nonsense"}),
    ("pareto runs=/nowhere", "no such folder", {"MPLBACKEND": "nonsense", "PYTHONIOENCODING": "ascii"}),
]


def tree(folder: Path) -> dict[str, bytes | str]:
    """Every file with its bytes, every link with its target, every folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "no file"
        found[str(path.relative_to(folder))] = kind
    return found


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{' '.join(case[0].split())[:70]} {' '.join(case[2:] and case[2])}"
)
def test_bad_input_is_answered_with_one_line_and_nothing_is_written(case, world):
    line, fragment, *rest = case
    command, *words = line.split(" ")
    program = ["-m", "cosinegate.data"] if command == "data" else [str(ROOT / "src" / f"{command}.py")]
    before = tree(world)
    done = process(*program, *words, cwd=world, **(rest[0] if rest else {}))
    assert_one_line(done, fragment)
    assert done.returncode == 2
    assert tree(world) == before
