"""Evidence of what codecs give up: files and shipped trainings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laconic.errors import FileError
from laconic.plan.candidates import Candidate, with_estimates
from laconic.plan.evidence import FAMILIES, FORMAT, MODEL_FAMILIES, load_evidence, read_evidence, shipped_evidence
from laconic.plan.profile import Point, Profile
from laconic.train.models import MODELS


def test_every_model_has_a_family() -> None:
    assert set(MODEL_FAMILIES) == set(MODELS) and set(MODEL_FAMILIES.values()) <= set(FAMILIES)


def test_shipped_evidence_shows_what_ruins_a_model() -> None:
    by_codec = {(one.codec, one.model, one.every): one for one in shipped_evidence() if one.plain_optimizer != "muon"}
    assert len(by_codec) > 25 and all(Candidate.parse(Candidate.of(one).label) for one in by_codec.values())
    assert by_codec["topk:0.01|qsgd:4,norm=l2", "vgg11", 1].given_up > 5  # method 5 of kothari2021
    assert by_codec["ef|topk:0.06|sign", "vgg11", 4].given_up < 0.1  # method laconic
    recipe = next(one for one in by_codec.values() if (one.every, one.plain_optimizer) == (96, "adamw"))
    assert recipe.optimizer == "muon" and "by muon instead of adamw" in recipe.text


def test_evidence_file_is_read_back(tmp_path: Path) -> None:
    values = {"format": FORMAT, "trainings": [one.values() for one in shipped_evidence()[:3]]}
    (tmp_path / "mine.json").write_text(json.dumps(values))
    assert load_evidence(tmp_path / "mine.json") == shipped_evidence()[:3]


@pytest.mark.parametrize("text, message", [
    ("{}", "has no evidence: write it by"), ("no JSON", "has no evidence"),
    (json.dumps({"format": FORMAT, "trainings": [{"codec": "sign"}]}), "has incomplete evidence"),
])  # fmt: skip
def test_other_file_raises_file_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(FileError, match=message):
        load_evidence(tmp_path / "x.json")


@pytest.mark.parametrize("changes, message", [
    ({"model": "\0"}, "model must be printable text"), ({"codec": 7}, "codec must be printable text"),
    ({"measure": "loss", "plain": 0.0}, "reached over plain must be finite"),
    ({"measure": "loss", "plain": 1e-300, "reached": 1e300}, "reached over plain must be finite"),
    ({"noise": float("inf")}, "noise must be finite"),
])  # fmt: skip
def test_evidence_that_cannot_be_shown_is_refused(changes: dict[str, object], message: str) -> None:
    values = {"format": FORMAT, "trainings": [shipped_evidence()[0].values() | changes]}
    with pytest.raises(FileError, match=message):
        read_evidence(values, "mine.json")


def test_error_feedback_is_estimated_by_decoding_and_two_passes() -> None:
    codecs = {"none": [Point(100, 400, 1.0, 1.0, 1.0)], "sign": [Point(100, 13, 5.0, 3.0, 2.0)]}
    estimated = with_estimates(Profile("x", codecs=codecs), ["ef|sign", "ef|topk:0.1"]).codecs
    assert estimated["ef|sign"] == (Point(100, 13, 10.0, 3.0, 2.0),) and "ef|topk:0.1" not in estimated
