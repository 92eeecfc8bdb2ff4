"""Files that are wrong: checkpoints, records and originals of data sets as nobody should meet them."""

import itertools
import json
import os
import pickle
from pathlib import Path

import numpy as np
import torch

from cosinegate.data import cifar10, mnist


def changed(path: Path, change) -> dict:
    """A checkpoint's content after `change`."""
    stored = torch.load(path, weights_only=True)
    change(stored)
    return stored


def checkpoints(good: Path, folder: Path) -> None:
    """Files that are no checkpoint of this program, or none that can be used."""
    folder.mkdir()
    content = good.read_bytes()
    middle = len(content) // 2
    for name, wrong in {
        "empty": b"",
        "text": b"no checkpoint at all\n",
        "cut": content[:9000],
        "flipped": content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :],
        "pickle": pickle.dumps({"state_dict": {}, "hyper_parameters": {}}),
        "onnx": b"\x08\x0a\x12\x07pytorch\x1a\x062.13.0:\x00",
    }.items():
        (folder / f"{name}.ckpt").write_bytes(wrong)
    np.savez(folder / "npz", weights=np.zeros(3))
    (folder / "folder.ckpt").mkdir()
    os.mkfifo(folder / "pipe.ckpt")
    circle: list = []
    circle.append(circle)
    bomb: list = []
    for _ in range(40):
        bomb = [bomb, bomb]

    def parameters(key: str, value, stored: dict) -> None:
        *parents, last = key.split(".")
        node = stored["hyper_parameters"]
        for parent in parents:
            node = node[parent]
        node[last] = value

    for name, (key, value) in {
        "deep": ("network.depth", 6 * 10**8 + 2),
        "wide": ("network.width", 10**9),
        "hollow": ("network.width", 512),  # within what is allowed, but the file does not hold it
        "version": ("network.heads", 4),
        "asks": ("name", "${oc.env:HOME}"),
        "circle": ("callbacks.x", circle),
        "bomb": ("callbacks.x", bomb),
        "nan": ("objective.tau_target", float("nan")),
        "kind": ("gate.kind", "sinus"),
    }.items():
        torch.save(changed(good, lambda stored, k=key, v=value: parameters(k, v, stored)), folder / f"{name}.ckpt")
    torch.save(changed(good, lambda stored: stored["state_dict"].popitem()), folder / "lacking.ckpt")
    torch.save(changed(good, lambda stored: stored.pop("hyper_parameters")), folder / "bare.ckpt")


def records(good: dict, folder: Path) -> None:
    """Folders whose record.json is not one."""
    odd = {
        "list": "[]",
        "cut": json.dumps(good)[:200],
        "deep": "[" * 100_000,
        "bytes": b"\xff\xfe\x00",
        "status": json.dumps(good | {"status": ["finished"]}),
        "big": json.dumps(good | {"seed": 10**400}),
        "nan": json.dumps(good | {"accuracy": good["accuracy"] | {"test": float("nan")}}),
        "words": json.dumps(good | {"accuracy": good["accuracy"] | {"test": "0.9"}}),
        "path": json.dumps(good | {"data": "../../evil"}),
        "line": json.dumps(good | {"experiment": "a\nb"}),
        "bare": json.dumps({key: good[key] for key in ("format", "status", "epochs")}),
    }
    for name, text in odd.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "record.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    for name in ("folder", "loop", "yaml"):
        (folder / name).mkdir()
    (folder / "folder" / "record.json").mkdir()
    (folder / "loop" / "record.json").symlink_to("record.json")
    (folder / "yaml" / "record.json").write_text(json.dumps(good))
    names = "abcdefghijklmnop"
    bomb = ["a: &a [x, x, x, x, x, x, x, x]"]
    bomb += [f"{b}: &{b} [{', '.join([f'*{a}'] * 8)}]" for a, b in itertools.pairwise(names)]
    (folder / "yaml" / "config.yaml").write_text("\n".join(bomb))


def idx(shape: tuple[int, ...], size: int | None = None) -> bytes:
    size = int(np.prod(shape)) if size is None else size
    return b"\0\0\x08" + bytes([len(shape)]) + np.array(shape, ">u4").tobytes() + bytes(size)


def data_folders(folder: Path) -> None:
    """Originals of data sets that are cut off, of another shape, or something else."""
    shapes = [(60, 28, 28), (60,), (10, 28, 28), (10,)]
    for name, images in {
        "idx-cut": idx(shapes[0], 500),
        "idx-shape": idx((60, 32, 32)),
        "idx-huge": idx((2**31, 2**31, 4), 0),
        "idx-text": b"not idx",
        "idx-swapped": idx(shapes[0]),  # well formed, and not MNIST
    }.items():
        (folder / name).mkdir(parents=True)
        for file, shape in zip(mnist.FILES, shapes, strict=True):
            (folder / name / file).write_bytes(images if file == mnist.FILES[0] else idx(shape))
    (folder / "cifar-cut").mkdir()
    (folder / "cifar-shape").mkdir()
    (folder / "cifar-code").mkdir()
    for name in cifar10.PYTHON_BATCHES:
        (folder / "cifar-cut" / f"{name}.bin").write_bytes(bytes(3073 * 2 - 1))
        square = pickle.dumps({"data": np.zeros((2, 28 * 28), np.uint8), "labels": [1, 2]}, protocol=2)
        (folder / "cifar-shape" / name).write_bytes(square.replace(b"numpy._core", b"numpy.core"))
        (folder / "cifar-code" / name).write_bytes(b"cos\nsystem\n(S'touch evil'\ntR.")
    (folder / "kept").mkdir()
    (folder / "kept" / "mnist.npz").write_bytes(b"PK\x03\x04 cut off")
