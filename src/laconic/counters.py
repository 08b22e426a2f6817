"""Counters of events that were not requested, such as a saturated value or a fallback to a slower backend.

Such an event is logged once and counted always. Codecs keep no state, so their events are counted for the process
(``count``). An object with statistics of its own, such as a channel, counts there and logs through ``LogOnce``.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter

__all__ = ["LogOnce", "count", "counts"]

log = logging.getLogger("laconic")


class LogOnce:
    """Log the first warning of each kind and drop the later ones.

    Args:
        counted_in: Where the owner counts all events, for the message: ``channel.stats``.

    >>> warn = LogOnce("channel.stats")
    >>> warn("nonfinite", "slot 'w' holds a NaN: the round is skipped")
    >>> warn("nonfinite", "slot 'b' holds a NaN: the round is skipped")  # not logged
    """

    def __init__(self, counted_in: str) -> None:
        self._counted_in = counted_in
        self._logged: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, kind: str, message: str) -> None:
        with self._lock:
            first = kind not in self._logged
            self._logged.add(kind)
        if first:
            log.warning("%s (logged once, counted in %s)", message, self._counted_in)


_lock = threading.Lock()
_counts: Counter[str] = Counter()
_warn = LogOnce("laconic.counters.counts()")


def count(kind: str, n: int, message: str) -> None:
    """Count ``n`` events of a kind in this process, and log the message the first time it occurs."""
    with _lock:
        _counts[kind] += n
    _warn(message, message)


def counts() -> dict[str, int]:
    """Return how many events of each kind have occurred in this process."""
    with _lock:
        return dict(_counts)
