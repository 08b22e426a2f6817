"""Rounding, packing, selection: one signature (``interface``), several backends.

``reference`` is torch and the truth; ``cpu`` is the C++ core with the same bytes; ``triton.cuda`` serves CUDA tensors
where Triton is; ``torch_fallback`` is torch on other devices. ``backend_for(tensor)`` picks one.
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

__all__ = ["Kernels", "MultiTensorKernels", "backend_for", "multi_tensor_backend_for", "use_backend"]

_BACKENDS: dict[str, Kernels] = {"cpu": cpu, "torch_fallback": torch_fallback, "reference": reference}
"""Those that are there without a compiler; ``triton`` joins when first asked for."""

_forced: ContextVar[Kernels | None] = ContextVar("laconic_kernels", default=None)


def backend_for(x: Tensor) -> Kernels:
    """The backend that serves this tensor's device."""
    forced = _forced.get()
    if forced is not None:
        return forced
    if x.is_cpu:
        return cpu
    found, why = _device_backend(x.device)
    if why:
        counters.count("reference_kernels", 1, f"{why}: plain torch serves, with the same bytes")
    return found


@lru_cache(maxsize=64)
def _device_backend(device: torch.device) -> tuple[Kernels, str]:
    """The backend of a device that is not the CPU, and why it is a slow one, if so."""
    if device.type != "cuda":
        return torch_fallback, f"{device.type} has no kernels of its own"
    try:
        found = _triton()
        found.all_finite(torch.zeros(1, device=device))  # compiles, loads and runs
    except Exception as error:  # a compiler fails in more ways than it has names for
        return torch_fallback, f"Triton cannot be used on {device} ({str(error).strip().splitlines()[-1:]})"
    return found, ""


def multi_tensor_backend_for(x: Tensor) -> MultiTensorKernels | None:
    """What takes many tensors like this one in a launch; None where nothing is won by it."""
    return None if backend_for(x) in _BACKENDS.values() else _multi_tensor_backend(x.device)


@lru_cache(maxsize=64)
def _multi_tensor_backend(device: torch.device) -> MultiTensorKernels | None:
    backend = _triton()
    assert isinstance(backend, MultiTensorKernels)
    try:
        backend.amax_bits_all([torch.zeros(1, device=device)]).tolist()
    except Exception as error:  # as above
        why = f"many tensors in a launch cannot be had on {device} ({str(error).strip().splitlines()[-1:]})"
        counters.count("hosted_kernels", 1, f"{why}: one after the other, with the same bytes")
        return None
    return backend


def _triton() -> Kernels:
    from laconic.kernels.triton import backend

    return backend


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Send all work to one backend (``reference``, ``torch_fallback``, ``cpu``, ``triton``): for tests."""
    token = _forced.set(_triton() if backend == "triton" else _BACKENDS[backend])
    try:
        yield
    finally:
        _forced.reset(token)
