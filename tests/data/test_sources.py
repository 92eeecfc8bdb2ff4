import dataclasses
import gzip
import pickle

import numpy as np
import pytest
from conftest import NO_NETWORK, process

from cosinegate.data import IMAGE_SETS, cifar10, mnist
from cosinegate.data.sources import Arrays, SourceFailed, load
from cosinegate.terminal.errors import UserError


def small(size: int, channels: int, seed: int) -> Arrays:
    rng = np.random.default_rng(seed)

    def images(n):
        return rng.integers(0, 256, (n, size, size, channels), dtype=np.uint8)

    return Arrays(
        images(20), rng.integers(0, 10, 20, dtype=np.uint8), images(4), rng.integers(0, 10, 4, dtype=np.uint8)
    )


def idx(array: np.ndarray) -> bytes:
    array = array.squeeze(-1) if array.ndim == 4 else array
    return b"\0\0\x08" + bytes([array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def write_idx(arrays: Arrays, folder, zipped=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(mnist.FILES, arrays, strict=True):
        content = idx(array)
        (folder / (name + ".gz" if zipped else name)).write_bytes(gzip.compress(content) if zipped else content)


class Source:
    """A source that counts its calls."""

    def __init__(self, arrays: Arrays | None):
        self.arrays = arrays
        self.calls = 0

    def __call__(self, scratch):
        self.calls += 1
        if self.arrays is None:
            raise SourceFailed("nobody is there")
        return self.arrays


@pytest.fixture
def arrays() -> Arrays:
    return small(28, 1, seed=5)


def image_set(arrays: Arrays, *sources: Source):
    return dataclasses.replace(
        mnist.MNIST, sha256=arrays.sha256(), sources=tuple((f"source {i}", s) for i, s in enumerate(sources))
    )


def same(a: Arrays, b: Arrays) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_first_source_that_answers_is_kept_and_the_second_time_no_source_is_asked(tmp_path, arrays, capsys):
    silent, good, unused = Source(None), Source(arrays), Source(arrays)
    wanted = image_set(arrays, silent, good, unused)
    assert same(load(wanted, tmp_path), arrays)
    assert same(load(wanted, tmp_path), arrays)
    assert (silent.calls, good.calls, unused.calls) == (1, 1, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["mnist.npz"]
    assert "source 0: nobody is there" in capsys.readouterr().err


def test_a_source_with_other_pixels_is_refused(tmp_path, arrays):
    other = Arrays(arrays.train_images ^ 1, *arrays[1:])
    wrong, good = Source(other), Source(arrays)
    assert same(load(image_set(arrays, wrong, good), tmp_path), arrays)
    assert (wrong.calls, good.calls) == (1, 1)


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:900] + b"\xff" + b[901:]])
def test_a_damaged_file_is_never_used_but_fetched_again(tmp_path, arrays, damage):
    good = Source(arrays)
    wanted = image_set(arrays, good)
    load(wanted, tmp_path)
    kept = tmp_path / "mnist.npz"
    kept.write_bytes(damage(kept.read_bytes()))
    assert same(load(wanted, tmp_path), arrays)
    assert good.calls == 2
    assert same(load(wanted, tmp_path), arrays)
    assert good.calls == 2


def test_a_file_with_a_damaged_directory_is_fetched_again(tmp_path, arrays):
    good = Source(arrays)
    wanted = image_set(arrays, good)
    load(wanted, tmp_path)
    kept = tmp_path / "mnist.npz"
    content = bytearray(kept.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1  # the archive's directory now says that its first file is encrypted
    kept.write_bytes(content)
    assert same(load(wanted, tmp_path), arrays)
    assert good.calls == 2


def test_a_failed_write_leaves_nothing_behind(tmp_path, arrays, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="No space left"):
        load(image_set(arrays, Source(arrays)), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_when_every_source_fails_the_error_lists_them_and_the_way_by_hand(tmp_path, arrays):
    wanted = image_set(arrays, Source(None), Source(None))
    with pytest.raises(UserError) as caught:
        load(wanted, tmp_path, folder=tmp_path / "absent")
    said = str(caught.value)
    assert "absent: no such folder" in said
    assert "source 0: nobody is there" in said
    assert "source 1: nobody is there" in said
    assert "data.folder=" in said


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("inner", [".", "MNIST/raw"])
def test_a_named_folder_is_looked_at_first(tmp_path, arrays, zipped, inner):
    write_idx(arrays, tmp_path / "mine" / inner, zipped)
    unused = Source(arrays)
    assert same(load(image_set(arrays, unused), tmp_path / "root", tmp_path / "mine"), arrays)
    assert unused.calls == 0


DAMAGES = [
    lambda b: b[:-5],
    lambda b: b[:5],
    lambda b: b"",
    lambda b: b[:40] + b"\xff\xff" + b[42:],
    lambda b: b"no idx",
]


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_in_the_folder_is_passed_over_for_the_next_source(tmp_path, arrays, damage, zipped, capsys):
    write_idx(arrays, tmp_path / "mine", zipped)
    path = tmp_path / "mine" / (mnist.FILES[0] + (".gz" if zipped else ""))
    path.write_bytes(damage(path.read_bytes()))
    good = Source(arrays)
    assert same(load(image_set(arrays, good), tmp_path / "root", tmp_path / "mine"), arrays)
    assert good.calls == 1
    assert "data: folder" in capsys.readouterr().err


def test_a_missing_file_in_the_folder_is_named(tmp_path, arrays):
    write_idx(arrays, tmp_path / "mine")
    (tmp_path / "mine" / mnist.FILES[3]).unlink()
    with pytest.raises(UserError, match=f"no {mnist.FILES[3]} in"):
        load(image_set(arrays, Source(None)), tmp_path / "root", tmp_path / "mine")


def cifar_batches(arrays: Arrays):
    images = [*np.split(arrays.train_images, 5), arrays.test_images]
    labels = [*np.split(arrays.train_labels, 5), arrays.test_labels]
    return [(i.transpose(0, 3, 1, 2).reshape(len(i), -1), lab) for i, lab in zip(images, labels, strict=True)]


def test_cifar_reads_the_python_and_the_binary_form_alike(tmp_path):
    arrays = small(32, 3, seed=6)
    for folder in ("py", "bin"):
        (tmp_path / f"cifar-10-batches-{folder}").mkdir()
    for name, (pixels, labels) in zip(cifar10.PYTHON_BATCHES, cifar_batches(arrays), strict=True):
        python = pickle.dumps({"data": pixels, "labels": labels.tolist()}, protocol=2)
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(python.replace(b"numpy._core", b"numpy.core"))
        binary = np.concatenate([labels[:, None], pixels], axis=1)
        (tmp_path / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(binary.tobytes())
    assert same(cifar10.from_folder(tmp_path), arrays)
    assert same(cifar10.from_folder(tmp_path / "cifar-10-batches-bin"), arrays)
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(SourceFailed, match="no data_batch_4 in"):
        cifar10.from_folder(tmp_path)
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(b"short")
    with pytest.raises(SourceFailed, match="cut off"):
        cifar10.from_folder(tmp_path / "cifar-10-batches-bin")


class Harmful:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_a_batch_file_that_would_run_code_is_refused(tmp_path, capsys):
    for name in cifar10.PYTHON_BATCHES:
        (tmp_path / name).write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(SourceFailed, match="print"):
        cifar10.from_folder(tmp_path)
    assert capsys.readouterr().out == ""


def test_digits_are_embedded_and_are_what_they_were(tmp_path):
    digits = load(IMAGE_SETS["digits"], tmp_path)
    assert digits.train_images.shape == (1438, 8, 8, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["cifar10", "mnist", "fashion_mnist"])
def test_without_a_network_the_command_ends_with_what_was_tried(tmp_path, name):
    done = process("-m", "cosinegate.data", name, "--root", str(tmp_path), "--folder", "/nowhere", **NO_NETWORK)
    *tried, last = done.stderr.strip().splitlines()
    assert done.returncode != 0
    assert last.startswith(f"error: no source gave {name}; tried folder /nowhere: no such folder")
    assert "the official address: " in last
    assert "is not installed" in last
    assert "data.folder=" in last
    assert all(line.startswith("data: ") for line in tried)
    assert list(tmp_path.iterdir()) == []


def test_training_without_a_network_writes_nothing(tmp_path):
    done = process(
        "src/train.py", "+experiment=mnist", f"data.root={tmp_path}/data", f"runs_dir={tmp_path}/runs", **NO_NETWORK
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: no source gave mnist")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
