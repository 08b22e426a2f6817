"""Mode ``bounded:S``: like ``async``, but no gradient is applied that is more than S updates stale."""

from __future__ import annotations

from laconic.cluster.modes.async_ import WorkQueue

__all__ = ["BoundedQueue"]


class BoundedQueue(WorkQueue):
    """A work queue that lets a worker start only if no gradient can become too stale.

    A gradient is as stale as there are updates between the weights it was computed on and its own update. When a worker
    starts, all workers that compute could push before the slowest one does. A worker starts only if even then no
    gradient exceeds the bound. So no push ever waits, and there is no deadlock.

    >>> queue = BoundedQueue(total=8, bound=1)
    >>> queue.start(0, version=0), queue.may_start(1, version=0)
    (0, True)
    >>> queue.start(1, version=0), queue.done(0, version=0), queue.may_start(0, version=1)
    (1, (0, 0), False)
    """

    def __init__(self, total: int | None, bound: int) -> None:
        super().__init__(total)
        self._bound = bound

    def may_start(self, worker: int, version: int) -> bool:
        bases = self._computing(except_for=worker).values()
        return all(version - base + len(bases) <= self._bound for base in bases)
