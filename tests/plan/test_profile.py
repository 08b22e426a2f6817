"""Profiles: validated files, and interpolation between measured sizes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from laconic.errors import ConfigError, FileError
from laconic.plan import profile as profiles
from laconic.plan.profile import MachineLoad, ModelTimes, Point, Profile, Transport, load, shipped

SMALL = Profile(
    "small", codecs={"qsgd:4": (Point(1000, 500.0, 1e-3, 2e-3, 3e-3), Point(3000, 1500.0, 2e-3, 4e-3, 9e-3))},
    models={"m": ModelTimes((10, 30), 8, 0.5, ((0.5, 0.25), (1.0, 1.0)), {"qsgd:4": {"push": 20.0}}, (1, 2))},
    slowdown={2: 1.2, 4: 2.4}, transport=Transport(0.01, 0.001, 1e-9), load=MachineLoad(0.5, None, False),
)  # fmt: skip


def test_saved_profile_is_loaded_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "small.json"
    SMALL.save(path)
    assert load(path) == SMALL
    assert json.loads(path.read_text())["version"] == profiles.VERSION


def test_points_are_interpolated_between_sizes_and_proportional_beyond() -> None:
    middle = SMALL.point("qsgd:4", 2000)
    assert (middle.nbytes, middle.encode_s, middle.decode_s, middle.add_s) == (1000.0, 1.5e-3, 3e-3, 6e-3)
    beyond = SMALL.point("qsgd:4", 6000)
    assert (beyond.nbytes, beyond.encode_s, beyond.add_s) == (3000.0, 4e-3, 18e-3)
    tiny = SMALL.point("qsgd:4", 10)
    assert tiny.nbytes == 5.0 and tiny.encode_s == 0.25e-3  # a call on few values takes at least a quarter


def test_slowdown_is_interpolated_and_proportional_beyond() -> None:
    assert [SMALL.slowdown_of(n) for n in (1, 2, 4)] == [1.0, 1.2, 2.4]
    assert SMALL.slowdown_of(3) == pytest.approx(1.8) and SMALL.slowdown_of(8) == pytest.approx(4.8)
    bare = replace(SMALL, slowdown={}, machine={"cores": 4})
    assert (bare.slowdown_of(2), bare.slowdown_of(8)) == (1.0, 2.0)  # not measured: they share the cores evenly
    assert replace(bare, device="cuda").slowdown_of(2) == 2.0  # and so they do with a GPU


@pytest.mark.parametrize("name", shipped())
def test_shipped_profile_is_complete(name: str) -> None:
    profile = load(name)
    assert profile.name == name and profile.about and profile.source
    assert all(profile.point(spec, 10**6).nbytes > 0 for spec in profile.codecs)


def test_profile_jang2017_holds_table_1_of_the_paper() -> None:
    paper = load("jang2017")
    gzip = paper.point("gzip", 58_250_000)  # 233 MB
    assert gzip.nbytes == pytest.approx(233e6 / 1.079) and gzip.encode_s == pytest.approx(8.079)
    assert gzip.decode_s == pytest.approx(1.898)
    assert {"cpu", "jang2017"} <= set(shipped())


MODEL = ModelTimes((100, 9), 8, 0.1, ((0.5, 0.5), (1.0, 1.0)), {}, (2, 1), 0.001)


def broken(**changes: object) -> dict[str, object]:
    return {**SMALL.to_json(), **changes}


@pytest.mark.parametrize(
    "values, message",
    [
        (broken(version=1), "is a profile of version 1, this laconic reads version 3: measure again"),
        (broken(format="x"), "is not a profile: write one by `laconic calibrate -o"),
        ([], "is not a profile"),
        (broken(codecs={"qsgd:4": []}), "codec 'qsgd:4' must have points"),
        (broken(codecs={"qsgd:4": [{"numel": 1}]}), "is not a complete profile"),
        (
            broken(codecs={"q": [{"numel": 1, "nbytes": 1, "encode_s": -1, "decode_s": 1, "add_s": 1}]}),
            "encode_s must be finite and at least 0, got -1",
        ),
        (broken(slowdown={"2": "slow"}), "is not a complete profile"),
        (broken(colour="red"), "its fields must be"),
        (broken(memory="16gb"), "memory must be finite and at least 0, got '16gb'"),
        (broken(memory=1e308), r"memory must be at most 1e\+18, got 1e\+308"),
        (broken(threads=-1), "threads must be finite"),
        (broken(models={"m": {**asdict(MODEL), "dims": [2]}}), "model 'm' has 2 slots and 1 dims"),
        (broken(models={"m": {**asdict(MODEL), "apply_s": -1.0}}), "apply_s must be finite"),
        (broken(models={"m": {**asdict(MODEL), "numels": [5, -5]}}), "slot 1 must be finite"),
    ],
)
def test_invalid_profile_raises_file_error_in_one_line(tmp_path: Path, values: object, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(values))
    with pytest.raises(FileError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_missing_profile_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"profile must be a file or one of .*, got 'cpuu'"):
        load("cpuu")
    with pytest.raises(FileError, match="cannot read the profile"):
        load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("not JSON")
    with pytest.raises(FileError, match="is not a profile"):
        load(tmp_path / "text.json")
