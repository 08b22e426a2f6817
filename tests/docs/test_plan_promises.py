"""What the planner promised beside what real runs kept, from the Records."""

from __future__ import annotations

import plan_promises
import pytest


def test_recommended_recipes_reach_the_quality_of_plain_ddp_as_soon_as_promised_less_a_fifth() -> None:
    promises = plan_promises.promises()
    assert any(one.model.startswith("GPT") for one in promises)
    assert [one for one in promises if not one.holds] == []


def test_utilisation_of_local_steps_is_predicted() -> None:
    utilisations = list(plan_promises.utilisations())
    assert len(utilisations) >= 20 and {one.ranks for one in utilisations} == {2, 4}
    for one in utilisations:
        assert one.predicted == pytest.approx(one.measured, abs=0.17), one
