"""A person's own images, in a folder a class, decoded and resized once; from then on a data set like any other.

Two layouts: `train/<class>/` with `test/<class>/` (or `val/`, `valid/`, `validation/`), or `<class>/` alone, of which a
part is kept for the test. In `data.root` lie the decoded images under their checksum, and for each state of a folder
(names, sizes and times of its files) which images it has: a second start decodes nothing, a changed folder is read
again. Which images are kept, and their order, follow from the files' names: never from a run's seed.
"""

import dataclasses
import functools
import hashlib
import json
import os
import stat
import sys
import textwrap
import warnings
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

import joblib
import numpy as np
from omegaconf import DictConfig, OmegaConf
from PIL import Image, ImageOps
from rich.console import Console
from rich.progress import track

from cosinegate.config.choices import Dataset
from cosinegate.config.schema import MOST_CLASSES, ContentConfig, is_class_name
from cosinegate.data.sources import UNUSABLE, Arrays, ImageSet, SourceFailed, keep, one_line
from cosinegate.hardware.memory import total_memory
from cosinegate.runs.files import write_atomically
from cosinegate.runs.untrusted import read_json
from cosinegate.terminal.console import complain, is_first_process
from cosinegate.terminal.errors import UserError

DECODING = 1  # raised when the same file comes to be decoded to other pixels
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # not all that Pillow knows: EPS starts a program
HIDDEN = ("thumbs.db", "desktop.ini")  # beside names that begin with a dot
TEST = ("test", "val", "valid", "validation")  # names of a folder of test images; the first that is there is taken
LAYOUT = "images lie in train/<class>/ and test/<class>/, or in <class>/ alone"
PART_OF_MEMORY = 4  # training holds the set as it is, padded, and mirrored
MANY = 5_000  # images, which take more than some seconds


class File(NamedTuple):
    """An image's file, and what changes when it does."""

    name: str  # below the folder
    label: int
    size: int
    changed: tuple[int, int]  # nanoseconds


class Listing(NamedTuple):
    """The files of a folder, in the order of the data set."""

    classes: tuple[str, ...]
    train: list[File]
    test: list[File]
    unused: list[str]  # folders beside train/ and test/


class Options(NamedTuple):
    """The keys of the config by which a folder becomes a data set."""

    size: int
    channels: int
    test_fraction: float


def read_images(data: DictConfig) -> None:
    """Puts into the config what the images of its folder are, and their mean and std where it gives none.

    Does nothing for other data sets. A run's identity follows from it, so it comes first.
    """
    if data.name is not Dataset.folder:
        return
    if data.folder is None:
        raise UserError("data.folder has no value: give the folder of your images, as in data.folder=photos")
    found = _read("data.folder", data, data.folder)
    data.content = OmegaConf.structured(ContentConfig(**found["content"]))
    if not data.mean:
        data.mean, data.std = found["mean"], found["std"]


def move(data: DictConfig, root: str | None, folder: str | None) -> None:
    """Says where on this machine the data of a trained run lies; a folder of other images is refused with one line."""
    data.root, data.folder = root or data.root, folder or data.folder
    if folder is None or data.name is not Dataset.folder:
        return
    found = _read("data_folder", data, folder)["content"]
    for key in ("classes", "train_size", "test_size", "sha256"):
        theirs, ours = found[key], OmegaConf.to_container(data.content)[key]
        if theirs != ours:
            theirs, ours = (textwrap.shorten(str(value), 100, placeholder=" …") for value in (theirs, ours))
            words = "holds other images than those that the run was trained on"
            raise UserError(f"data_folder = {folder}: {words}: {key} = {theirs}, not {ours}")


def folder_set(data: DictConfig) -> ImageSet:
    """What the config says of a folder's images."""
    content = data.content
    if content is None:
        raise UserError("data.content has no value: the images of data.folder have not been read")
    options = _options(data)
    return ImageSet(
        name=f"folder-{content.sha256[:10]}",
        classes=tuple(content.classes),
        shape=(options.size, options.size, options.channels),
        train_size=content.train_size,
        test_size=content.test_size,
        sha256=content.sha256,
        from_folder=functools.partial(_decoded, options=options),
        sources=(),
        by_hand="give the folder of the images that it was trained on, as in data_folder=photos",
    )


def described(data: DictConfig) -> str:
    """The data set in a line."""
    known = folder_set(data)
    height, width, channels = known.shape
    figures = " and ".join(f"{name} {[round(value, 4) for value in data[name]]}" for name in ("mean", "std"))
    return (
        f"{known.name} ({data.folder}): {known.train_size:,} training and {known.test_size:,} test images "
        f"of {len(known.classes):,} classes, {height} x {width} x {channels}, {figures}"
    )


