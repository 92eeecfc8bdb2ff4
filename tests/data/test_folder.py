"""A person's own images, in a folder a class: real PNG and JPEG files of the embedded digits, trained on for real."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, assert_one_line, config, process
from PIL import Image
from sklearn.datasets import load_digits

from cosinegate.config.identity import identity
from cosinegate.data import folder as module
from cosinegate.data.folder import Options, decoded, mean_and_std, move, read_images
from cosinegate.data.module import ImageData
from cosinegate.evaluate import evaluate
from cosinegate.runs.record import read_record
from cosinegate.runs.untrusted import parse_yaml
from cosinegate.terminal.errors import UserError
from cosinegate.training.build import build_module

CLASSES = ("$a$", "<b>", "[red]c")  # names that would mean something in a figure, a page and a terminal
SMALL = ["data=folder", "data.size=8", "data.channels=1", "data.crop_padding=1", "data.batch_size=8"]
TRAIN = [*SMALL, "network.depth=8", "network.width=4", "trainer.max_epochs=2", "callbacks.curves=null", "threads=1"]
PROGRAM = str(ROOT / "src" / "train.py")
IN_TESTS = {"PYTHONPATH": str(ROOT / "tests")}


def draw(folder: Path, number: int = 10) -> Path:
    """So many images of each class: its digits, half of them as PNG, half as JPEG."""
    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for place, image in enumerate(images[digits.target == label][:number]):
            suffix = "png" if place % 2 else "jpg"
            Image.fromarray(image).save(folder / name / f"{place}.{suffix}", quality=95)
    return folder


@pytest.fixture
def photos(tmp_path) -> Path:
    return draw(tmp_path / "photos")


@pytest.fixture(autouse=True)
def afresh():
    """As in a process of its own."""
    module._facts.cache_clear()


def asked(folder: Path, *overrides: str):
    """The config of a run on the folder's images, kept beside it."""
    chosen = config(*TRAIN, *overrides).copy()
    chosen.data.folder, chosen.data.root = str(folder), str(folder.parent / "root")
    return chosen


def read(folder: Path, *overrides: str):
    module._facts.cache_clear()
    chosen = asked(folder, *overrides)
    read_images(chosen.data)
    return chosen


def loaded(folder: Path, *overrides: str) -> ImageData:
    data = ImageData(read(folder, *overrides).data, seed=0)
    data.setup()
    return data


