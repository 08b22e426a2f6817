"""Checks of the server's invariants on recorded event logs.

docs/faults.md lists the invariants; ``events.jsonl`` of a run is such a log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from laconic.errors import LaconicError

__all__ = ["InvariantError", "all_work_once", "applied_once", "lost_at_most", "staleness"]

Event = dict[str, Any]


class InvariantError(LaconicError):
    """An event log that violates an invariant."""


def _require(holds: object, invariant: str, observed: object) -> None:
    if not holds:
        raise InvariantError(f"{invariant}: {observed}")


def applied_once(events: Iterable[Event], *, backup: bool = False) -> Counter[tuple[int, int]]:
    """P1: every accepted push of the surviving history is applied exactly once. Return the applied pushes.

    After a rewind the later updates are undone and made again; so are pushes of a voided round. With backup workers a
    push may be accepted too late to count.
    """
    pushed: set[tuple[int, int]] = set()
    applied: Counter[tuple[int, int]] = Counter()
    for event in events:
        kind = event["event"]
        if kind in ("resumed", "rewound"):
            applied = Counter({key: n for key, n in applied.items() if key[1] < event["version"]})
            pushed = {key for key in pushed if key[1] < event["version"]}
        elif kind == "gather":
            pushed = {key for key in pushed if key in applied}
        elif kind == "push":
            key = event["worker"], event["sequence"]
            _require(key not in pushed, "P1: a push was accepted twice", event)
            pushed.add(key)
        elif kind == "applied":
            applied[event["worker"], event["sequence"]] += 1
    twice = [key for key, count in applied.items() if count > 1]
    _require(applied and not twice, "P1: pushes applied more than once, or none at all", twice)
    missing = set(applied) ^ pushed if not backup else set(applied) - pushed
    _require(not missing, "P1: pushes accepted and not applied, or applied and not accepted", sorted(missing))
    return applied


def staleness(events: Iterable[Event]) -> int:
    """P3: return the largest staleness of a gradient: the updates between its worker's pull and its own."""
    pulled: dict[int, int] = {}
    updates = most = 0
    for event in events:
        if event["event"] == "pull":
            pulled[event["worker"]] = updates
        elif event["event"] == "applied":
            most = max(most, updates - pulled[event["worker"]])
            updates += 1
    return most


def all_work_once(events: Iterable[Event], tickets: int) -> None:
    """Without rounds: each piece of work of the surviving history was done exactly once, by any worker."""
    done: dict[int, int] = {}
    for event in events:
        if event["event"] == "resumed":
            done = {version: ticket for version, ticket in done.items() if version <= event["version"]}
        elif event["event"] == "applied":
            done[event["version"]] = event["ticket"]
    _require(sorted(done.values()) == list(range(tickets)), "work was not done exactly once", sorted(done.values()))


def lost_at_most(events: Iterable[Event], exchanges: int) -> list[int]:
    """P2: every rewind lost at most that many exchanges. Return the loss of each."""
    newest, losses = 0, []
    for event in events:
        if event["event"] == "applied":
            newest = max(newest, event["version"])
        elif event["event"] in ("resumed", "rewound"):
            losses.append(newest - event["version"])
            newest = event["version"]
    _require(all(0 <= loss <= exchanges for loss in losses), f"P2: more than {exchanges} exchanges were lost", losses)
    return losses
