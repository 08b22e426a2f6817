"""ResidualStorage: in which dtype and where residuals are kept between rounds.

A round computes with float32 on the device of its tensor. Kept in bfloat16, a residual takes half of the memory and is
rounded stochastically, so that what is lost in a round has the expectation zero; a rounding to nearest would drop the
same small remainders in every round. The random bits are a hash of the round's seed, the slot and the index, equal on
all backends. Kept on the host, the residuals of a GPU are in pinned memory, which its kernels read and write directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import ConfigError
from laconic.kernels import random
from laconic.kernels.interface import FLOAT32_MAX

__all__ = ["ResidualStorage", "residual_seed"]

DTYPES = (torch.float32, torch.bfloat16)


def residual_seed(slot: str, seed: int) -> int:
    """Return the seed with which the residual of a slot is rounded after the round with a seed."""
    return random.splitmix64((seed & random.M64) ^ random.hash_of(slot))


@dataclass(frozen=True)
class ResidualStorage:
    """How residuals, and velocities of momentum, are kept.

    Args:
        dtype: ``torch.float32`` or ``torch.bfloat16``.
        device: None keeps them beside their tensors; ``cpu`` in the memory of the host.
    """

    dtype: torch.dtype = torch.float32
    device: torch.device | None = None

    @classmethod
    def of(cls, dtype: torch.dtype = torch.float32, device: str | torch.device | None = None) -> ResidualStorage:
        """Return the storage that a user asks for."""
        if dtype not in DTYPES:
            raise ConfigError(f"residual_dtype must be torch.float32 or torch.bfloat16, got {dtype!r}")
        if device is None:
            return cls(dtype)
        try:
            where = torch.device(device)
        except (RuntimeError, TypeError):
            where = torch.device("meta")
        if where.type != "cpu":
            raise ConfigError(f"residual_device must be None (beside the tensors) or 'cpu', got {device!r}")
        return cls(dtype, torch.device("cpu"))

    @property
    def plain(self) -> bool:
        """Whether rounds can update residuals in place, on any device."""
        return self == ResidualStorage()

    def in_place(self, device: torch.device) -> bool:
        """Whether rounds of tensors on a device can update their residuals in place."""
        return self.dtype == torch.float32 and self.home(device) == device

    def home(self, device: torch.device) -> torch.device:
        """Return where the residuals of tensors on a device are kept."""
        return device if self.device is None else self.device

    def zeros(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return a new residual of tensors on a device."""
        return torch.zeros(shape, dtype=self.dtype, device=self.home(device), pin_memory=self._pinned(device))

    def _pinned(self, device: torch.device) -> bool:
        return device.type == "cuda" and self.home(device).type == "cpu"

    def fits(self, stored: Tensor, device: torch.device) -> bool:
        """Whether a residual is where those of tensors on a device are kept."""
        return stored.device == self.home(device) and (not self._pinned(device) or stored.is_pinned())

    def moved(self, stored: Tensor, device: torch.device) -> Tensor:
        """Return a residual where those of tensors on a device are kept."""
        there = stored.to(self.home(device))
        return there.pin_memory() if self._pinned(device) else there

    def load(self, stored: Tensor, device: torch.device) -> Tensor:
        """Return a residual as float32 on a device: itself if that is how it is kept."""
        return stored.to(device, non_blocking=True).to(torch.float32)

    def store(self, values: Tensor, stored: Tensor, slot: str, seed: int) -> None:
        """Keep the values that a round with a seed has left of a slot."""
        if values is not stored:
            stored.copy_(self.rounded(values, slot, seed), non_blocking=True)

    def rounded(self, values: Tensor, slot: str, seed: int) -> Tensor:
        """Return contiguous float32 values in the dtype in which they are kept."""
        if self.dtype == torch.float32:
            return values
        short = torch.empty(values.shape, dtype=self.dtype, device=values.device)
        backend = kernels.backend_for(values)
        backend.stochastic_bf16(values.view(-1), residual_seed(slot, seed), short.view(-1))
        return short

    # ------------------------------------------------------------------------------------------ many slots on a GPU

    def load_all(self, stored: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Load many residuals into float32 tensors on a GPU by one launch."""
        kind = "none" if self.dtype == torch.float32 else "bf16"
        _backend(outs[0]).cast_decode_all([x.data_ptr() for x in stored], kind=kind, outs=outs, weight=None)

    def store_all(self, values: Sequence[Tensor], stored: Sequence[Tensor], keys: Tensor) -> None:
        """Keep many residuals by one launch.

        Args:
            keys: ``random.keys`` of each slot's ``residual_seed``, on the device of the values.
        """
        addresses = [x.data_ptr() for x in stored]
        if self.dtype == torch.bfloat16:
            _backend(values[0]).stochastic_bf16_all(values, keys, addresses)
            return
        unused = torch.zeros((), dtype=torch.int32, device=values[0].device)
        _backend(values[0]).cast_encode_all(
            values, None, kind="none", limit=FLOAT32_MAX, sections=addresses, saturated=unused
        )


def _backend(x: Tensor) -> kernels.MultiTensorKernels:
    backend = kernels.multi_tensor_backend_for(x)
    assert backend is not None
    return backend