def _options(data: DictConfig) -> Options:
    return Options(data.size, data.channels, data.test_fraction)


def _read(key: str, data: DictConfig, folder: str) -> dict[str, Any]:
    try:
        return _facts(Path(folder), Path(data.root), _options(data))
    except SourceFailed as error:
        raise UserError(f"{key} = {folder}: {error}") from error
    except OSError as error:
        raise UserError(f"{key} = {folder}: {error.filename} cannot be read: {error.strerror}") from error


@functools.cache  # all jobs of a sweep and all trials of a search have the images that the first one finds
def _facts(folder: Path, root: Path, options: Options) -> dict[str, Any]:
    """What the folder's images are: from an earlier start, or by decoding them."""
    listing = _listed(folder, options)
    state = hashlib.sha256(json.dumps([DECODING, options, listing]).encode()).hexdigest()
    path = root / f"folder-state-{state[:20]}.json"
    known = _known(path)
    if known is not None:
        return known
    for name in listing.unused:
        complain(f"data: {folder / name} is not used")
    arrays = _decoded(folder, options, listing)
    content = ContentConfig(arrays.sha256(), list(listing.classes), len(listing.train), len(listing.test))
    mean, std = mean_and_std(arrays.train_images)
    facts = {"content": dataclasses.asdict(content), "mean": mean, "std": std}
    kept = root / f"folder-{content.sha256[:10]}.npz"
    keep(arrays, kept)
    try:
        write_atomically(path, json.dumps(facts))
    except OSError as error:
        raise UserError(f"data.root: cannot write {path}: {error.strerror}") from error
    complain(f"data: {len(listing.train) + len(listing.test):,} images of {folder}, decoded, kept in {kept}")
    return facts


def _known(path: Path) -> dict[str, Any] | None:
    """What an earlier start wrote of a folder; None where there is no such file, or a damaged one."""
    try:
        facts = read_json(path)
        ContentConfig(**facts["content"])
        return {key: facts[key] for key in ("content", "mean", "std")}
    except (FileNotFoundError, UserError, LookupError, TypeError):
        return None


def _listed(folder: Path, options: Options) -> Listing:
    """The files of a folder. Ends with one line where it has no layout that can be read."""
    if not folder.is_dir():
        raise SourceFailed("no such folder")
    names = _entries(folder)
    if "train" not in names or not _entries(folder / "train"):  # a class may be called train
        if set(names) <= {"train", *TEST}:
            raise SourceFailed(f"has no folder of a class; {LAYOUT}")
        return _parted(_classes(folder, ""), options.test_fraction, [])
    train = _classes(folder / "train", "train/")
    name = next((name for name in TEST if name in names), None)
    unused = [other for other in names if other not in ("train", name)]
    if name is None:
        return _parted(train, options.test_fraction, unused)
    test = _classes(folder / name, f"{name}/")
    for one in test.keys() - train.keys():
        raise SourceFailed(f"{name}/{one} is a class that train/ does not have")
    for one in train.keys() - test.keys():
        raise SourceFailed(f"{name}/ has no image of {one}, a class of train/")
    return _ordered(train, test, unused)


