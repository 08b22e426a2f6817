"""What happened that nobody asked for: said once in the log, counted always.

Codecs keep no state, so what they must not pass over in silence (values that saturate, a slower backend that serves) is
counted here, for the process.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter

__all__ = ["counts", "say"]

log = logging.getLogger("laconic")
_lock = threading.Lock()
_counts: Counter[str] = Counter()
_said: set[str] = set()


def say(kind: str, count: int, message: str) -> None:
    """Count ``count`` events of a kind; log the message unless it was logged before."""
    with _lock:
        _counts[kind] += count
        fresh = message not in _said
        _said.add(message)
    if fresh:
        log.warning("%s (said once; laconic.counters.counts() goes on counting %r)", message, kind)


def counts() -> dict[str, int]:
    """How often each kind of thing has happened in this process."""
    with _lock:
        return dict(_counts)
