import json
import math
import subprocess
import sys

import pytest
from conftest import ROOT

from cosinegate.runs.files import write_atomically
from cosinegate.runs.record import AWAY, Epochs, Record, read_record, write_record
from cosinegate.terminal.errors import UserError


def test_a_failed_write_keeps_the_old_record_and_leaves_no_scraps(tmp_path, monkeypatch):
    record = Record(status="running", epochs=Epochs(done=0))
    write_record(tmp_path, record)
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_record(tmp_path, record.replace(status="finished"))
    assert read_record(tmp_path).status == "running"
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_a_reader_never_sees_a_part(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, "old")
    seen = []
    monkeypatch.setattr("os.fsync", lambda fd: seen.append(path.read_text()))
    write_atomically(path, "new" * 1000)
    assert seen == ["old", "new" * 1000]  # of the file before it has its place, and of its folder after
    assert path.read_text() == "new" * 1000


@pytest.mark.parametrize("content", ["{", "[]", "", json.dumps({"format": 99}), "\x00"])
def test_a_record_that_is_not_one_is_refused_with_its_path(tmp_path, content):
    (tmp_path / "record.json").write_text(content)
    with pytest.raises(UserError, match=r"record\.json"):
        read_record(tmp_path)


def test_no_record_is_none(tmp_path):
    assert read_record(tmp_path) is None


RESULTS = sorted((ROOT / "results").rglob("record.json"))
BARE = {"format": 1, "status": "running", "epochs": {"done": 0}}


def test_every_record_in_results_is_read_and_kept_whole():
    assert len(RESULTS) > 20
    for path in RESULTS:
        record = read_record(path.parent)
        assert record.status == "finished"
        assert record.accuracy.test > 0.1
        assert record.as_dict() == json.loads(path.read_text())


def put(folder, **changes) -> None:
    (folder / "record.json").write_text(json.dumps(BARE | changes))


def test_a_record_of_an_earlier_version_lacks_keys_and_one_of_a_later_has_more(tmp_path):
    put(tmp_path, sweep=None, accuracy={"later": [1]}, later={"deep": math.inf})
    record = read_record(tmp_path)
    assert (record.seed, record.accuracy.test, record.flops.executed, record.latency) == (None, None, None, None)
    write_record(tmp_path, record.replace(seed=3))
    expected = BARE | {"sweep": None, "accuracy": {"later": [1]}, "later": {"deep": math.inf}, "seed": 3}
    assert json.loads((tmp_path / "record.json").read_text()) == expected


def test_what_is_null_or_was_measured_as_nan_is_read(tmp_path):
    nothing = {key: None for key in Record.model_fields if key not in BARE}
    put(tmp_path, **nothing)
    assert read_record(tmp_path).accuracy.best is None
    measured = {key: math.nan for key in ("mean_gate", "skip_percent", "images_per_second")}
    put(tmp_path, accuracy={"best": math.nan}, flops={"executed": math.nan}, **measured)
    record = read_record(tmp_path)
    assert all(map(math.isnan, (record.accuracy.best, record.flops.executed, record.mean_gate)))


WRONG = [
    ("accuracy.test", 1.5),
    ("accuracy.test", "0.9"),
    ("accuracy.best_epoch", 2.5),
    ("accuracy", []),
    ("epochs.done", -1),
    ("epochs.planned", 0),
    ("seed", 2**32),
    ("seed", True),
    ("flops.compiled", math.nan),
    ("blocks_open", [0.5, 2]),
    ("paths", "many"),
    ("dynamic_blocks", math.inf),
    ("latency.time_ratio", -1),
    ("seconds", math.nan),
    ("first_step_at", math.inf),
    ("trained_by", [{"epochs": [0, 2]}]),
    ("trained_by", [{"epochs": [1]}]),
    ("network", "../evil"),
    ("identity", ".hidden"),
    ("experiment", "a\x1b[2J"),
    ("ended_early", "a\nb"),
    ("cut.overfit_batches", "../evil"),
    ("overrides", "seed=1"),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_a_wrong_value_is_one_line_with_file_key_value_and_what_to_do(key, value, tmp_path):
    part, _, last = key.partition(".")
    put(tmp_path, **{part: {**BARE.get(part, {}), last: value} if last else value})
    with pytest.raises(UserError) as refused:
        read_record(tmp_path)
    assert str(refused.value) == f"{tmp_path}/record.json: {key} = {value}; {AWAY}"


@pytest.mark.parametrize("change", [{"status": "done"}, {"status": None}, {"epochs": 3}, {"epochs": {"done": None}}])
def test_a_record_without_status_or_epochs_says_so(change, tmp_path):
    put(tmp_path, **change)
    with pytest.raises(UserError, match=f"record.json lacks a run's status or epochs; {AWAY}"):
        read_record(tmp_path)


def test_a_record_never_gets_a_value_that_it_could_not_be_read_with(tmp_path):
    record = Record(status="running", epochs=Epochs(done=0))
    with pytest.raises(UserError, match=r"cannot hold accuracy\.last = inf"):
        record.replace(accuracy={"last": math.inf})


def test_reading_records_needs_no_torch():
    words = "import sys, cosinegate.runs.record; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], cwd=ROOT / "src", check=False).returncode == 0
