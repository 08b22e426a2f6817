"""PowerSGD of many matrices: each step of the method is one launch for all of them.

The order of additions is that of the reference, so factors have the same bits. Sketches, bases and factors of all
matrices are one behind the other, so that one all-reduce adds those of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.interface import FLOAT32_MAX, NONFINITE
from laconic.kernels.multi_tensor_interface import Tensors
from laconic.kernels.triton.launch_args import exact_options
from laconic.kernels.triton.lowrank import fold_columns
from laconic.kernels.triton.tensor_table import part_table

__all__ = ["Matrices"]

TILE = tl.constexpr(1024)
"""Values of a product per program."""
MIN_FOLD, MAX_FOLD = 1024, 4096
"""Doubles that are folded in registers: more where a matrix has more rows, because a program then waits less often."""
UNROLL = tl.constexpr(64)
"""Columns of a sketch whose loads are under way together: a warp mostly waits for them."""
STAGES = 12
"""Tiles of rows of a factor that are under way together."""
FIELDS = tl.constexpr(8)
"""Fields of a row: rows, columns, rank, where sketch, factor and doubles begin, and the doubles of a vector in memory
and in the reference."""

_NONFINITE = tl.constexpr(NONFINITE)
_FLOAT32_MAX = tl.constexpr(FLOAT32_MAX)


@triton.jit
def _program_matrix(table, parts):
    """Return a program's number, its matrix and the matrix's row of the table."""
    number = tl.program_id(0)
    matrix = tl.load(parts + 2 * number)
    return number, matrix, table + matrix * FIELDS


@triton.jit
def _sketch(table, parts, addresses, bits, start, sketch, ROWS: tl.constexpr, RANKS: tl.constexpr):
    """X Q: eight partial sums by column modulo 8, then folded in halves. A warp per program, few sums per thread."""
    number, matrix, fields = _program_matrix(table, parts)
    rows, columns, rank = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    row = tl.load(parts + 2 * number + 1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, RANKS)
    column = tl.arange(0, 8)[None, None, :]
    # Both factors are loaded in the shape of the sums: shared loads cost less than moving values between threads.
    x = (
        tl.load(addresses + matrix).to(tl.pointer_type(tl.float32))
        + row[:, None, None] * columns
        + k[None, :, None] * 0
    )
    q = start + tl.load(fields + 4) + k[None, :, None] * columns + row[:, None, None] * 0
    wanted = (row[:, None, None] < rows) & (k[None, :, None] < rank)
    sums = tl.zeros((ROWS, RANKS, 8), tl.float32)
    first = columns * 0
    while first + UNROLL <= columns:
        for _ in tl.static_range(UNROLL // 8):
            sums += tl.load(x + column, mask=wanted, other=0.0) * tl.load(q + column, mask=wanted, other=0.0)
            x += 8
            q += 8
        first += UNROLL
    while first < columns:
        inside = wanted & (first + column < columns)
        sums += tl.load(x + column, mask=inside, other=0.0) * tl.load(q + column, mask=inside, other=0.0)
        x += 8
        q += 8
        first += 8
    product = fold_columns(sums, ROWS, RANKS)
    usable = (tl.abs(product) < _FLOAT32_MAX) & (tl.load(bits + matrix) < _NONFINITE)
    tl.store(sketch + tl.load(fields + 3) + row[:, None] * rank + k[None, :], tl.where(usable, product, _FLOAT32_MAX),
             mask=(row[:, None] < rows) & (k[None, :] < rank))  # fmt: skip


@triton.jit
def _dot(a, b, folds, size, added, FOLD: tl.constexpr, LEVELS: tl.constexpr):
    """Return the dot product of two vectors of doubles, added in halves; ``folds`` is memory for half of them.

    Products behind the first ``added`` are -0, which changes no sum: the reference has no such products.
    """
    half = size // 2
    offsets = tl.arange(0, FOLD)
    total = tl.zeros((FOLD,), tl.float64)
    if half < FOLD:
        products = tl.load(a + offsets) * tl.load(b + offsets)
        total = tl.where(offsets < added, products, total * -1.0)
    else:
        first = half * 0
        while first < half:
            low = tl.load(a + first + offsets) * tl.load(b + first + offsets)
            high = tl.load(a + half + first + offsets) * tl.load(b + half + first + offsets)
            tl.store(folds + first + offsets, low + high)
            first += FOLD
        tl.debug_barrier()
        half = half // 2
        while half >= FOLD:
            first = half * 0
            while first < half:
                low = tl.load(folds + first + offsets) + tl.load(folds + half + first + offsets)
                tl.store(folds + first + offsets, low)
                first += FOLD
            tl.debug_barrier()
            half = half // 2
        total = tl.load(folds + offsets)
        tl.debug_barrier()
    for fold in tl.static_range(LEVELS):
        total = tl.sum(tl.reshape(total, (2, FOLD >> fold + 1)), 0)
    return tl.sum(total, 0)


@triton.jit
def _orthonormal(table, agreed, doubles, basis, flags, nonfinite, FOLD: tl.constexpr, LEVELS: tl.constexpr):
    """Gram-Schmidt in doubles, a program per matrix; a column that depends on others becomes zero."""
    matrix = tl.program_id(0)
    fields = table + matrix * FIELDS
    rows, rank = tl.load(fields), tl.load(fields + 2)
    size, added = tl.load(fields + 6), tl.load(fields + 7)
    agreed += tl.load(fields + 3)
    basis += tl.load(fields + 3)
    vectors = doubles + tl.load(fields + 5)
    folds = vectors + rank * size
    offsets = tl.arange(0, FOLD)
    largest = tl.zeros((FOLD,), tl.float32)
    first = rows * 0
    while first < rows * rank:
        at = first + offsets
        largest = tl.maximum(largest, tl.abs(tl.load(agreed + at, mask=at < rows * rank, other=0.0)))
        first += FOLD
    usable = tl.max(largest, 0) < _FLOAT32_MAX / 2
    tl.store(flags + matrix, tl.where(usable, 0, _NONFINITE))
    tl.atomic_add(nonfinite, 1, mask=usable == 0, sem="relaxed")
    column = rank * 0
    while column < rank:
        v = vectors + column * size
        first = rows * 0
        while first < size:
            at = first + offsets
            loaded = tl.load(agreed + at * rank + column, mask=at < rows, other=0.0)
            tl.store(v + at, tl.where(usable, loaded, 0.0).to(tl.float64))
            first += FOLD
        tl.debug_barrier()
        before = tl.sqrt(_dot(v, v, folds, size, added, FOLD, LEVELS))
        turn = rank * 0
        while turn < 2 * column:  # the second pass over all others removes the rounding error of the first
            u = vectors + turn % column * size
            product = _dot(u, v, folds, size, added, FOLD, LEVELS)
            first = rows * 0
            while first < size:
                at = first + offsets
                tl.store(v + at, tl.load(v + at) - product * tl.load(u + at))
                first += FOLD
            tl.debug_barrier()
            turn += 1
        norm = tl.sqrt(_dot(v, v, folds, size, added, FOLD, LEVELS))
        kept = norm > before * tl.full((), 1e-6, tl.float64)
        divisor = tl.where(kept, norm, tl.full((), 1.0, tl.float64))
        first = rows * 0
        while first < size:
            at = first + offsets
            unit = tl.where(kept, tl.load(v + at) / divisor, tl.zeros((FOLD,), tl.float64))
            tl.store(v + at, unit)
            tl.store(basis + at * rank + column, unit.to(tl.float32), mask=at < rows)
            first += FOLD
        tl.debug_barrier()
        column += 1


@triton.jit
def _add_rows(total, products, RANKS: tl.constexpr, COLUMNS: tl.constexpr, COUNT: tl.constexpr):
    """Add products of rows one after the other: the first half, then the second. All of them are in one thread."""
    if COUNT == 1:
        total += tl.reshape(products, (RANKS, COLUMNS))
    else:
        halves = tl.permute(tl.reshape(products, (RANKS, COLUMNS, 2, COUNT // 2)), (0, 1, 3, 2))
        first, second = tl.split(halves)
        total = _add_rows(total, first, RANKS, COLUMNS, COUNT // 2)
        total = _add_rows(total, second, RANKS, COLUMNS, COUNT // 2)
    return total


@triton.jit
def _factor(
    table, parts, addresses, basis, flags, factor,
    COLUMNS: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """P transposed times X: row after row. The next tiles of rows are on their way to shared memory meanwhile."""
    number, matrix, fields = _program_matrix(table, parts)
    rows, columns, rank = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    column = tl.load(parts + 2 * number + 1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, RANKS)
    x = tl.load(addresses + matrix).to(tl.pointer_type(tl.float32))
    p = basis + tl.load(fields + 3)
    total = tl.zeros((RANKS, COLUMNS), tl.float32)
    for first in tl.range(0, rows, ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[None, :]
        # Behind the last row there are zeros: adding them changes no sum, because none is -0.
        values = tl.load(
            x + row * columns + column[:, None], mask=(row < rows) & (column[:, None] < columns), other=0.0
        )
        weights = tl.load(p + row * rank + k[:, None], mask=(row < rows) & (k[:, None] < rank), other=0.0)
        total = _add_rows(total, values[None, :, :] * weights[:, None, :], RANKS, COLUMNS, ROWS)
    k, column = k[:, None], column[None, :]
    bound = tl.div_rn(tl.full((RANKS, COLUMNS), _FLOAT32_MAX, tl.float32), (4 * rank).to(tl.float32) + total * 0)
    total = tl.minimum(tl.maximum(total, 0.0 - bound), bound)
    total = tl.where(tl.load(flags + matrix) < _NONFINITE, total, 0.0)
    tl.store(factor + tl.load(fields + 4) + k * columns + column, total, mask=(k < rank) & (column < columns))


@triton.jit
def _product(table, parts, addresses, added, basis, factor, flags, flag, SUBTRACT: tl.constexpr):
    """Store P Q, or another tensor minus P Q, in each tensor that is not skipped."""
    number, matrix, fields = _program_matrix(table, parts)
    columns, rank = tl.load(fields + 1), tl.load(fields + 2)
    n = tl.load(fields) * columns
    if tl.load(flags + matrix) < _NONFINITE:
        begin = tl.load(parts + 2 * number + 1).to(tl.int64) * TILE
        at = begin + tl.arange(0, TILE)
        # Row and column of each value by divisions of 32 bits: those of 64 take longer than the rest.
        column = (begin % columns).to(tl.int32) + tl.arange(0, TILE)
        p = basis + tl.load(fields + 3) + (begin // columns + column // columns.to(tl.int32)) * rank
        q = factor + tl.load(fields + 4) + column % columns.to(tl.int32)
        values = tl.load(p, mask=at < n, other=0.0) * tl.load(q, mask=at < n, other=0.0)
        k = rank * 0 + 1
        while k < rank:
            values += tl.load(p + k, mask=at < n, other=0.0) * tl.load(q + k * columns, mask=at < n, other=0.0)
            k += 1
        tl.store(flag, 1, mask=tl.max((tl.abs(values) < float("inf")).to(tl.int32) == 0, 0) > 0)
        if SUBTRACT:
            values = tl.load(tl.load(added + matrix).to(tl.pointer_type(tl.float32)) + at, mask=at < n) - values
        tl.store(tl.load(addresses + matrix).to(tl.pointer_type(tl.float32)) + at, values, mask=at < n)


@triton.jit
def _unit_rows(table, factor, fresh, flags, start, RANK: tl.constexpr):
    """Scale each row of the factors to a largest magnitude of 1; a row of zeros is drawn again."""
    matrix = tl.program_id(0) // RANK
    row = tl.program_id(0) % RANK
    fields = table + matrix * FIELDS
    columns, rank = tl.load(fields + 1), tl.load(fields + 2)
    if (row < rank) & (tl.load(flags + matrix) < _NONFINITE):
        begin = tl.load(fields + 4) + row * columns
        largest = tl.zeros((TILE,), tl.float32)
        first = columns * 0
        while first < columns:
            at = first + tl.arange(0, TILE)
            largest = tl.maximum(largest, tl.abs(tl.load(factor + begin + at, mask=at < columns, other=0.0)))
            first += TILE
        norm = tl.max(largest, 0)
        first = columns * 0
        while first < columns:
            at = first + tl.arange(0, TILE)
            q = tl.load(factor + begin + at, mask=at < columns, other=0.0)
            unit = tl.div_rn(q, tl.zeros((TILE,), tl.float32) + tl.where(norm > 0, norm, 1.0))
            unit = tl.where(norm > 0, unit, tl.load(fresh + begin + at, mask=at < columns, other=0.0))
            tl.store(start + begin + at, unit, mask=at < columns)
            first += TILE


class _Grid(NamedTuple):
    parts: Tensor

    @property
    def grid(self) -> tuple[int]:
        return (self.parts.shape[0],)


class Matrices:
    """Matrices that are reduced together, and memory for what is computed of them.

    Args:
        shapes: Rows, columns and rank of each; the rank is below the number of rows.
        rank: The largest rank.
    """

    def __init__(self, shapes: Sequence[tuple[int, int, int]], rank: int, device: torch.device) -> None:
        added = [triton.next_power_of_2(rows) for rows, _, _ in shapes]
        self._fold = min(MAX_FOLD, max(MIN_FOLD, *added))
        sizes = [max(self._fold, size) for size in added]
        sketches = list(accumulate((rows * r for rows, _, r in shapes), initial=0))
        factors = list(accumulate((r * columns for _, columns, r in shapes), initial=0))
        doubles = list(
            accumulate((r * size + size // 2 for (_, _, r), size in zip(shapes, sizes, strict=True)), initial=0)
        )
        fields = [
            (*shape, sketch, factor, double, size, in_reference)
            for shape, sketch, factor, double, size, in_reference in zip(
                shapes, sketches, factors, doubles, sizes, added, strict=False
            )
        ]
        self._rank, self._ranks = rank, triton.next_power_of_2(rank)
        self._table = torch.tensor(fields, dtype=torch.int64).to(device, non_blocking=True)

        def grid(counts: Sequence[int], span: int) -> _Grid:
            return _Grid(part_table(tuple(counts), span, device))

        self._rows = max(1, 4 // self._ranks)
        self._columns = max(8, min(32, 256 // self._ranks))
        self._by_rows = grid([rows for rows, _, _ in shapes], self._rows)
        self._by_columns = grid([columns for _, columns, _ in shapes], self._columns)
        self._by_values = grid([rows * columns for rows, columns, _ in shapes], TILE.value)
        self.sketch, self.basis = torch.empty(sketches[-1], device=device), torch.empty(sketches[-1], device=device)
        self.factor = torch.empty(factors[-1], device=device)
        self._doubles = torch.empty(doubles[-1], dtype=torch.float64, device=device)
        self.flags = torch.zeros(len(shapes), dtype=torch.int32, device=device)

    def addresses(self, tensors: Tensors) -> Tensor:
        """Return where tensors are, for kernels."""
        return torch.tensor([x.data_ptr() for x in tensors], dtype=torch.int64).to(
            self._table.device, non_blocking=True
        )

    def write_sketch(self, tensors: Tensor, bits: Tensor, start: Tensor) -> None:
        """Write X Q of each matrix; the largest float32 for those whose amax bits are not finite."""
        _sketch[self._by_rows.grid](
            self._table, self._by_rows.parts, tensors, bits, start, self.sketch, ROWS=self._rows, RANKS=self._ranks,
            **exact_options(num_warps=1),
        )  # fmt: skip

    def write_basis(self, nonfinite: Tensor) -> None:
        """Write an orthonormal basis of each sketch; flags, and counts, those that are not usable."""
        _orthonormal[(self.flags.numel(),)](
            self._table, self.sketch, self._doubles, self.basis, self.flags, nonfinite, FOLD=self._fold,
            LEVELS=self._fold.bit_length() - 1, **exact_options(num_warps=self._fold // 128),
        )  # fmt: skip

    def write_factor(self, tensors: Tensor) -> None:
        """Write P transposed times X of each matrix; zeros where it is flagged."""
        _factor[self._by_columns.grid](
            self._table, self._by_columns.parts, tensors, self.basis, self.flags, self.factor, COLUMNS=self._columns,
            RANKS=self._ranks, ROWS=32 if self._ranks <= 16 else 8, STAGES=STAGES,
            **exact_options(num_warps=min(8, self._ranks * self._columns // 32)),
        )  # fmt: skip

    def store_products(self, targets: Tensor, factor: Tensor, invalid: Tensor, minuends: Tensor | None = None) -> None:
        """Store P Q, or minuends minus P Q, in all targets that are not flagged; ``invalid`` flags infinities."""
        _product[self._by_values.grid](
            self._table, self._by_values.parts, targets, targets if minuends is None else minuends, self.basis, factor,
            self.flags, invalid, SUBTRACT=minuends is not None, **exact_options(num_warps=4),
        )  # fmt: skip

    def write_start(self, fresh: Tensor, start: Tensor) -> None:
        """Write where the next round continues: the factors with rows of unit size."""
        _unit_rows[(self.flags.numel() * self._rank,)](
            self._table, self.factor, fresh, self.flags, start, RANK=self._rank, **exact_options(num_warps=4)
        )