def refused(folder: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, *overrides)
    assert not list(folder.parent.glob("root/*"))
    return str(caught.value)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that was stopped in its second epoch, and went on with a copy of the images at another path."""
    root = tmp_path_factory.mktemp("run")
    draw(root / "photos")
    overrides = [*TRAIN, "+callbacks.fault._target_=faults.Befalls", "name=mine"]
    first = process(PROGRAM, *overrides, "data.folder=photos", cwd=root, **IN_TESTS, FAULT="SIGTERM")
    assert first.returncode == 143, first.stderr
    (root / "photos").rename(root / "elsewhere")
    second = process(PROGRAM, *overrides, "data.folder=elsewhere", cwd=root, **IN_TESTS)
    assert second.returncode == 0, second.stderr
    (folder,) = (root / "runs" / "mine").glob("*-s0")
    return root, folder, first, second


def ask(root: Path, folder: Path, *overrides: str):
    return evaluate(config(f"run={folder}", f"root={root}", *overrides, "threads=1", config_name="evaluate"))


def test_what_the_images_are_is_said_before_training_and_kept_in_the_config(run):
    _, folder, first, _ = run
    data = parse_yaml((folder / "config.yaml").read_text(), folder)["data"]
    assert data["content"]["classes"] == list(CLASSES)
    assert (data["content"]["train_size"], data["content"]["test_size"]) == (24, 6)
    words = f"24 training and 6 test images of 3 classes, 8 x 8 x 1, mean {data['mean']} and std {data['std']}"
    assert words in first.stdout
    assert read_record(folder).data == f"folder-{data['content']['sha256'][:10]}"


def test_a_stopped_run_goes_on_with_the_same_images_at_another_path(run):
    root, folder, _, second = run
    assert "resuming mine" in second.stdout
    record = read_record(folder)
    assert (record.status, record.epochs.done) == ("finished", 2)
    assert len(list((root / "runs" / "mine").glob("*-s*"))) == 1


def test_evaluation_on_kept_images_has_the_records_accuracy_and_the_names_of_the_classes(run):
    root, folder, *_ = run
    done = process(str(ROOT / "src" / "evaluate.py"), f"run={folder}", f"root={root}/data", cwd=root / "runs")
    assert done.returncode == 0, done.stderr
    assert f"{100 * read_record(folder).accuracy.test:.2f}%" in done.stdout
    assert all(name in done.stdout for name in CLASSES)


def test_evaluation_elsewhere_takes_a_copy_and_refuses_other_images_with_one_line(run, tmp_path):
    root, folder, *_ = run
    (there := tmp_path / "root").mkdir()
    shutil.copytree(root / "elsewhere", tmp_path / "copy")
    result, _, classes = ask(there, folder, f"data_folder={tmp_path / 'copy'}")
    assert result["accuracy"] == read_record(folder).accuracy.test
    assert classes == CLASSES
    (tmp_path / "copy" / "<b>" / "0.jpg").unlink()
    done = process("src/evaluate.py", f"run={folder}", f"root={there}", f"data_folder={tmp_path / 'copy'}")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("train_size = 23, not 24")


def test_an_evaluation_that_finds_no_images_says_where_it_looked(run, tmp_path):
    _, folder, *_ = run
    with pytest.raises(UserError, match=r"folder elsewhere: no such folder.*data_folder="):
        ask(tmp_path, folder)


def test_a_second_start_decodes_nothing_and_a_changed_folder_is_read_again(photos, monkeypatch):
    first = read(photos)
    before = loaded(photos).arrays
    calls = []
    original = module.decoded
    monkeypatch.setattr(module, "decoded", lambda *given: calls.append(given) or original(*given))
    again = loaded(photos)
    assert not calls
    assert all(np.array_equal(*pair) for pair in zip(before, again.arrays, strict=True))
    os.utime(photos / "<b>" / "0.jpg")
    assert identity(read(photos)) == identity(first)  # the same content
    assert len(calls) == 30
    Image.new("L", (8, 8)).save(photos / "<b>" / "0.jpg")
    changed = read(photos)
    assert len(calls) == 60
    assert changed.data.content.sha256 != first.data.content.sha256
    assert identity(changed) != identity(first)


@pytest.mark.parametrize("damaged", ["folder-state-*.json", "folder-??????????.npz"])
def test_a_damaged_file_is_never_used(photos, damaged):
    before = loaded(photos).arrays
    (path,) = (photos.parent / "root").glob(damaged)
    path.write_bytes(path.read_bytes()[:-30])
    after = loaded(photos).arrays
    assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))


def test_the_same_images_are_the_same_run_at_another_path_and_other_options_another(photos, tmp_path):
    one = read(photos)
    other = read(shutil.copytree(photos, tmp_path / "copy"), f"data.test_fraction={one.data.test_fraction}", "seed=5")
    assert identity(other) == identity(one)
    assert identity(read(photos, "data.size=9")) != identity(one)
    assert identity(read(photos, "data.mean=[0.5]", "data.std=[0.5]")) != identity(one)


def test_other_data_sets_have_no_key_of_a_folder_in_their_identity(photos, monkeypatch):
    """Runs that were trained before there were folders keep theirs."""
    hashed, dumps = [], json.dumps
    monkeypatch.setattr("json.dumps", lambda content, **options: hashed.append(content) or dumps(content, **options))
    identity(config("+experiment=digits"))
    assert not {"size", "channels", "test_fraction", "content"} & hashed[-1]["data"].keys()
    identity(read(photos))
    assert {"size", "channels", "test_fraction", "content"} <= hashed[-1]["data"].keys()


def test_a_part_of_each_class_is_kept_for_the_test_whatever_the_seed(photos):
    one, other = loaded(photos), loaded(photos, "seed=7", "data.test_fraction=0.01")
    assert one.arrays.test_labels.tolist().count(0) == one.arrays.test_labels.tolist().count(2) == 2
    assert sorted(other.arrays.test_labels) == [0, 1, 2]  # one of each at least
    tested = {image.tobytes() for image in one.arrays.test_images}
    assert {image.tobytes() for image in other.arrays.test_images} <= tested
    assert not tested & {image.tobytes() for image in one.arrays.train_images}
    assert len(set(one.arrays.train_labels[:8].tolist())) == 3  # the first ones are of all classes


@pytest.mark.parametrize("name", ["test", "val"])
def test_images_of_train_and_test_stay_apart(photos, name):
    shutil.copytree(photos, photos / "train")
    for one in CLASSES:
        (photos / one).rename(photos / f"unused {one}")
    draw(photos / name, 4)
    for path in [*photos.glob("train/*/[0-3].*")]:
        path.unlink()
    (photos / "train" / ".DS_Store").touch()
    (photos / "train" / "<b>" / "Thumbs.db").touch()
    data = loaded(photos)
    assert (len(data.arrays.train_labels), len(data.arrays.test_labels)) == (18, 12)
    assert data.image_set.classes == CLASSES


def test_held_out_images_need_a_number_that_leaves_some(photos):
    chosen = read(photos, "data.validation=holdout")
    with pytest.raises(UserError, match=r"below the 24 training images; a tenth of them is data\.holdout=2"):
        ImageData(chosen.data, 0)
    data = loaded(photos, "data.validation=holdout", "data.holdout=4")
    assert [len(data.splits[split][1]) for split in ("train", "val", "test")] == [20, 4, 6]


def test_mean_and_std_are_those_of_the_training_images(photos):
    images = np.random.default_rng(3).integers(0, 256, (1500, 3, 5, 3), dtype=np.uint8)
    images[..., 1] = 51  # one value alone is divided by 1
    mean, std = mean_and_std(images)
    scaled = images.astype(float) / 255
    assert mean == scaled.mean((0, 1, 2)).round(4).tolist()
    assert std == [round(scaled[..., 0].std(), 4), 1.0, round(scaled[..., 2].std(), 4)]
    data = loaded(photos)
    assert list(data.config.mean) == [round((data.arrays.train_images / 255).mean(), 4)]


def test_more_classes_than_a_byte_has(tmp_path):
    for label in range(300):
        (tmp_path / "many" / f"{label:03d}").mkdir(parents=True)
        for place in range(2):
            Image.new("L", (8, 8), label % 256).save(tmp_path / "many" / f"{label:03d}" / f"{place}.png")
    data = loaded(tmp_path / "many")
    assert sorted(data.splits["train"][1].tolist()) == list(range(300))
    assert build_module(read(tmp_path / "many")).network.num_classes == 300


def gradient(width: int, height: int, mode: str) -> Image.Image:
    """Darker to the left."""
    row = np.linspace(0, 255, width).astype(np.uint8)
    return Image.fromarray(np.tile(row, (height, 1))).convert(mode)


def as_rgb(image: Image.Image, path: Path, size: int = 8, channels: int = 3, **options) -> np.ndarray:
    image.save(path, **options)
    return decoded(path, Options(size, channels, 0.2))


def test_an_image_of_the_right_size_is_taken_as_it_is(tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    assert np.array_equal(as_rgb(Image.fromarray(pixels), tmp_path / "x.png"), pixels)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_kind_of_image_has_the_channels_that_are_asked_for(tmp_path, mode, channels):
    found = as_rgb(gradient(64, 64, mode), tmp_path / "x.tiff", channels=channels)
    assert found.shape == (8, 8, channels)
    assert found[:, 0].mean() < 60 < 190 < found[:, -1].mean()


def test_sixteen_bits_are_scaled_and_not_cut_off(tmp_path):
    deep = Image.fromarray(np.tile(np.linspace(0, 65535, 8).astype(np.uint16), (8, 1)))
    assert as_rgb(deep, tmp_path / "x.png")[0, :, 0].tolist() == [0, 36, 73, 109, 146, 182, 219, 255]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_what_is_transparent_is_white(tmp_path, mode):
    clear = Image.new("RGBA", (8, 8), (10, 20, 30, 0)).convert("LA" if mode == "LA" else "RGBA")
    suffix = "gif" if mode == "PA" else "png"
    assert as_rgb(clear, tmp_path / f"x.{suffix}").min() == 255


def test_a_photo_is_turned_upright_by_its_exif(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: turn by 90 degrees
    found = as_rgb(gradient(64, 64, "RGB"), tmp_path / "x.jpg", exif=exif)
    assert found[0].mean() < 60 < 190 < found[-1].mean()


def test_of_a_wide_image_the_middle_is_taken_in_its_proportions(tmp_path):
    wide = Image.new("RGB", (300, 100), "red")
    wide.paste("blue", (100, 0, 200, 100))
    assert (as_rgb(wide, tmp_path / "x.png")[:, 1:-1] == (0, 0, 255)).all()


def test_a_large_photo_is_decoded_to_what_its_pixels_are(tmp_path):
    """A JPEG may be decoded to an eighth of its size; that must not show."""
    large = gradient(1024, 768, "RGB")
    fast, whole = as_rgb(large, tmp_path / "x.jpg", quality=95), as_rgb(large, tmp_path / "x.png")
    assert np.abs(fast.astype(int) - whole).max() <= 3


def spoil(folder: Path, what: str) -> None:
    one = folder / "<b>"
    if what == "no image":
        (one / "notes.txt").write_text("no image")
        (one / "cut.png").write_bytes((one / "1.png").read_bytes()[:70])
    elif what == "bomb":
        Image.new("1", (9500, 9500)).save(one / "bomb.png")
    elif what == "program":
        Image.new("L", (8, 8)).save(one / "x.eps")
    elif what == "pipe":
        os.mkfifo(one / "pipe.png")
    elif what == "link to nothing":
        (one / "x.png").symlink_to("gone")
    elif what == "nested":
        (one / "more").mkdir()
    elif what == "empty class":
        (folder / "d").mkdir()
    elif what == "one class":
        for name in ("$a$", "[red]c"):
            shutil.rmtree(folder / name)
    elif what == "one image":
        for path in sorted(one.iterdir())[1:]:
            path.unlink()
    elif what == "reference":
        one.rename(folder / "${oc.env:HOME}")
    elif what == "no class":
        for name in CLASSES:
            shutil.rmtree(folder / name)
    else:
        shutil.copytree(folder, folder / "train")
        for name in CLASSES:
            shutil.rmtree(folder / name)
        shutil.copytree(folder / "train", folder / "test")
        if what == "unknown class":
            (folder / "test" / "d").mkdir()
            (one := folder / "test" / "<b>" / "1.png").rename(folder / "test" / "d" / one.name)
        elif what == "no test image":
            shutil.rmtree(folder / "test" / "<b>")


SPOILT = {
    "no image": ["<b>/cut.png cannot be read as an image", "nor can 1 other"],
    "bomb": ["<b>/bomb.png", "more than 89,478,485 pixels"],
    "program": ["<b>/x.eps", "none of BMP, GIF, JPEG, PNG, PPM, TIFF, WEBP"],
    "pipe": ["<b>/pipe.png is not a file"],
    "link to nothing": ["<b>/x.png cannot be read: No such file"],
    "nested": ["<b>/more is a folder in the folder of a class", "train/<class>/"],
    "empty class": ["d/ has no image"],
    "one class": ["1 class(es), <b>: from 2"],
    "one image": ["<b>/0.jpg is the only image of its class"],
    "reference": ["${oc.env:HOME} cannot be the name of a class"],
    "no class": ["has no folder of a class"],
    "unknown class": ["test/d is a class that train/ does not have"],
    "no test image": ["test/ has no image of <b>, a class of train/"],
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_folder_that_cannot_be_read_is_refused_with_the_first_reason(photos, what):
    spoil(photos, what)
    said = refused(photos)
    assert said.startswith(f"data.folder = {photos}: ")
    assert all(words in said for words in SPOILT[what]), said


def test_what_is_no_image_ends_the_command_with_one_line(photos, tmp_path):
    spoil(photos, "no image")
    (photos / "<b>" / "notes.txt").rename(photos / "<b>" / "a\x1b[31m\n.txt")
    done = process(PROGRAM, *TRAIN, "data.folder=photos", cwd=tmp_path)
    assert_one_line(done, r"data.folder = photos: <b>/a\x1b[31m .txt cannot be read as an image")
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data=folder"], "data.folder has no value: give the folder of your images, as in data.folder=photos"),
        (["data=folder", "data.folder=gone"], "data.folder = gone: no such folder"),
        (["data=folder", "data.size=4"], "data.size = 4: must be null or from 8 to 1024 pixels"),
        (["data=folder", "data.size=null"], "data.size has no value"),
        (["data=digits", "data.size=16"], "data.size = 16: is for data=folder, not for digits"),
        (["data=folder", "data.channels=2"], "data.channels = 2: must be null, 1 (grey) or 3 (RGB)"),
        (["data=folder", "data.mean=[0.5]"], "data.mean has 1 values and data.std 0"),
    ],
)
def test_wrong_keys_are_refused_with_one_line(overrides, words, tmp_path):
    assert_one_line(process(PROGRAM, *overrides, cwd=tmp_path), words)
    assert not list(tmp_path.iterdir())


def test_a_set_that_the_memory_does_not_hold_is_refused_before_it_is_decoded(photos, monkeypatch):
    monkeypatch.setattr(module, "total_memory", lambda: 4 * 1919)
    monkeypatch.setattr(module, "decoded", None)
    assert "30 images of 8 x 8 x 1 take 1,920 bytes, and 1,919 are allowed" in refused(photos)


def test_ctrl_c_while_images_are_decoded_leaves_nothing(photos, monkeypatch):
    def interrupted(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "track", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read(photos)
    assert not (photos.parent / "root").exists()


def test_a_config_whose_images_were_not_read_builds_no_network(photos):
    with pytest.raises(UserError, match=r"data.content has no value"):
        build_module(asked(photos))


def test_another_data_set_moves_without_a_look_at_its_folder():
    data = config("+experiment=digits").data.copy()
    move(data, "there", "nowhere")
    assert (data.root, data.folder) == ("there", "nowhere")
    assert torch.equal(torch.tensor(data.mean), torch.tensor([0.3]))
