from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from runs import Folder, server, worker

from laconic.watch.view import MOST_POINTS, SILENT, Watcher


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "run")


def test_from_before_it_has_begun_to_its_end(folder: Folder) -> None:
    assert folder.look().phase == "absent"
    folder.config(iterations=100)
    assert folder.look().phase == "prepared" and folder.look().iterations == 100
    folder.status(server(at=10.0, version=40, workers=[worker(40, 0.5), worker(38, 0.7)]))
    seen = folder.look(at=11.0)
    assert (seen.phase, seen.iteration, seen.loss) == ("running", 40, pytest.approx(0.6))
    assert not seen.over and seen.silent_s == 1.0
    assert folder.look(at=10.0 + SILENT + 0.1).phase == "silent"
    for phase in ("stopped", "failed", "ended"):
        folder.status(server(at=10.0, phase=phase, failure="too large a step" if phase == "failed" else None))
        seen = folder.look(at=1000.0)
        assert seen.phase == phase and seen.over
        assert seen.failure == ("too large a step" if phase == "failed" else None)
    folder.write("summary.json", {"accuracy": 91.5})
    assert folder.look().summary == {"accuracy": 91.5}


def test_a_line_that_is_being_written_is_read_when_it_is_whole(folder: Folder) -> None:
    folder.config()
    folder.status(server(at=1.0))
    whole = [json.dumps(folder.point(at=float(i), iteration=i)) for i in range(3)]
    path = folder.path / "progress.jsonl"
    path.write_text("\n".join(whole)[:-5])
    watcher = folder.watcher()
    assert [point["iteration"] for point in watcher.look().points] == [0, 1]
    path.write_text(
        "\n".join([*whole, "garbage", "{}", "[1]", '{"at": 1e999}', "\0\0", whole[0][:40], whole[1]]) + "\n"
    )
    assert [point["iteration"] for point in watcher.look().points] == [0, 1, 2, 1]
    path.write_text(whole[2] + "\n")  # the run was begun anew
    assert [point["iteration"] for point in watcher.look().points] == [2]


def test_a_long_run_is_shown_by_some_of_its_moments(folder: Folder) -> None:
    folder.config()
    folder.status(server(at=1.0))
    many = 3 * MOST_POINTS
    with (folder.path / "progress.jsonl").open("w") as file:
        file.writelines(json.dumps(folder.point(at=float(i), iteration=i)) + "\n" for i in range(many))
    points = folder.look().points
    assert MOST_POINTS / 2 <= len(points) <= MOST_POINTS and points[0]["iteration"] == 0
    assert points[-1]["iteration"] > many - 10
    gaps = {after["at"] - before["at"] for before, after in itertools.pairwise(points)}
    assert gaps == {4.0}, "evenly"


def test_several_servers_are_one_run(folder: Folder) -> None:
    folder.config(servers=2)
    folder.status(server(at=10.0, received=100, sent=10, workers=[worker(4, 0.5)], faults={"lost": 1}))
    assert folder.look(at=10.0).phase == "running"
    folder.status(server(at=10.5, received=200, sent=20, workers=[worker(4, 0.5)], faults={"lost": 2, "late": 1}), 1)
    seen = folder.look(at=11.0)
    assert (seen.received, seen.sent, len(seen.workers), seen.faults) == (300, 30, 1, {"lost": 3, "late": 1})
    folder.status(server(at=10.5, phase="ended"), 1)
    assert folder.look(at=11.0).phase == "running", "the other one serves"
    assert folder.look(at=20.0).phase == "silent"
    folder.status(server(at=10.5, phase="ended"))
    assert folder.look(at=20.0).phase == "ended"


def test_speed_is_that_of_late(folder: Folder) -> None:
    folder.config(iterations=100)
    folder.status(server(at=30.0, version=60, workers=[worker(60, 0.1)]))
    points = [folder.point(at=float(at), iteration=2 * at, received=1000 * at, sent=500 * at) for at in range(31)]
    (folder.path / "progress.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    seen = folder.look(at=30.0)
    assert seen.bytes_per_s == pytest.approx(1500) and seen.left_s == pytest.approx(20)


def test_staleness_and_seconds_are_of_all_workers(folder: Folder) -> None:
    folder.config(mode="async")
    first = worker(5, 0.1, missed=2, missed_most=7, missed_sum=20, applied=4)
    second = worker(5, 0.1, missed=0, missed_most=1, missed_sum=4, applied=4)
    folder.status(server(at=1.0, version=5, workers=[first, second, worker(0, None, lives=0, state="expected")]))
    seen = folder.look(at=1.0)
    assert (seen.missed, seen.missed_most, seen.missed_mean, seen.iteration) == (2, 7, 3.0, 5)
    assert seen.seconds["compute"] == 2.0


@pytest.mark.parametrize(
    "name, text",
    [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("config.json", "[" * 100_000),
        ("status.json", "null"),
        ("status.json", '{"at": NaN}'),
        ("summary.json", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1")),
    ],
)
def test_files_that_say_nothing_are_noted(folder: Folder, name: str, text: str) -> None:
    folder.config()
    (folder.path / name).write_text(text)
    seen = folder.look()
    assert len(seen.notes) == 1 and name in seen.notes[0]
    json.dumps(seen.to_json(), allow_nan=False)


@pytest.mark.parametrize("value", ["1e999", "-1", "true", '"many"', "NaN", "1" + "0" * 400])
def test_odd_numbers_do_no_harm(folder: Folder, value: str) -> None:
    folder.path.mkdir()
    (folder.path / "config.json").write_text(f'{{"iterations": {value}, "servers": {value[:20]}, "job": {value}}}')
    (folder.path / "summary.json").write_text(f'{{"accuracy": {value}}}')
    seen = folder.look()
    assert seen.iterations == 0 and seen.phase == "prepared"
    json.dumps(seen.to_json(), allow_nan=False)


def test_a_file_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert Watcher(tmp_path / "file").look().phase == "absent"
