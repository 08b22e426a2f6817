from __future__ import annotations

import pytest

from laconic import records
from laconic.errors import FileError
from laconic.records import Record


def test_records_are_read_as_written(tmp_path):
    written = [Record("bench.codec", {"encode_s": 0.5, "nbytes": 12}, seed=3), Record("bench.link", {})]
    path = tmp_path / "deep" / "records.jsonl"
    records.write(written, path)
    assert records.read(path) == written
    assert not list(path.parent.glob("*.partial"))


@pytest.mark.parametrize("below", ["records.jsonl", "folder/records.jsonl"])
def test_writing_below_a_file_names_the_file(tmp_path, below):
    blocking = tmp_path / "results"
    blocking.write_text("not a folder")
    with pytest.raises(FileError) as caught:
        records.write([Record("bench.codec", {})], blocking / below)
    expected = f"cannot write records to {blocking / below}: {blocking} is a file, not a folder"
    assert str(caught.value) == expected


def test_copy_without_history_takes_its_commit_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_git(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(records.subprocess, "run", no_git)
    monkeypatch.delenv("LACONIC_COMMIT", raising=False)
    assert records.commit.__wrapped__() is None
    monkeypatch.setenv("LACONIC_COMMIT", "0123456789ab")
    assert records.commit.__wrapped__() == "0123456789ab"
