"""Devices of training by name."""

from __future__ import annotations

import torch

from laconic.errors import ConfigError

__all__ = ["DEVICES", "device_of"]

DEVICES = ("auto", "cpu", "cuda")


def device_of(name: str) -> torch.device:
    """Return the device of a name; ``auto`` is the GPU if there is one."""
    if name not in DEVICES:
        raise ConfigError(f"device must be {', '.join(DEVICES[:-1])} or {DEVICES[-1]}, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is available: use --device cpu")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")
