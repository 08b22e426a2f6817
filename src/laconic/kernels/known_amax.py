"""The largest magnitude of values that a selector has just kept: an encoder on a GPU need not wait for it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["amax_is", "known_amax"]

_known: ContextVar[int | None] = ContextVar("laconic_amax_bits", default=None)


@contextmanager
def amax_is(amax_bits: int) -> Iterator[None]:
    """Let encoders of the block take these amax bits for those of their tensor."""
    token = _known.set(amax_bits)
    try:
        yield
    finally:
        _known.reset(token)


def known_amax() -> int | None:
    """Return the amax bits of the tensor to encode; None if they are not known yet."""
    return _known.get()
