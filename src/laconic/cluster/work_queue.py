"""Work for workers that do not wait for each other: whoever is free takes the next piece.

So an epoch takes as long as all workers together need for it, and a slow one does less of it. A ticket is the number
of a piece of work; each is done once, also when the worker that had it is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["NOTHING_LEFT", "WorkQueue"]

NOTHING_LEFT = -1


@dataclass
class _Lease:
    ticket: int
    base: int | None
    """The version that the worker computes on; None when it does not compute now."""


class WorkQueue:
    """Hands out tickets, and parameters no faster than the bound on their age allows.

    A gradient is as stale as there were updates between the parameters it was computed on and its own update. When a
    worker begins, everybody who computes could push before the slowest does: it begins only if even then nobody's
    gradient would be older than the bound. So no push ever waits, and nothing can wait for itself.

    Args:
        total: How many tickets there are; None when nobody knows.
        bound: How stale a gradient may be; None when it does not matter.

    >>> queue = WorkQueue(total=8, bound=1)
    >>> queue.start(0, version=0), queue.may_start(1, version=0)
    (0, True)
    >>> queue.start(1, version=0), queue.done(0, version=0), queue.may_start(0, version=1)
    (1, (0, 0), False)
    """

    def __init__(self, total: int | None, bound: int | None) -> None:
        self._total, self._bound = total, bound
        self._next = 0
        self._returned: list[int] = []
        self._loans: dict[int, _Lease] = {}

    def may_start(self, worker: int, version: int) -> bool:
        if self._bound is None:
            return True
        bases = [loan.base for other, loan in self._loans.items() if other != worker and loan.base is not None]
        return all(version - base + len(bases) <= self._bound for base in bases)

    def waiting_for(self, worker: int) -> list[int]:
        """Those who compute, the longest first."""
        loans = {w: loan.base for w, loan in self._loans.items() if w != worker and loan.base is not None}
        return sorted(loans, key=lambda w: (loans[w], w))

    def start(self, worker: int, version: int) -> int:
        """The ticket that a worker does now, on the parameters of that version; ``NOTHING_LEFT`` when all are out."""
        loan = self._loans.get(worker)
        if loan is None:
            ticket = self._take()
            if ticket == NOTHING_LEFT:
                return ticket
            loan = self._loans[worker] = _Lease(ticket, None)
        loan.base = version
        return loan.ticket

    def _take(self) -> int:
        if self._returned:
            self._returned.sort()
            return self._returned.pop(0)
        if self._total is not None and self._next >= self._total:
            return NOTHING_LEFT
        self._next += 1
        return self._next - 1

    def done(self, worker: int, version: int) -> tuple[int, int]:
        """A worker pushes; the ticket it was for, and how many updates it has missed."""
        loan = self._loans.get(worker)
        if loan is None or loan.base is None:  # it was not told to begin: what it has is still to be done
            return NOTHING_LEFT, 0
        del self._loans[worker]
        return loan.ticket, version - loan.base

    def stop(self, worker: int) -> None:
        """A worker was lost: nobody waits for its push, and its next life has the same ticket."""
        if worker in self._loans:
            self._loans[worker].base = None

    def give_back(self, worker: int) -> None:
        """A worker has gone for good."""
        loan = self._loans.pop(worker, None)
        if loan is not None:
            self._returned.append(loan.ticket)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: what is out now is done anew after it."""
        return {"next": self._next, "open": sorted([*self._returned, *(loan.ticket for loan in self._loans.values())])}

    def load(self, state: Mapping[str, Any]) -> None:
        self._next, self._returned, self._loans = int(state["next"]), [int(t) for t in state["open"]], {}