def _entries(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted, without hidden ones."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())


def _classes(folder: Path, prefix: str) -> dict[str, list[File]]:
    """The files of each class, by its name."""
    names = _entries(folder)
    for name in names:
        if not is_class_name(name):
            raise SourceFailed(f"{prefix}{name} cannot be the name of a class: it must be plain, in UTF-8, without ${{")
    return {name: _files(folder / name, f"{prefix}{name}", label) for label, name in enumerate(names)}


def _files(folder: Path, prefix: str, label: int) -> list[File]:
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name.lower() in HIDDEN:
                continue
            try:
                status = entry.stat()
            except OSError as error:
                raise SourceFailed(f"{prefix}/{entry.name} cannot be read: {error.strerror}") from error
            if stat.S_ISDIR(status.st_mode):
                raise SourceFailed(f"{prefix}/{entry.name} is a folder in the folder of a class; {LAYOUT}")
            if not stat.S_ISREG(status.st_mode):
                raise SourceFailed(f"{prefix}/{entry.name} is not a file")
            changed = status.st_mtime_ns, status.st_ctime_ns
            files.append(File(f"{prefix}/{entry.name}", label, status.st_size, changed))
    if not files:
        raise SourceFailed(f"{prefix}/ has no image")
    return files


def _parted(classes: dict[str, list[File]], fraction: float, unused: list[str]) -> Listing:
    """With a part of each class, at least one image, kept for the test."""
    train, test = {}, {}
    for name, files in classes.items():
        if len(files) == 1:
            raise SourceFailed(f"{files[0].name} is the only image of its class: at least two, one for the test")
        files = sorted(files, key=_draw)
        kept = min(max(round(fraction * len(files)), 1), len(files) - 1)
        test[name], train[name] = files[:kept], files[kept:]
    return _ordered(train, test, unused)


def _ordered(train: dict[str, list[File]], test: dict[str, list[File]], unused: list[str]) -> Listing:
    """With classes mixed: what takes the first images of a set has some of each."""
    if not 2 <= len(train) <= MOST_CLASSES:
        raise SourceFailed(f"has {len(train)} class(es), {next(iter(train))}: from 2 to {MOST_CLASSES}; {LAYOUT}")
    mixed = (sorted((file for files in split.values() for file in files), key=_draw) for split in (train, test))
    return Listing(tuple(train), *mixed, unused)


def _draw(file: File) -> bytes:
    """A place in an order that is as good as random, and the same on every machine."""
    return hashlib.sha256(os.fsencode(file.name)).digest()


def _decoded(folder: Path, options: Options, listing: Listing | None = None) -> Arrays:
    """Every image of a folder. Ends with one line that names the first file that is none, and how many there are."""
    listing = listing or _listed(folder, options)
    files = [*listing.train, *listing.test]
    shape = (len(files), options.size, options.size, options.channels)
    _require_memory(shape)
    images, refused = np.empty(shape, np.uint8), {}
    is_watched = sys.stderr.isatty() and is_first_process()
    if len(files) > MANY and not is_watched:
        complain(f"data: decoding {len(files):,} images of {folder}")

    def decode(place: int) -> None:
        try:
            images[place] = decoded(folder / files[place].name, options)
        except (*UNUSABLE, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            refused[files[place].name] = _why(error)

    with warnings.catch_warnings(), ThreadPool(joblib.cpu_count()) as pool:
        warnings.simplefilter("ignore")  # what Pillow thinks of a file
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        done = pool.imap_unordered(decode, range(len(files)), chunksize=16)
        console = Console(stderr=True)
        for _ in track(done, "decoding images", len(files), console=console, transient=True, disable=not is_watched):
            pass
    if refused:
        name = min(refused)
        words = f"{name} cannot be read as an image: {refused[name]}"
        raise SourceFailed(f"{words}; nor can {len(refused) - 1} other(s)" if len(refused) > 1 else words)
    labels = np.array([file.label for file in files], np.min_scalar_type(len(listing.classes) - 1))
    split = len(listing.train)
    return Arrays(images[:split], labels[:split], images[split:], labels[split:])


def decoded(path: Path, options: Options) -> np.ndarray:
    """One image, upright, its middle cut out where it is not square, (H, W, C) uint8."""
    size, channels = options.size, options.channels
    with path.open("rb") as file, Image.open(file, formats=FORMATS) as image:
        image.draft(image.mode, (2 * size, 2 * size))  # a JPEG that is larger by far is decoded to less
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I"):  # 16 bits a pixel
            image = Image.fromarray((np.asarray(image).clip(0, 2**16 - 1) >> 8).astype(np.uint8))
        elif image.mode == "F":
            raise SourceFailed("its pixels are floating-point numbers")
        elif image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("L" if channels == 1 else "RGB")
        return np.asarray(ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)).reshape(size, size, channels)


def _why(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return f"it is none of {', '.join(FORMATS)}"
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"it has more than {Image.MAX_IMAGE_PIXELS:,} pixels"
    return one_line(error)


def _require_memory(shape: tuple[int, ...]) -> None:
    """Ends with one line, before any image is decoded, where training could not hold them."""
    taken, allowed = int(np.prod(shape, dtype=np.int64)), total_memory() // PART_OF_MEMORY
    if taken > allowed:
        words = f"{shape[0]:,} images of {' x '.join(map(str, shape[1:]))} take {taken:,} bytes"
        most = f"{allowed:,} are allowed, a quarter of this machine's memory, for training holds them several times"
        raise SourceFailed(f"{words}, and {most}; take a smaller data.size")


def mean_and_std(images: np.ndarray) -> tuple[list[float], list[float]]:
    """Of each channel of (N, H, W, C) uint8, over 255, to four digits. They are sums of whole numbers: the same
    everywhere. A channel that has one value alone is divided by 1.
    """
    channels = range(images.shape[3])
    counts = np.zeros((len(channels), 256), np.int64)
    for start in range(0, len(images), 1024):
        part = images[start : start + 1024]
        counts += np.stack([np.bincount(part[..., channel].ravel(), minlength=256) for channel in channels])
    values, number = np.arange(256), images[..., 0].size
    mean, squares = ((counts * values**power).sum(1) / (255**power * number) for power in (1, 2))
    std = np.sqrt((squares - mean**2).clip(0)).round(4)
    return mean.round(4).tolist(), np.where(std == 0, 1.0, std).tolist()
