"""Profiles: files that are checked, and what they say between the lines."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from laconic.errors import ConfigError, FileError
from laconic.plan import profile as profiles
from laconic.plan.profile import ModelTimes, Point, Profile, load, shipped

SMALL = Profile(
    "small",
    codecs={"qsgd:4": (Point(1000, 500.0, 1e-3, 2e-3, 3e-3), Point(3000, 1500.0, 2e-3, 4e-3, 9e-3))},
    models={"m": ModelTimes((10, 30), 8, 0.5, ((0.5, 0.25), (1.0, 1.0)), {"qsgd:4": {"push": 20.0}}, (1, 2))},
    crowd={2: 1.2, 4: 2.4},
)


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "small.json"
    SMALL.save(path)
    assert load(path) == SMALL
    assert json.loads(path.read_text())["version"] == profiles.VERSION


def test_between_points_and_beyond_them() -> None:
    middle = SMALL.point("qsgd:4", 2000)
    assert (middle.nbytes, middle.encode_s, middle.decode_s, middle.add_s) == (1000.0, 1.5e-3, 3e-3, 6e-3)
    beyond = SMALL.point("qsgd:4", 6000)
    assert (beyond.nbytes, beyond.encode_s, beyond.add_s) == (3000.0, 4e-3, 18e-3)
    tiny = SMALL.point("qsgd:4", 10)
    assert tiny.nbytes == 5.0 and tiny.encode_s == 0.25e-3  # a call takes its time


def test_processes_share_cores() -> None:
    assert [SMALL.slowdown(n) for n in (1, 2, 4)] == [1.0, 1.2, 2.4]
    assert SMALL.slowdown(3) == pytest.approx(1.8) and SMALL.slowdown(8) == pytest.approx(4.8)
    assert replace(SMALL, crowd={}).slowdown(8) == 1.0


@pytest.mark.parametrize("name", shipped())
def test_shipped_profiles_are_whole(name: str) -> None:
    found = load(name)
    assert found.name == name and found.about
    assert all(found.point(spec, 10**6).nbytes > 0 for spec in found.codecs)


def test_the_papers_cluster_is_among_them() -> None:
    paper = load("jang2017")
    gzip = paper.point("gzip", 58_250_000)  # 233 MB
    assert gzip.nbytes == pytest.approx(233e6 / 1.079) and gzip.encode_s == pytest.approx(8.079)
    assert gzip.decode_s == pytest.approx(1.898)
    assert {"cpu", "jang2017"} <= set(shipped())


MODEL = ModelTimes((100, 9), 8, 0.1, ((0.5, 0.5), (1.0, 1.0)), {}, (2, 1), 0.001)


def broken(**changes: object) -> dict[str, object]:
    return {**SMALL.to_json(), **changes}


@pytest.mark.parametrize(
    "values, words",
    [
        (broken(version=2), "is a profile of version 2, this laconic reads version 1: measure again"),
        (broken(format="x"), "is no profile: write one by `laconic calibrate -o"),
        ([], "is no profile"),
        (broken(codecs={"qsgd:4": []}), "codec 'qsgd:4' has no points"),
        (broken(codecs={"qsgd:4": [{"numel": 1}]}), "is not a whole profile"),
        (
            broken(codecs={"q": [{"numel": 1, "nbytes": 1, "encode_s": -1, "decode_s": 1, "add_s": 1}]}),
            "encode_s is -1",
        ),
        (broken(crowd={"2": "slow"}), "is not a whole profile"),
        (broken(colour="red"), "it has the fields"),
        (broken(memory="16gb"), "memory is '16gb'"),
        (broken(threads=-1), "threads is -1"),
        (broken(models={"m": {**asdict(MODEL), "dims": [2]}}), "model 'm' has 2 slots and 1 dims"),
        (broken(models={"m": {**asdict(MODEL), "apply_s": -1.0}}), "apply_s is -1"),
        (broken(models={"m": {**asdict(MODEL), "numels": [5, -5]}}), "slot 1 is -5"),
    ],
)
def test_what_is_no_profile_is_refused_in_one_line(tmp_path: Path, values: object, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(values))
    with pytest.raises(FileError, match=words) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown profile 'cpuu': a file, or one of"):
        load("cpuu")
    with pytest.raises(FileError, match="cannot read the profile"):
        load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("not JSON")
    with pytest.raises(FileError, match="is no profile"):
        load(tmp_path / "text.json")
