"""The real CIFAR-10 and MNIST, fetched, verified and trained on: `make test-data`."""

import json

import pytest
from conftest import ROOT, process

from cosinegate.data import IMAGE_SETS
from cosinegate.data.sources import load
from cosinegate.runs.record import read_record

pytestmark = pytest.mark.data


@pytest.mark.parametrize("name", ["cifar10", "mnist"])
def test_a_fresh_fetch_gives_the_verified_set_and_the_second_uses_it(name, tmp_path):
    first = process("-m", "cosinegate.data", name, "--root", str(tmp_path))
    assert first.returncode == 0, first.stderr
    assert "verified, kept in" in first.stderr
    second = process("-m", "cosinegate.data", name, "--root", str(tmp_path))
    assert second.returncode == 0
    assert second.stderr == ""
    arrays = load(IMAGE_SETS[name], tmp_path)
    image_set = IMAGE_SETS[name]
    assert arrays.train_images.shape == (image_set.train_size, *image_set.shape)
    assert arrays.test_images.shape == (image_set.test_size, *image_set.shape)


@pytest.mark.parametrize("experiment", ["conservative", "mnist"])
def test_a_few_steps_on_the_real_set_learn(experiment, tmp_path):
    short = ["trainer.max_epochs=1", "trainer.limit_train_batches=60", "trainer.limit_val_batches=2"]
    short += ["trainer.limit_test_batches=2", "gate.polarity=novelty"]
    done = process("src/train.py", f"+experiment={experiment}", f"runs_dir={tmp_path}", *short, OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr
    record = read_record(next(tmp_path.glob(f"{experiment}/*")))
    assert record.accuracy.test > (0.2 if experiment == "conservative" else 0.5)
    assert record.flops.executed >= 1.0
    assert record.peak_memory_mib < 3 * 1024


def test_a_cifar10_run_holds_flat_memory_over_its_epochs(tmp_path):
    cut = ["trainer.max_epochs=20", "trainer.limit_train_batches=6", "trainer.limit_val_batches=2"]
    cut += ["trainer.limit_test_batches=1", "data.batch_size=32", "threads=1", f"runs_dir={tmp_path}"]
    command = ["src/train.py", "+experiment=balanced", *cut, "+callbacks.taken._target_=resident.Taken"]
    done = process(*command, afresh=True, PYTHONPATH=f"{ROOT}/src:{ROOT}/tests")
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("balanced/*/memory.json")
    after = {int(epoch): size for epoch, size in json.loads(path.read_text()).items()}
    print({epoch: round(size, 1) for epoch, size in after.items()})
    assert after[20] - after[2] < 8  # where freed memory is not given back after every epoch: 344
