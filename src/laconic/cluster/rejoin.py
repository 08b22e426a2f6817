"""From which version a synchronous job goes on after somebody was lost: the newest that all can go back to exactly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Agreement", "Offer", "agree"]


@dataclass(frozen=True)
class Offer:
    """What a worker can go on from.

    Args:
        versions: Those it remembers exactly, of those that all servers have.
        lost: It remembers none of them: it begins with an empty memory wherever the others go.
    """

    versions: frozenset[int]
    lost: bool = False


@dataclass(frozen=True)
class Agreement:
    """Where all go on, and who does so with an empty memory."""

    version: int
    lost: frozenset[int]


def agree(offers: Mapping[int, Offer], held: Iterable[int]) -> Agreement:
    """The newest version that everybody offers and the server holds.

    Several servers decide each on its own: the answer depends on what workers offer, which is the same for all, and on
    what a server holds only where workers offer something else.

    >>> offers = {0: Offer(frozenset({47, 40, 20})), 1: Offer(frozenset({40, 20}))}
    >>> agree(offers, [47, 40, 20])
    Agreement(version=40, lost=frozenset())

    Somebody may have lost its memory. It follows the others, and says so:

    >>> agree({0: Offer(frozenset({47, 40})), 1: Offer(frozenset(), lost=True)}, [47, 40])
    Agreement(version=47, lost=frozenset({1}))
    """
    holds = set(held)
    forgetful = {worker for worker, offer in offers.items() if offer.lost or not offer.versions & holds}
    firm = [offer.versions & holds for worker, offer in offers.items() if worker not in forgetful]
    common = set.intersection(*map(set, firm)) if firm else holds
    if common:
        return Agreement(max(common), frozenset(forgetful))
    version = max(set.union(*map(set, firm)))
    behind = {worker for worker, offer in offers.items() if version not in offer.versions}
    return Agreement(version, frozenset(forgetful | behind))
