import json

import pytest

from cosinegate.errors import UserError
from cosinegate.files import write_atomically
from cosinegate.record import read_record, write_record


def test_a_failed_write_keeps_the_old_record_and_leaves_no_scraps(tmp_path, monkeypatch):
    write_record(tmp_path, {"status": "running", "epochs": {"done": 0}})
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_record(tmp_path, {"status": "finished"})
    assert read_record(tmp_path)["status"] == "running"
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
