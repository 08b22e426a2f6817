"""What README tells users to pick was trained, and `laconic plan` does not object to it."""

from __future__ import annotations

import json

import picks_table
import pytest
from picks_table import GBIT, PICKS, TRANSFORMERS, Pick, behind, evidence_of

from cli_runner import Run, run
from laconic.errors import FileError
from laconic.plan.evidence import OPTIMIZERS, shipped_evidence
from laconic.suitability import judge

__all__ = ["run"]  # a fixture

TOLERATED = 0.5
"""Per cent of the loss, or points of accuracy, that a pick may give up where the seeds' noise is smaller."""


@pytest.mark.parametrize("pick", [pick for pick in PICKS if pick.trained], ids=lambda pick: pick.what)
def test_pick_trained_as_well_as_float32_and_suits_the_optimizer(pick: Pick) -> None:
    training = evidence_of(pick, shipped_evidence())
    assert training is not None and training.given_up <= max(training.noise, TOLERATED), training.text
    assert pick.trained is not None
    _, optimizer, codec, every = pick.trained
    assert every > 1 or judge(codec, OPTIMIZERS[optimizer]) is None


def test_plan_has_no_objection_to_what_readme_picks_for_transformers(run: Run) -> None:
    shown = run("plan", "--model", "gpt", "--workers", "8", "--bandwidth", "1gbit", "--json")
    rows = {row["codec"]: row for row in json.loads(shown.stdout)["rows"]}
    picked = [pick.trained[2] for pick in PICKS if pick.who == TRANSFORMERS and pick.link == GBIT and pick.trained]
    assert picked == ["qsgd:4"] and all(rows[codec]["objection"] == "" and rows[codec]["evidence"] for codec in picked)


def test_pick_without_evidence_says_so_and_unknown_evidence_is_refused() -> None:
    assert behind(Pick("x", GBIT, "`attach`", None), ()) == picks_table.NOT_TRAINED
    with pytest.raises(FileError, match="have no training"):
        behind(Pick("x", GBIT, "`attach`", ("mlp", "sgd", "qsgd:4", 1)), ())
