"""Replicas of torchft that are killed at random, and the accounts of their residuals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from laconic.errors import ConfigError
from laconic_lab.faults import replica_kills
from laconic_lab.faults.replica_process import Attempt

OPTIONS = {"spec": "ef|sign", "replicas": 2, "kills": 0, "seconds": 1.0, "ended_early": 0, "unfinished": 0}


def attempt(name: str, step: int, **changes) -> Attempt:
    """A step of two replicas with the gradients 3 and 3, of which 5 arrive; 0.5 stays with each sender."""
    values = {
        "life": 0, "quorum": 1, "size": 2, "committed": True, "exchanged": True, "inputs": 3.0, "delivered": 5.0,
        "sent_before": 0.5 * step, "mean_before": 0.0, "sent_after": 0.5 * step + 0.5, "mean_after": 0.0,
        "weights": step, "seconds": 0.1,
    }  # fmt: skip
    return Attempt(name=name, step=step, **values | changes)


def two_steps() -> list[Attempt]:
    return [attempt(name, step) for step in range(2) for name in ("a", "b")]


def test_balanced_accounts_are_accepted():
    result = replica_kills.check(two_steps(), **OPTIONS)
    assert result.kept and (result.balanced_steps, result.compared_steps, result.continued) == (2, 2, 2)


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"weights": 7}, "differing_steps"),
        ({"sent_after": 0.0}, "unbalanced_steps"),
        ({"sent_before": 0.0, "sent_after": 0.5}, "broken"),
    ],
)
def test_wrong_accounts_are_found(changes, field):
    attempts = two_steps()
    attempts[3] = replace(attempts[3], **changes)
    result = replica_kills.check(attempts, **OPTIONS)
    assert getattr(result, field) == 1 and not result.kept


def test_discarded_attempt_must_put_residuals_back():
    failed = [attempt(name, 1, committed=False, quorum=2, sent_after=9.0) for name in ("a", "b")]
    again = [attempt(name, 1, quorum=3) for name in ("a", "b")]
    first = two_steps()[:2]
    assert replica_kills.check([*first, *failed, *again], **OPTIONS).kept
    kept = [replace(each, sent_before=9.0, sent_after=9.5) for each in again]
    result = replica_kills.check([*first, *failed, *kept], **OPTIONS)
    assert result.discarded == 1 and result.broken == 2


def test_attempt_that_others_committed_must_keep_what_was_sent():
    lone = replace(two_steps()[3], committed=False)
    after = [attempt(name, 2, quorum=2) for name in ("a", "b")]
    result = replica_kills.check([*two_steps()[:3], lone, *after], **OPTIONS)
    assert result.kept and result.committed_by_others == 1 and result.balanced_steps == 3


def test_fewer_than_three_replicas_are_refused():
    with pytest.raises(ConfigError, match="replicas must be 3 or more"):
        replica_kills.kill_replicas(1, 1.0, replicas=2)


@pytest.mark.slow
def test_killed_replicas_stay_equal_and_lose_no_residuals():
    pytest.importorskip("torchft", reason="no torchft")
    result = replica_kills.kill_replicas(3, 20.0)
    assert result.kept and result.kills == 3 and result.balanced_steps > 20 and result.quorums >= 3
