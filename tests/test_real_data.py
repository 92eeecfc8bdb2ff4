"""The real CIFAR-10 and MNIST, fetched, verified and trained on: `make test-data`."""

import pytest
from conftest import process

from cosinegate.data import IMAGE_SETS
from cosinegate.data.sources import load
from cosinegate.record import read_record

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
    assert record["accuracy"]["test"] > (0.2 if experiment == "conservative" else 0.5)
    assert record["flops"]["executed"] >= 1.0
    assert record["peak_memory_mib"] < 3 * 1024
