"""Rounding, packing, selection and coding: one interface, several backends.

``reference`` (torch) defines the bytes; ``cpu`` is the C++ core; ``triton.backend`` serves CUDA tensors;
``torch_fallback`` serves other devices. ``backend_for(tensor)`` chooses one.
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
from laconic.kernels.interface import Kernels
from laconic.kernels.multi_tensor_interface import MultiTensorKernels

__all__ = ["Kernels", "MultiTensorKernels", "backend_for", "multi_tensor_backend_for", "use_backend"]

_BACKENDS: dict[str, Kernels] = {"cpu": cpu, "torch_fallback": torch_fallback, "reference": reference}
"""The backends that need no compiler; ``triton`` is imported on first use."""

_forced: ContextVar[Kernels | None] = ContextVar("laconic_kernels", default=None)


def backend_for(x: Tensor) -> Kernels:
    """Return the backend for the device of a tensor."""
    forced = _forced.get()
    if forced is not None:
        return forced
    if x.is_cpu:
        return cpu
    backend, reason = _device_backend(x.device)
    if reason:
        counters.count("reference_kernels", 1, f"{reason}: using plain torch, with the same bytes")
    return backend


@lru_cache(maxsize=64)
def _device_backend(device: torch.device) -> tuple[Kernels, str]:
    """Return the backend for a device other than the CPU, and the reason if it is the slow one."""
    if device.type != "cuda":
        return torch_fallback, f"there are no kernels for {device.type}"
    try:
        backend = _triton()
        backend.all_finite(torch.zeros(1, device=device))  # compiles, loads and runs
    except Exception as error:  # a compiler can raise anything
        return torch_fallback, f"Triton does not work on {device} ({str(error).strip().splitlines()[-1:]})"
    return backend, ""


def multi_tensor_backend_for(x: Tensor) -> MultiTensorKernels | None:
    """Return the kernels that take many tensors like this one in one launch, or None if there are none."""
    return None if backend_for(x) in _BACKENDS.values() else _multi_tensor_backend(x.device)


@lru_cache(maxsize=64)
def _multi_tensor_backend(device: torch.device) -> MultiTensorKernels | None:
    backend = _triton()
    assert isinstance(backend, MultiTensorKernels)
    try:
        backend.amax_bits_all([torch.zeros(1, device=device)]).tolist()
    except Exception as error:  # a compiler can raise anything
        reason = f"multi-tensor kernels do not work on {device} ({str(error).strip().splitlines()[-1:]})"
        counters.count("hosted_kernels", 1, f"{reason}: tensors are processed one by one, with the same bytes")
        return None
    return backend


def _triton() -> Kernels:
    from laconic.kernels.triton import backend

    return backend


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Use one backend for all tensors: ``reference``, ``torch_fallback``, ``cpu`` or ``triton``. For tests."""
    token = _forced.set(_triton() if name == "triton" else _BACKENDS[name])
    try:
        yield
    finally:
        _forced.reset(token)
