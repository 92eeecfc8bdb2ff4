"""Two gloo processes on the CPU against one process with the same global batch."""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import process, started
from torch import nn

from cosinegate.data.loader import Augmentation, EpochOrder, Normalisation, TrainLoader
from cosinegate.hardware.processes import Share
from cosinegate.hardware.sync_batchnorm import GlobalBatchNorm2d
from cosinegate.relaxation import gumbel_difference
from cosinegate.runs.record import read_metrics, read_record


def trained(root: Path, devices: int, *overrides: str, experiment: str = "digits") -> tuple[Path, str]:
    trainer = ["trainer=cpu"] if devices == 1 else ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
    command = [f"+experiment={experiment}", *trainer]
    done = process("src/train.py", *command, *overrides, "threads=1", f"runs_dir={root}")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    (folder,) = (root / experiment).glob("*-s*")
    return folder, done.stdout


def assert_same_curves(one: Path, two: Path, tolerance: float) -> None:
    first, second = read_metrics(one), read_metrics(two)
    assert sorted(first) == sorted(second)
    for epoch, row in first.items():
        for name, value in row.items():
            if not name.startswith("speed/"):
                assert second[epoch][name] == pytest.approx(value, rel=tolerance, abs=tolerance), (epoch, name)


def test_two_processes_have_one_processes_curves_to_the_last_digits_and_leave_one_record(tmp_path):
    # 1,137 training images in batches of 60: the last one is shared as 29 and 28. In double precision nothing is left
    # to rounding: a wrong weight, another noise or local BatchNorm statistics would show
    uneven = ["trainer.precision=64-true", "data.batch_size=60", "data.validation=holdout", "data.holdout=301"]
    pressed = ["objective.tau_target=0.2", "objective.warmup_epochs=0", "objective.lambda_cons=0.1"]
    pressed += ["trainer.max_epochs=2"]
    one, _ = trained(tmp_path / "one", 1, *uneven, *pressed)
    two, output = trained(tmp_path / "two", 2, *uneven, *pressed)
    assert output.count("test accuracy") == 1
    assert len(list(tmp_path.glob("two/**/record.json"))) == 1
    first, second = read_record(one), read_record(two)
    assert second.status == "finished"
    assert second.accuracy.test == first.accuracy.test
    assert second.blocks_open == pytest.approx(first.blocks_open)
    assert second.paths == first.paths
    assert len(read_metrics(one)) == 2
    assert read_metrics(one)[2]["train/loss_flops"] > 0
    assert_same_curves(one, two, 1e-6)
    for epoch, row in read_metrics(one).items():
        assert read_metrics(two)[epoch]["train/loss"] == pytest.approx(row["train/loss"], rel=1e-10)


def test_every_gate_learns_in_two_processes_what_it_learns_in_one(tmp_path):
    places = [(0, 1), (0, 2), (1, 2)]
    commands = [started("tests/one_of_several.py", f"{rank}", f"{world}", str(tmp_path)) for rank, world in places]
    for command in commands:
        assert command.wait() == 0, command.errors()
    one, *two = (json.loads((tmp_path / f"{rank}of{world}.json").read_text()) for rank, world in places)
    for case, losses in one.items():
        together = [(a + b) / 2 for a, b in zip(two[0][case], two[1][case], strict=True)]
        assert together == pytest.approx(losses, rel=1e-9), case


@pytest.mark.parametrize("size", [24, 23, 9])
def test_shares_cover_every_batch_once(size):
    order = EpochOrder(size, 0, Augmentation(0, False))
    images, labels = torch.zeros(size, 4, 4, 1, dtype=torch.uint8), torch.arange(size)
    normalise = Normalisation([0.0], [1.0], torch.device("cpu"))
    loaders = [TrainLoader(images, labels, normalise, 8, False, order, rank, 3) for rank in range(3)]
    for step, batches in enumerate(zip(*loaders, strict=True)):
        shares = [loader.share(step) for loader in loaders]
        assert [share.stop - share.start for share in shares] == [len(batch[1]) for batch in batches]
        assert [share.start for share in shares[1:]] == [share.stop for share in shares[:-1]]
        assert (shares[0].start, shares[-1].stop) == (0, shares[0].total)
        assert sum(share.weight for share in shares) == pytest.approx(3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_global_batchnorm_is_batchnorm_where_one_process_has_the_batch(dtype, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        own = GlobalBatchNorm2d(3).to(torch.float64 if dtype == torch.float64 else torch.float32)
        reference = copy.deepcopy(own)
        reference.__class__ = nn.BatchNorm2d
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        for _ in range(3):
            x = torch.randn(5, 3, 4, 4, dtype=dtype) * 3 + 1
            inputs = [x.clone().requires_grad_() for _ in range(2)]
            results = [layer(one) for layer, one in zip((own, reference), inputs, strict=True)]
            for result in results:
                result.float().pow(3).sum().backward()
            assert results[0].dtype == dtype
            torch.testing.assert_close(results[0], results[1], rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=tolerance, atol=30 * tolerance)
        torch.testing.assert_close(own.state_dict(), reference.state_dict(), rtol=tolerance, atol=tolerance)
    finally:
        dist.destroy_process_group()


def test_every_process_takes_its_part_of_the_same_noise():
    torch.manual_seed(3)
    whole = gumbel_difference(torch.empty(7))
    parts = []
    for start, stop in ((0, 4), (4, 7)):
        torch.manual_seed(3)
        parts.append(gumbel_difference(torch.empty(stop - start), Share(7, start, stop, 2)))
    assert torch.equal(torch.cat(parts), whole)
