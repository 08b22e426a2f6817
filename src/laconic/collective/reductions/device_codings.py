"""Codecs whose messages have a fixed size, for exchanges that stay on a GPU: all shards of a message in a few launches.

A shard's sections are those of its frame, except for the positions of ``topk``, whose Rice code has no fixed size: they
travel in a code that takes as many bytes as the longest Rice code would (``kernels/triton/sparse.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from laconic.codecs import Chain
from laconic.codecs.base import MultiTensorStage
from laconic.codecs.cast import BF16, FP16, Raw
from laconic.codecs.topk import TopK
from laconic.collective.reductions.device_events import SATURATED
from laconic.kernels import MultiTensorKernels
from laconic.kernels.multi_tensor_interface import Addresses, Tensors
from laconic.kernels.reference.casts import BFLOAT16_MAX, FLOAT16_MAX
from laconic.kernels.sections import fixed_positions_nbytes

__all__ = ["DeviceCoding", "coding_of"]

_LIMITS = {"none": float("inf"), "fp16": FLOAT16_MAX, "bf16": BFLOAT16_MAX}


class DeviceCoding(Protocol):
    """Writes and reads the sections of many shards at addresses, multiples of 16, and never waits for the device."""

    @property
    def zeroed(self) -> bool:
        """Whether the memory of sections must be zero before they are written."""
        ...

    @property
    def randomized(self) -> bool:
        """Whether the bytes depend on the keys."""
        ...

    def section_nbytes(self, n: int) -> tuple[int, ...]:
        """Return the bytes of each section of n values."""
        ...

    def encode(
        self, tensors: Tensors, residuals: Tensors | None, kernels: MultiTensorKernels, keys: Tensor,
        sections: Sequence[Addresses], skip: Tensor | None, counts: Tensor,
    ) -> Tensor:  # fmt: skip
        """Write all sections; return the amax bits of each tensor.

        Rounding uses a key for each tensor, two int32 on the device.

        With residuals, encode residual + tensor and leave the error in the residual. Tensors whose amax bits in
        ``skip`` are not finite keep their residuals, and their sections are not used.
        """
        ...

    def decode(
        self, sections: Sequence[Addresses], kernels: MultiTensorKernels, outs: Tensors, weight: float | None,
        skip: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Decode all, or add ``weight`` times the values; return a flag that is not 0 if a section is invalid."""
        ...


@dataclass(frozen=True)
class _Quantized:
    """A quantizer with multi-tensor kernels."""

    stage: MultiTensorStage
    randomized: bool
    zeroed: ClassVar[bool] = False

    def section_nbytes(self, n: int) -> tuple[int, ...]:
        return self.stage.section_nbytes(n, 4)

    def encode(
        self, tensors: Tensors, residuals: Tensors | None, kernels: MultiTensorKernels, keys: Tensor,
        sections: Sequence[Addresses], skip: Tensor | None, counts: Tensor,
    ) -> Tensor:  # fmt: skip
        floats, packed = sections
        return self.stage.quantize_all(tensors, residuals, kernels, keys, floats, packed, skip=skip)

    def decode(
        self, sections: Sequence[Addresses], kernels: MultiTensorKernels, outs: Tensors, weight: float | None,
        skip: Tensor | None,
    ) -> Tensor:  # fmt: skip
        floats, packed = sections
        return self.stage.dequantize_all(floats, packed, kernels, outs, weight, skip=skip)


@dataclass(frozen=True)
class _Cast:
    """``fp16``, ``bf16`` or, after a selector, ``none``."""

    kind: str
    zeroed: ClassVar[bool] = False
    randomized: ClassVar[bool] = False

    def section_nbytes(self, n: int) -> tuple[int, ...]:
        return (4 * n if self.kind == "none" else 2 * n,)

    def encode(
        self, tensors: Tensors, residuals: Tensors | None, kernels: MultiTensorKernels, keys: Tensor,
        sections: Sequence[Addresses], skip: Tensor | None, counts: Tensor,
    ) -> Tensor:  # fmt: skip
        return kernels.cast_encode_all(
            tensors, residuals, kind=self.kind, limit=_LIMITS[self.kind], sections=sections[0],
            saturated=counts[SATURATED], skip=skip,
        )  # fmt: skip

    def decode(
        self, sections: Sequence[Addresses], kernels: MultiTensorKernels, outs: Tensors, weight: float | None,
        skip: Tensor | None,
    ) -> Tensor:  # fmt: skip
        return kernels.cast_decode_all(sections[0], kind=self.kind, outs=outs, weight=weight, skip=skip)


