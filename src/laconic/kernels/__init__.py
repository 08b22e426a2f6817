"""Rounding, packing, selection: one signature (``interface``), several backends.

``reference`` is torch and the truth; ``cpu`` is the C++ core with the same bytes; ``hosted`` is torch on other devices.
``of(tensor)`` picks one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from laconic import notices
from laconic.kernels import cpu, hosted, reference
from laconic.kernels.interface import Kernels

__all__ = ["Kernels", "of", "use"]

_BACKENDS: dict[str, Kernels] = {"cpu": cpu, "hosted": hosted, "reference": reference}
_forced: ContextVar[Kernels | None] = ContextVar("laconic_kernels", default=None)


def of(x: Tensor) -> Kernels:
    """The backend that serves this tensor's device."""
    forced = _forced.get()
    if forced is not None:
        return forced
    if x.is_cpu:
        return cpu
    notices.say("reference_kernels", 1, f"{x.device.type} has no kernels yet: plain torch serves, with the same bytes")
    return hosted


@contextmanager
def use(backend: str) -> Iterator[None]:
    """Within this context all work goes to one backend: ``reference``, ``hosted`` or ``cpu``. For tests."""
    token = _forced.set(_BACKENDS[backend])
    try:
        yield
    finally:
        _forced.reset(token)
