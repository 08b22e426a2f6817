"""Which version a synchronous job resumes from after a failure: the newest one that all workers can restore exactly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Agreement", "Offer", "agree"]


@dataclass(frozen=True)
class Offer:
    """The versions from which a worker can resume.

    Args:
        versions: Those it can restore exactly, among the versions that all servers have.
        lost: It can restore none: it resumes wherever the others do, without residuals.
    """

    versions: frozenset[int]
    lost: bool = False


@dataclass(frozen=True)
class Agreement:
    """The version from which all workers resume, and the workers that resume without residuals."""

    version: int
    lost: frozenset[int]


def agree(offers: Mapping[int, Offer], available: Iterable[int]) -> Agreement:
    """Return the newest version that all workers offer and the server has.

    Several servers decide independently: the result depends on the offers, which are the same for all of them, and on
    a server's own versions only where workers offer others.

    >>> offers = {0: Offer(frozenset({47, 40, 20})), 1: Offer(frozenset({40, 20}))}
    >>> agree(offers, [47, 40, 20])
    Agreement(version=40, lost=frozenset())

    A worker without a usable version follows the others:

    >>> agree({0: Offer(frozenset({47, 40})), 1: Offer(frozenset(), lost=True)}, [47, 40])
    Agreement(version=47, lost=frozenset({1}))
    """
    on_server = set(available)
    lost = {worker for worker, offer in offers.items() if offer.lost or not offer.versions & on_server}
    usable = [offer.versions & on_server for worker, offer in offers.items() if worker not in lost]
    common = set.intersection(*map(set, usable)) if usable else on_server
    if common:
        return Agreement(max(common), frozenset(lost))
    version = max(set.union(*map(set, usable)))
    without_version = {worker for worker, offer in offers.items() if version not in offer.versions}
    return Agreement(version, frozenset(lost | without_version))
