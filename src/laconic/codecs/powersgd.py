"""``powersgd:rank``: a matrix as the product of two low-rank factors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.codecs import checks
from laconic.codecs.base import ValueStage, add_weighted, require_finite
from laconic.codecs.mean import FLOAT_SUM_HEADER, FloatSumHeader
from laconic.errors import FrameError
from laconic.kernels import random
from laconic.kernels.interface import FLOAT32_MAX, Kernels
from laconic.packet import Arena

__all__ = ["Matrix", "PowerSGD", "orthonormal"]

_LARGE, _TINY, _LIFT = 2.0**50, 2.0**-50, 2.0**64


@dataclass(frozen=True)
class PowerSGD(ValueStage):
    """X ≈ P Qᵀ of rank r, by one step of power iteration from a random start or from the last result.

    Vogels et al. 2019 (arXiv:1905.13727). A tensor is a matrix of its first dimension by all others; vectors, and
    matrices with at most ``rank`` rows, are sent whole. Given P, the packet is linear in X, so packets with the same P
    can be added. Biased: use it after ``ef``.

    Args:
        rank: Columns of P and Q, 1 to 256.

    Payload: ``float32 P[rows, r]``, ``uint32 workers, count``, ``float32 Q[r, columns]``; r = min(rank, rows, columns).
    """

    rank: int = 4

    name, example = "powersgd", "ef|powersgd:4"
    kind = "cast"
    summary = "a product of two low-rank factors"
    biased = True
    summable = True
    num_sections = 3
    needs_shape = True

    def __post_init__(self) -> None:
        checks.integer(self, "rank", 1, 256)

    @property
    def randomized(self) -> bool:
        return True

    def for_shape(self, shape: tuple[int, ...]) -> Matrix:
        rows = shape[0] if len(shape) > 1 else 1
        columns = math.prod(shape) // rows if rows else 0
        return Matrix(self.rank, rows, columns)


@dataclass(frozen=True)
class Matrix(PowerSGD):
    """PowerSGD for one shape, which decides the sizes of the sections."""

    rows: int = 1
    columns: int = 1

    @property
    def r(self) -> int:
        return min(self.rank, self.rows, self.columns)

    @property
    def whole(self) -> bool:
        """Whether the matrix is sent whole: P is the identity and Q the matrix."""
        return self.r == self.rows

    def start(self, seed: int, like: Tensor) -> Tensor:
        """Return the initial Q (r, columns): the identity if r = columns, else random signs."""
        if self.r == self.columns:
            return torch.eye(self.columns, device=like.device)
        element = torch.arange(self.r * self.columns, dtype=torch.int64, device=like.device)
        signs = 1 - 2 * (random.hash32(element, random.key(seed, random.ROTATION)) & 1)
        return signs.to(torch.float32).view(self.r, self.columns)

    def sketch(self, x: Tensor, start: Tensor, kernels: Kernels) -> Tensor:
        """Return X Q, which workers add to agree on P."""
        return kernels.project_rows(x.view(self.rows, self.columns), start)

    def encode_sum(
        self, x: Tensor, p: Tensor, header: FloatSumHeader, kernels: Kernels, arena: Arena, scale: float = 1.0
    ) -> tuple[Tensor, ...]:
        """Return the sections of one worker's contribution for a P that all workers share."""
        q = x.view(self.rows, self.columns) if self.whole else kernels.project_columns(x.view(self.rows, -1), p)
        bound = FLOAT32_MAX if self.whole else FLOAT32_MAX / (4 * self.r)
        q = (q * scale).clamp(-bound, bound)
        left, first, right = (arena.take(nbytes) for nbytes in self.section_nbytes(x.numel(), 4))
        left.copy_(p.contiguous().view(-1).view(torch.uint8))
        header.write(first)
        right.copy_(q.contiguous().view(-1).view(torch.uint8))
        return left, first, right

    def encode(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        low, high, amax_bits = kernels.value_range(x)
        require_finite(amax_bits, x.numel())
        if not amax_bits:
            return ()
        if self.whole:
            return self.encode_sum(x, torch.eye(self.rows, device=x.device), FloatSumHeader(1, 1), kernels, arena)
        largest = max(-low, high)
        lift = 1 / _LIFT if largest > _LARGE else _LIFT if largest < _TINY else 1.0
        lifted = x * lift if lift != 1.0 else x
        p = orthonormal(self.sketch(lifted, self.start(seed, x), kernels))
        return self.encode_sum(lifted, p, FloatSumHeader(1, 1), kernels, arena, 1 / lift)

    def decode(
        self, sections: tuple[Tensor, ...], dtype: torch.dtype, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        header = FloatSumHeader.read(sections[1])
        q = sections[2]
        if header.count == 0:
            for factor in (sections[0], q):  # copied, because a section of foreign bytes may be unaligned
                if not kernels.all_finite(factor.clone().view(torch.float32)):
                    raise FrameError("a factor in the frame is not finite")
            if weight is None:
                out.zero_()
            return
        if header.count > 1:
            q = (q.clone().view(torch.float32) / torch.full((1,), float(header.count), device=q.device)).view(
                torch.uint8
            )
        values = out if weight is None else torch.empty_like(out)
        kernels.lowrank_decode(
            sections[0], q, rows=self.rows, columns=self.columns, rank=self.r, out=values, weight=None
        )
        if not kernels.all_finite(values):
            raise FrameError("the product of the factors in the frame is not finite in float32")
        if weight is not None:
            add_weighted(values, out, weight)

    def section_nbytes(self, n: int, itemsize: int) -> tuple[int, ...]:
        return 4 * self.rows * self.r, FLOAT_SUM_HEADER, 4 * self.r * self.columns


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the dot product in float64, added pairwise, so that every device gives the same bits."""
    size = 1 << max(0, a.numel() - 1).bit_length()
    products = torch.zeros(size, dtype=torch.float64, device=a.device)
    products[: a.numel()] = a * b
    while products.numel() > 1:
        products = products[: products.numel() // 2] + products[products.numel() // 2 :]
    return products[0]


def orthonormal(p: Tensor) -> Tensor:
    """Make the columns orthonormal by Gram-Schmidt; a linearly dependent column becomes zero."""
    columns: list[Tensor] = []
    for column in p.to(torch.float64).unbind(1):
        before = _dot(column, column).sqrt()
        v = column
        for _ in range(2):  # the second pass removes the rounding error of the first
            for other in columns:
                v = v - _dot(other, v) * other
        norm = _dot(v, v).sqrt()
        columns.append(v / norm if bool(norm > 1e-6 * before) else torch.zeros_like(v))
    return torch.stack(columns, 1).to(torch.float32)
