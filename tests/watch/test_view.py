from __future__ import annotations

import io
import itertools
import json
import os
import time
from pathlib import Path

import pytest
from rich.console import Console
from run_folders import Folder, server, worker

from laconic.watch.terminal import render
from laconic.watch.view import MAX_POINTS, SILENT_AFTER, Watcher


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "run")


def test_phase_from_absent_to_ended(folder: Folder) -> None:
    assert folder.view().phase == "absent"
    folder.config(iterations=100)
    assert folder.view().phase == "prepared" and folder.view().iterations == 100
    folder.status(server(at=10.0, version=40, workers=[worker(40, 0.5), worker(38, 0.7)]))
    view = folder.view(at=11.0)
    assert (view.phase, view.iteration, view.loss) == ("running", 40, pytest.approx(0.6))
    assert not view.over and view.silent_s == 1.0
    assert folder.view(at=10.0 + SILENT_AFTER + 0.1).phase == "silent"
    for phase in ("stopped", "failed", "ended"):
        folder.status(server(at=10.0, phase=phase, failure="too large a step" if phase == "failed" else None))
        view = folder.view(at=1000.0)
        assert view.phase == phase and view.over
        assert view.failure == ("too large a step" if phase == "failed" else None)
    folder.write("summary.json", {"accuracy": 91.5})
    assert folder.view().summary == {"accuracy": 91.5}


def test_incomplete_line_is_read_later_and_damaged_lines_are_skipped(folder: Folder) -> None:
    folder.config()
    folder.status(server(at=1.0))
    whole = [json.dumps(folder.point(at=float(i), iteration=i)) for i in range(3)]
    path = folder.path / "progress.jsonl"
    path.write_text("\n".join(whole)[:-5])
    watcher = folder.watcher()
    assert [point["iteration"] for point in watcher.view().points] == [0, 1]
    path.write_text(
        "\n".join([*whole, "garbage", "{}", "[1]", '{"at": 1e999}', "\0\0", whole[0][:40], whole[1]]) + "\n"
    )
    assert [point["iteration"] for point in watcher.view().points] == [0, 1, 2, 1]
    path.write_text(whole[2] + "\n")  # a new run in the same folder
    assert [point["iteration"] for point in watcher.view().points] == [2]


def test_long_run_is_thinned_evenly(folder: Folder) -> None:
    folder.config()
    folder.status(server(at=1.0))
    many = 3 * MAX_POINTS
    with (folder.path / "progress.jsonl").open("w") as file:
        file.writelines(json.dumps(folder.point(at=float(i), iteration=i)) + "\n" for i in range(many))
    points = folder.view().points
    assert MAX_POINTS / 2 <= len(points) <= MAX_POINTS and points[0]["iteration"] == 0
    assert points[-1]["iteration"] > many - 10
    gaps = {after["at"] - before["at"] for before, after in itertools.pairwise(points)}
    assert gaps == {4.0}, "evenly"


def test_several_servers_are_merged(folder: Folder) -> None:
    folder.config(servers=2)
    folder.status(server(at=10.0, received=100, sent=10, workers=[worker(4, 0.5)], faults={"lost": 1}))
    assert folder.view(at=10.0).phase == "running"
    folder.status(server(at=10.5, received=200, sent=20, workers=[worker(4, 0.5)], faults={"lost": 2, "late": 1}), 1)
    view = folder.view(at=11.0)
    assert (view.received, view.sent, len(view.workers), view.faults) == (300, 30, 1, {"lost": 3, "late": 1})
    folder.status(server(at=10.5, phase="ended"), 1)
    assert folder.view(at=11.0).phase == "running", "the other server still runs"
    assert folder.view(at=20.0).phase == "silent"
    folder.status(server(at=10.5, phase="ended"))
    assert folder.view(at=20.0).phase == "ended"


