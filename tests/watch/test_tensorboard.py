from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_folders import Folder, server

from laconic.errors import ConfigError, FileError
from laconic.watch.tensorboard import EventWriter


def read_scalars(path: Path) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yield step, time and scalars of each event: a TFRecord is a length, its checksum, a message and its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data, offset = path.read_bytes(), 0
    while offset < len(data):
        (length,) = struct.unpack_from("<Q", data, offset)
        event = Event.FromString(data[offset + 12 : offset + 12 + length])
        yield event.step, event.wall_time, {value.tag: value.simple_value for value in event.summary.value}
        offset += 16 + length


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path / "run")
    folder.config(iterations=30)
    folder.status(server(at=1.0))
    return folder


def test_points_and_summary_are_written_once(folder: Folder, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    writer, watcher = EventWriter(tmp_path / "board"), folder.watcher()
    for count in (2, 3):
        points = [folder.point(at=100.0 + i, iteration=10 * i, received=1000 * i, faults=i) for i in range(count)]
        lines = [json.dumps(point | {"loss": None if i == 1 else 0.5}) + "\n" for i, point in enumerate(points)]
        (folder.path / "progress.jsonl").write_text("".join(lines))
        writer.update(watcher.view())
    folder.status(server(at=1.0, phase="ended"))
    folder.write("summary.json", {"accuracy": 91.25, "method": "5"})
    for _ in range(2):
        writer.update(watcher.view())
    writer.close()
    (path,) = (tmp_path / "board").iterdir()
    version, *points, summary = read_scalars(path)
    assert path.name.startswith("events.out.tfevents.") and version[2] == {}
    assert [(step, at) for step, at, _ in points] == [(0, 100.0), (10, 101.0), (20, 102.0)]
    assert [scalars.get("loss") for _, _, scalars in points] == [0.5, None, 0.5]
    assert [scalars["bytes/received"] for _, _, scalars in points] == [0, 1000, 2000]
    tags = {"bytes/received", "bytes/sent", "updates", "staleness/updates missed", "faults", "loss"}
    assert set(points[0][2]) == tags
    assert (summary[0], summary[2]) == (30, {"summary/accuracy": 91.25})


def test_folder_that_cannot_be_written_to_raises_file_error(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot write TensorBoard's event files to"):
        EventWriter(tmp_path / "file" / "board")


def test_missing_package_raises_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laconic.watch.tensorboard.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'laconic\[tensorboard\]'"):
        EventWriter(tmp_path)
