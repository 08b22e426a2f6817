from __future__ import annotations

import importlib
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from event_files import read_events
from runs import Folder, server

from laconic.errors import FileError
from laconic.watch.tensorboard import EventFile, TensorBoard


def board_of(folder: Folder, where: Path) -> Path:
    """A run of three moments and an end, shown twice on its way."""
    folder.config(iterations=30)
    folder.status(server(at=1.0))
    board, watcher = TensorBoard(where), folder.watcher()
    path = folder.path / "progress.jsonl"
    for count in (2, 3):
        points = [folder.point(at=100.0 + i, iteration=10 * i, received=1000 * i, faults=i) for i in range(count)]
        path.write_text(
            "".join(json.dumps(point | {"loss": None if i == 1 else 0.5}) + "\n" for i, point in enumerate(points))
        )
        board.show(watcher.look())
    folder.status(server(at=1.0, phase="ended"))
    folder.write("summary.json", {"accuracy": 91.25, "method": "5"})
    for _ in range(2):
        board.show(watcher.look())
    board.close()
    (found,) = where.iterdir()
    return found


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    found = list(read_events(board_of(Folder(tmp_path / "run"), tmp_path / "board")))
    assert [step for step, _, _ in found] == [0, 0, 10, 20, 30]
    assert [at for _, at, _ in found][1:4] == [100.0, 101.0, 102.0]
    first, *moments, last = [scalars for _, _, scalars in found]
    assert first == {} and last == {"summary/accuracy": 91.25}
    assert [scalars.get("loss") for scalars in moments] == [0.5, None, 0.5]
    assert [scalars["bytes/received"] for scalars in moments] == [0, 1000, 2000]


def test_a_large_step_and_a_long_name(tmp_path: Path) -> None:
    events = EventFile(tmp_path)
    events.add(300, 1.0, {"x" * 300: 1.5, "é": -2.0})
    events.close()
    assert list(read_events(events.path))[1] == (300, 1.0, {"x" * 300: 1.5, "é": -2.0})


def test_damage_is_seen(tmp_path: Path) -> None:
    """Guards the tests above: a reader that checks nothing would pass them."""
    path = board_of(Folder(tmp_path / "run"), tmp_path / "board")
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        list(read_events(path))


def test_tensorboard_itself_reads_it(tmp_path: Path) -> None:
    if find_spec("tensorboard") is None:
        pytest.skip("NOT TESTED: event files as TensorBoard reads them, because it is not installed")
    path = board_of(Folder(tmp_path / "run"), tmp_path / "board")
    module = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
    events = list(module.RawEventFileLoader(str(path)).Load())
    assert len(events) == 5
    event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event.FromString(events[1])
    assert {value.tag: value.simple_value for value in event.summary.value}["loss"] == 0.5


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot write for TensorBoard to"):
        EventFile(tmp_path / "file" / "board")