@dataclass(frozen=True)
class _Sparse:
    """``topk``, whose kept values another coding writes."""

    selector: TopK
    values: _Quantized | _Cast
    zeroed: ClassVar[bool] = True
    _buffers: dict[tuple[object, ...], list[Tensor]] = field(default_factory=dict)
    """Kept values, in the same memory in every round: tables on the device hold its address."""

    @property
    def randomized(self) -> bool:
        return self.values.randomized

    def section_nbytes(self, n: int) -> tuple[int, ...]:
        k = self.selector.max_kept(n)
        return fixed_positions_nbytes(n, k), *self.values.section_nbytes(k)

    def _kept(self, tensors: Tensors) -> list[Tensor]:
        """Return memory for the kept values of each tensor."""
        key = (tensors[0].device, *(x.numel() for x in tensors))
        if key not in self._buffers:
            counts = [self.selector.max_kept(x.numel()) for x in tensors]
            padded = [-(-count // 4) * 4 for count in counts]  # each begins at a multiple of 16 bytes
            parts = torch.split(torch.zeros(sum(padded), device=tensors[0].device), padded)
            self._buffers[key] = [part[:count] for part, count in zip(parts, counts, strict=True)]
        return self._buffers[key]

    def encode(
        self, tensors: Tensors, residuals: Tensors | None, kernels: MultiTensorKernels, keys: Tensor,
        sections: Sequence[Addresses], skip: Tensor | None, counts: Tensor,
    ) -> Tensor:  # fmt: skip
        if residuals is not None:
            kernels.add_all(tensors, residuals, skip)
        kept = self._kept(tensors)
        kernels.topk_all(tensors if residuals is None else residuals, sections[0], kept)
        bits = self.values.encode(kept, None, kernels, keys, sections[1:], skip, counts)
        if residuals is not None:
            unusable = bits if skip is None else torch.maximum(bits, skip)
            self.decode(sections, kernels, residuals, -1.0, unusable)
        return bits

    def decode(
        self, sections: Sequence[Addresses], kernels: MultiTensorKernels, outs: Tensors, weight: float | None,
        skip: Tensor | None,
    ) -> Tensor:  # fmt: skip
        positions, *encoded = sections
        if isinstance(self.values, _Cast) and self.values.kind == "none":
            counts = [self.selector.max_kept(out.numel()) for out in outs]
            return kernels.sparse_decode_all(positions, encoded[0], counts, outs, weight, skip)
        kept = self._kept(outs)
        flag = self.values.decode(encoded, kernels, kept, None, skip)
        values, counts = [x.data_ptr() for x in kept], [x.numel() for x in kept]
        return flag.add_(kernels.sparse_decode_all(positions, values, counts, outs, weight, skip))


def coding_of(chain: Chain) -> DeviceCoding | None:
    """Return the coding of a codec, or None if its messages have no fixed size or there are no kernels for it."""
    selector, stage = chain.selector, chain.values
    if chain.coder is not None or not (stage is None or isinstance(stage, Raw | FP16 | BF16) or stage.multi_tensor):
        return None
    values: _Quantized | _Cast
    if stage is None or isinstance(stage, Raw | FP16 | BF16):
        values = _Cast("none" if stage is None else stage.name)
    else:
        assert stage.multi_tensor is not None
        values = _Quantized(stage.multi_tensor, stage.randomized)
    if selector is None:
        return values
    exact = isinstance(selector, TopK) and not (selector.approx or selector.chunk) and selector.code == "rice"
    return _Sparse(selector, values) if exact and isinstance(selector, TopK) else None
