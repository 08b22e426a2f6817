"""Rounding, packing, selection: one signature (``interface``), several backends.

``reference`` is torch and the truth; ``cpu`` is the C++ core with the same bytes; ``triton.cuda`` serves CUDA tensors
where Triton is; ``hosted`` is torch on other devices. ``of(tensor)`` picks one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import torch
from torch import Tensor

from laconic import counters
from laconic.kernels import cpu, reference, torch_fallback
from laconic.kernels.interface import Kernels, MultiTensorKernels

__all__ = ["Kernels", "MultiTensorKernels", "of", "together", "use"]

_BACKENDS: dict[str, Kernels] = {"cpu": cpu, "hosted": torch_fallback, "reference": reference}
"""Those that are there without a compiler; ``triton`` joins when first asked for."""

_forced: ContextVar[Kernels | None] = ContextVar("laconic_kernels", default=None)


def of(x: Tensor) -> Kernels:
    """The backend that serves this tensor's device."""
    forced = _forced.get()
    if forced is not None:
        return forced
    if x.is_cpu:
        return cpu
    found, why = _of_device(x.device)
    if why:
        counters.count("reference_kernels", 1, f"{why}: plain torch serves, with the same bytes")
    return found


@lru_cache(maxsize=64)
def _of_device(device: torch.device) -> tuple[Kernels, str]:
    """The backend of a device that is not the CPU, and why it is a slow one, if so."""
    if device.type != "cuda":
        return torch_fallback, f"{device.type} has no kernels of its own"
    try:
        found = _triton()
        found.all_finite(torch.zeros(1, device=device))  # compiles, loads and runs
    except Exception as error:  # a compiler fails in more ways than it has names for
        return torch_fallback, f"Triton cannot be used on {device} ({str(error).strip().splitlines()[-1:]})"
    return found, ""


def together(x: Tensor) -> MultiTensorKernels | None:
    """What takes many tensors like this one in a launch; None where nothing is won by it."""
    return None if of(x) in _BACKENDS.values() else _together_on(x.device)


@lru_cache(maxsize=64)
def _together_on(device: torch.device) -> MultiTensorKernels | None:
    backend = _triton()
    assert isinstance(backend, MultiTensorKernels)
    try:
        backend.largest_all([torch.zeros(1, device=device)]).tolist()
    except Exception as error:  # as above
        why = f"many tensors in a launch cannot be had on {device} ({str(error).strip().splitlines()[-1:]})"
        counters.count("hosted_kernels", 1, f"{why}: one after the other, with the same bytes")
        return None
    return backend


def _triton() -> Kernels:
    from laconic.kernels.triton import backend

    return backend


@contextmanager
def use(backend: str) -> Iterator[None]:
    """Within this context all work goes to one backend: ``reference``, ``hosted``, ``cpu``, ``triton``. For tests."""
    token = _forced.set(_triton() if backend == "triton" else _BACKENDS[backend])
    try:
        yield
    finally:
        _forced.reset(token)