def test_speed_is_measured_over_the_last_seconds(folder: Folder) -> None:
    folder.config(iterations=100)
    folder.status(server(at=30.0, version=60, workers=[worker(60, 0.1)]))
    points = [folder.point(at=float(at), iteration=2 * at, received=1000 * at, sent=500 * at) for at in range(31)]
    (folder.path / "progress.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    view = folder.view(at=30.0)
    assert view.bytes_per_s == pytest.approx(1500) and view.left_s == pytest.approx(20)


def test_staleness_and_seconds_include_all_workers(folder: Folder) -> None:
    folder.config(mode="async")
    first = worker(5, 0.1, missed=2, missed_most=7, missed_sum=20, applied=4)
    second = worker(5, 0.1, missed=0, missed_most=1, missed_sum=4, applied=4)
    folder.status(server(at=1.0, version=5, workers=[first, second, worker(0, None, lives=0, state="expected")]))
    view = folder.view(at=1.0)
    assert (view.missed, view.missed_most, view.missed_mean, view.iteration) == (2, 7, 3.0, 5)
    assert view.seconds["compute"] == 2.0


@pytest.mark.parametrize("name, text", [
    ("config.json", "{"), ("config.json", "[]"), ("config.json", "[" * 100_000), ("status.json", "null"),
    ("status.json", '{"at": NaN}'), ("summary.json", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1")),
])  # fmt: skip
def test_invalid_file_gives_one_note(folder: Folder, name: str, text: str) -> None:
    folder.config()
    (folder.path / name).write_text(text)
    view = folder.view()
    assert len(view.notes) == 1 and name in view.notes[0]
    json.dumps(view.to_json(), allow_nan=False)


@pytest.mark.parametrize("value", ["1e999", "-1", "true", '"many"', "NaN", "1" + "0" * 400])
def test_invalid_numbers_are_ignored(folder: Folder, value: str) -> None:
    folder.path.mkdir()
    (folder.path / "config.json").write_text(f'{{"iterations": {value}, "servers": {value[:20]}, "job": {value}}}')
    (folder.path / "summary.json").write_text(f'{{"accuracy": {value}}}')
    view = folder.view()
    assert view.iterations == 0 and view.phase == "prepared"
    json.dumps(view.to_json(), allow_nan=False)


def test_file_instead_of_a_folder_is_absent(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert Watcher(tmp_path / "file").view().phase == "absent"


@pytest.mark.parametrize("loss", [2.0**63, 1e30, 1e308, -1e308, 2**63])
def test_loss_of_any_size_is_shown(folder: Folder, loss: float) -> None:
    folder.config()
    folder.status(server(0.5, workers=[worker(3, loss), worker(3, loss)]))
    folder.write("progress.jsonl", {})
    points = [folder.point(0.1 * i, i, loss=value) for i, value in enumerate((1.0, loss, -1e308, 1e308))]
    (folder.path / "progress.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    view = folder.view()
    assert view.phase == "running" and not view.notes and len(view.points) == 4
    assert view.loss == pytest.approx(float(loss)) and view.workers[0].loss == float(loss)
    json.dumps(view.to_json(), allow_nan=False)
    console = Console(width=120, file=io.StringIO())
    console.print(render(view, width=120))
    assert console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("loss", [float("inf"), float("nan"), 10**400])
def test_loss_that_is_not_finite_does_not_hide_the_rest(folder: Folder, loss: float) -> None:
    folder.config()
    status = server(0.5, workers=[worker(3, 1.0), worker(3, 2.0)]).to_json()
    status["workers"][0]["loss"] = loss
    folder.write("status.json", status)
    view = folder.view()
    assert view.phase == "running" and view.loss == 2.0 and view.workers[0].loss is None


def test_number_of_servers_is_bounded(folder: Folder) -> None:
    folder.config(servers=10**15)
    began = time.monotonic()
    view = folder.view()
    assert view.phase == "prepared" and "only 256 are shown" in view.notes[0] and time.monotonic() - began < 5


def test_pipe_in_place_of_a_status_or_of_progress_does_not_block(folder: Folder) -> None:
    folder.config()
    os.mkfifo(folder.path / "progress.jsonl")
    os.mkfifo(folder.path / "status.json")
    assert "not a regular file" in folder.view().notes[0]
    (folder.path / "status.json").unlink()
    folder.status(server(0.5))
    assert folder.view().points == []


def test_view_has_float32_bytes_and_sampled_accuracy(folder: Folder) -> None:
    folder.config()
    workers = [worker(5, 1.0, bytes_sent=10, bytes_received=10, bytes_raw=200) for _ in range(2)]
    folder.status(server(1.0, workers=workers))
    good = {"at": 1.0, "iteration": 4, "accuracy": 90.5, "examples": 100}
    lines = [good, good | {"accuracy": "x"}, good | {"accuracy": 101.0}, good | {"examples": 0}, {"at": 1.0}]
    (folder.path / "accuracy.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "damaged\n")
    view = folder.view()
    assert (view.raw, view.saved, view.accuracies) == (400, 360, [good])
