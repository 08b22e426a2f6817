"""Rounding, packing, selection: one signature (``interface``), several backends.

``reference`` is torch and the truth; ``cpu`` is the C++ core with the same bytes. ``of(tensor)`` picks one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

from torch import Tensor

from laconic.kernels import cpu, reference
from laconic.kernels.interface import Kernels

__all__ = ["Kernels", "of", "use"]

log = logging.getLogger("laconic")

_BACKENDS: dict[str, Kernels] = {"cpu": cpu, "reference": reference}
_forced: ContextVar[Kernels | None] = ContextVar("laconic_kernels", default=None)


def of(x: Tensor) -> Kernels:
    """The backend that serves this tensor's device."""
    forced = _forced.get()
    if forced is not None:
        return forced
    if x.is_cpu:
        return cpu
    _say_reference_serves(x.device.type)
    return reference


@lru_cache(maxsize=8)
def _say_reference_serves(device: str) -> None:
    log.info("no kernels for %s yet: plain torch serves there, with the same bytes", device)


@contextmanager
def use(backend: str) -> Iterator[None]:
    """Within this context all work goes to one backend: ``reference`` or ``cpu``. For tests and comparisons."""
    token = _forced.set(_BACKENDS[backend])
    try:
        yield
    finally:
        _forced.reset(token)
