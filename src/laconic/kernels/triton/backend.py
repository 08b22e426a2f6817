"""The backend for CUDA tensors: Triton where a kernel exists, plain torch and the host elsewhere, which is told.

What waits for the device, waits here and once: an encoder for the largest magnitude, a decoder for its flag (and again
where that says that chunks have other modes than was thought). The functions underneath launch without waiting, so a
CUDA graph can hold them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from triton.errors import TritonError

from laconic import counters
from laconic.errors import FrameError
from laconic.kernels import torch_fallback
from laconic.kernels.interface import NONFINITE, Grid, IntRounding, LinearGrid, PackedIntSum, QsgdCoding, UniformGrid
from laconic.kernels.reference.casts import BFLOAT16_MAX, FLOAT16_MAX
from laconic.kernels.reference.selection import SAMPLES
from laconic.kernels.sections import HUFFMAN, Coding, PackedIntCoding, symbol_bits, symbol_dtype
from laconic.kernels.triton import (
    casts,
    coded_chunks,
    huffman_decode,
    huffman_encode,
    linear,
    lowrank,
    multi_tensor,
    packed_ints,
    packing,
    positions,
    qsgd,
    randk,
    selectors,
    sign,
    ternary,
)
from laconic.kernels.triton.grid_sync import MOST, STATE

P = ParamSpec("P")
T = TypeVar("T")


def _count_fallback(kernel: str, reason: str) -> None:
    counters.count("hosted_kernels", 1, f"{kernel} {reason}: plain torch and the host serve, with the same bytes")


def _served(kernel: Callable[P, T]) -> Callable[P, T]:
    """Launched on the device of its tensors; a kernel that cannot be compiled there gives way to the slower road."""

    @wraps(kernel)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        there = next(each.device for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        try:
            if there.type == "cuda" and there.index != torch.cuda.current_device():
                with torch.cuda.device(there):  # Triton launches on the current one
                    return kernel(*args, **kwargs)
            return kernel(*args, **kwargs)
        except (TritonError, RuntimeError) as error:
            if not isinstance(error, TritonError) and "PassManager" not in str(error):
                raise  # not the compiler's, which has no name for its own faults
            _count_fallback(kernel.__name__, f"cannot be compiled here ({str(error).splitlines()[-1:] or error!r})")
            found: T = getattr(torch_fallback, kernel.__name__)(*args, **kwargs)
            return found

    return call


def _served_together(kernel: Callable[P, T]) -> Callable[P, T]:
    """The same for many tensors; what cannot be compiled is the caller's to go round."""

    @wraps(kernel)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        given = (*args, *kwargs.values())
        there = next(
            each[0].device for each in given if isinstance(each, (list, tuple)) and isinstance(each[0], Tensor)
        )
        with torch.cuda.device(there) if there.type == "cuda" else nullcontext():
            return kernel(*args, **kwargs)

    return call


def _largest(amax_bits: Tensor) -> int:
    return int(amax_bits.max()) if amax_bits.numel() else 0


def _refuse(flag: Tensor, what: str) -> None:
    if int(flag):
        raise FrameError(f"the frame holds {what}")


# ---------------------------------------------------------------------------------------------------------- packing

pack = _served(packing.pack)


@_served
def unpack(packed: Tensor, n: int, bits: int) -> Tensor:
    return packing.unpack(packed, n, bits)


pack_symbols = _served(packing.pack_symbols)
unpack_symbols = _served(packing.unpack_symbols)


# ------------------------------------------------------------------------------------------------------------ casts


@_served
def all_finite(x: Tensor) -> bool:
    if x.dtype != torch.float32 or not x.is_contiguous() or not x.numel():
        return torch_fallback.all_finite(x)
    return _largest(selectors.keys_of(x.view(-1))) < NONFINITE


add_momentum = _served(casts.add_momentum)


@_served
def copy_finite(x: Tensor, out: Tensor) -> bool:
    if x.dtype == torch.float32 and x.is_contiguous() and out.data_ptr() % 4 == 0:
        return not int(casts.add_values(x.view(-1), out.view(torch.float32), None))
    if x.is_floating_point() and not all_finite(x):
        return False
    out.copy_(x.view(torch.uint8))
    return True


@_served
def raw_decode(section: Tensor, dtype: torch.dtype, out: Tensor, weight: float | None) -> None:
    if dtype != torch.float32 or section.data_ptr() % 4:
        torch_fallback.raw_decode(section, dtype, out, weight)
        return
    _refuse(casts.add_values(section.view(dtype), out, weight), "a value that is not finite")


@_served
def cast_encode(x: Tensor, to: str, out: Tensor) -> tuple[int, int]:
    if out.data_ptr() % 2 or not x.numel():
        return torch_fallback.cast_encode(x, to, out)
    bf16 = to == "bf16"
    amax_bits, saturated = casts.cast_encode(
        x, out.view(torch.int16), BFLOAT16_MAX if bf16 else FLOAT16_MAX, bf16
    ).tolist()
    return amax_bits, saturated


@_served
def cast_decode(section: Tensor, source: str, out: Tensor, weight: float | None) -> None:
    if section.data_ptr() % 2:
        torch_fallback.cast_decode(section, source, out, weight)
        return
    values = section.view(torch.float16 if source == "fp16" else torch.bfloat16)
    _refuse(casts.add_values(values, out, weight), f"a {source} value that is not finite")


# ------------------------------------------------------------------------------------------------------- quantizers


@_served
def qsgd_encode(x: Tensor, coding: QsgdCoding, *, seed: int, norms: Tensor, packed: Tensor) -> int:
    return _largest(qsgd.qsgd_encode(x, coding, seed=seed, norms=norms, packed=packed)) if len(x) else 0


@_served
def qsgd_feedback(x: Tensor, residual: Tensor, coding: QsgdCoding, *, seed: int, norms: Tensor, packed: Tensor) -> int:
    if not x.numel():
        return 0
    return _largest(qsgd.qsgd_encode(x, coding, seed=seed, norms=norms, packed=packed, residual=residual))


@_served
def qsgd_decode(norms: Tensor, packed: Tensor, *, bits: int, bucket: int, out: Tensor, weight: float | None) -> None:
    flag = qsgd.qsgd_decode(norms, packed, bits=bits, bucket=bucket, out=out, weight=weight)
    _refuse(flag, "a norm that is not a finite, non-negative number")


@_served
def ternary_encode(x: Tensor, *, bucket: int, seed: int, norms: Tensor, packed: Tensor) -> int:
    return _largest(ternary.ternary_encode(x, bucket=bucket, seed=seed, norms=norms, packed=packed)) if len(x) else 0


@_served
def ternary_decode(norms: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> None:
    flag = ternary.ternary_decode(norms, packed, bucket=bucket, out=out, weight=weight)
    _refuse(flag, "a byte that is not five ternary values, or a scale that is not a finite, non-negative number")


@_served
def sign_encode(x: Tensor, *, bucket: int, scales: Tensor, packed: Tensor) -> int:
    return _largest(sign.sign_encode(x, bucket=bucket, scales=scales, packed=packed)) if len(x) else 0


@_served
def sign_decode(scales: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> None:
    flag = sign.sign_decode(scales, packed, bucket=bucket, out=out, weight=weight)
    _refuse(flag, "a scale that is not a finite, non-negative number")


@_served
def onebit_encode(x: Tensor, *, bucket: int, means: Tensor, packed: Tensor) -> int:
    return _largest(sign.onebit_encode(x, bucket=bucket, means=means, packed=packed)) if len(x) else 0


@_served
def onebit_decode(means: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> None:
    flag = sign.onebit_decode(means, packed, bucket=bucket, out=out, weight=weight)
    _refuse(flag, "a mean that is not a finite, non-negative number")


# ------------------------------------------------------------------------------------------------------------ grids


def _floats(bits: list[int]) -> tuple[float, float]:
    low, high = struct.unpack("<2f", struct.pack("<2i", *bits))
    return low, high


def value_range(x: Tensor) -> tuple[float, float, int]:
    """Torch finds both ends in one pass; the larger magnitude of the two is the key, a NaN shows in both."""
    if not x.numel():
        return 0.0, 0.0, 0
    ends = torch.stack(torch.aminmax(x)).cpu()
    amax_bits = int((ends.view(torch.int32) & 0x7FFFFFFF).max())
    low, high = ends.tolist()
    return (0.0, 0.0, amax_bits) if amax_bits >= NONFINITE else (low, high, amax_bits)


@_served
def uniform_encode(x: Tensor, *, levels: int, bounds: Tensor, packed: Tensor) -> tuple[float, float, int]:
    if not 0 < x.numel() <= MOST:
        return torch_fallback.uniform_encode(x, levels=levels, bounds=bounds, packed=packed)
    amax_bits, *ends = linear.uniform_encode(x, levels, bounds, packed).tolist()
    return *_floats(ends), amax_bits


@_served
def uniform_decode(packed: Tensor, *, low: float, high: float, levels: int, out: Tensor, weight: float | None) -> None:
    linear.uniform_decode(packed, UniformGrid(low, high, levels), out, weight)


@_served
def linear_encode(x: Tensor, grid: LinearGrid, packed: Tensor) -> None:
    linear.pack_bins(x, grid, packed)


@_served
def table_decode(packed: Tensor, table: Tensor, out: Tensor, weight: float | None) -> None:
    if symbol_bits(table.numel()) == 0:
        torch_fallback.table_decode(packed, table, out, weight)
    else:
        linear.table_decode(packed, table, out, weight)


sample = _served(linear.sample)
grid_symbols = _served(linear.grid_symbols)


@_served
def histogram(x: Tensor, grid: LinearGrid) -> Tensor:
    return linear.histogram(x, grid).cpu()


@_served
def range_histogram(x: Tensor, *, bins: int, zero: bool, count: int, seed: int) -> tuple[float, float, int, list[int]]:
    if not 0 < x.numel() <= MOST:
        return torch_fallback.range_histogram(x, bins=bins, zero=zero, count=count, seed=seed)
    found = linear.range_histogram(x, bins, zero, count, seed).tolist()
    amax_bits, (low, high), counts = found[0], _floats(found[1:3]), found[STATE:]
    if amax_bits >= NONFINITE:
        return 0.0, 0.0, amax_bits, []
    return low, high, amax_bits, counts if low < high else []


# ---------------------------------------------------------------------------------------------------------- selectors


@_served
def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor, int]:
    if x.dtype == torch.float64:
        _count_fallback("topk", "has no GPU kernel for float64")
    if x.dtype == torch.float64 or not x.numel():
        return torch_fallback.topk(x, k)
    found = selectors.topk(x.to(torch.float32), k, torch.empty(0, dtype=torch.uint8, device=x.device))
    return found.positions, found.values.to(x.dtype), found.amax_bits


@_served
def topk_encode(x: Tensor, k: int, out: Tensor) -> tuple[int, Tensor, int]:
    n = x.numel()
    if x.dtype == torch.float64 or not n:
        positions, values, amax_bits = topk(x, k)
        return positions_encode(positions, n, out), values, amax_bits
    found = selectors.topk(x.to(torch.float32), k, out)
    nbytes = positions_encode(found.positions, n, out) if found.nbytes is None else found.nbytes
    return nbytes, found.values.to(x.dtype), found.amax_bits


@_served
def topk_sampled(x: Tensor, k: int, seed: int) -> tuple[Tensor, Tensor, int]:
    n = x.numel()
    if x.dtype == torch.float64:
        _count_fallback("topk_sampled", "has no GPU kernel for float64")
        return torch_fallback.topk_sampled(x, k, seed)
    if n <= SAMPLES:
        return topk(x, k)
    flat = x.to(torch.float32)
    rank = max(1, min(SAMPLES, (k * SAMPLES + n // 2) // n))
    threshold = selectors.sampled_threshold(flat, rank, seed)
    if threshold == 0:
        return topk(x, k)
    positions, values, amax_bits = selectors.above(flat, threshold)
    return topk(x, k) if positions.numel() > 2 * k + 16 else (positions, values.to(x.dtype), amax_bits)


@_served
def threshold_select(x: Tensor, threshold: float) -> tuple[Tensor, Tensor, int]:
    if x.dtype == torch.float64:
        _count_fallback("threshold_select", "has no GPU kernel for float64")
    if x.dtype == torch.float64 or not x.numel():
        return torch_fallback.threshold_select(x, threshold)
    positions, values, amax_bits = selectors.above(x.to(torch.float32), selectors.key_of_float(threshold))
    return positions, values.to(x.dtype), amax_bits


@_served
def random_positions(n: int, k: int, seed: int, like: Tensor) -> Tensor:
    found = randk.positions(n, k, seed, like)
    return torch_fallback.random_positions(n, k, seed, like) if found is None else found


@_served
def randk_encode(x: Tensor, k: int, seed: int, section: Tensor) -> tuple[Tensor, int]:
    found = randk.randk_encode(x, k, seed, section) if x.dtype == torch.float32 else None
    return torch_fallback.randk_encode(x, k, seed, section) if found is None else found


@_served
def randk_decode(section: Tensor, values: Tensor, gain: float, out: Tensor, weight: float | None) -> None:
    float32 = values.dtype == out.dtype == torch.float32
    if not float32 or not randk.randk_decode(section, values, gain, out, weight):
        torch_fallback.randk_decode(section, values, gain, out, weight)


# -------------------------------------------------------------------------------------------------------- positions


positions_encode = _served(positions.positions_encode)
positions_decode = _served(positions.positions_decode)
sparse_decode = _served(positions.sparse_decode)
scatter = _served(positions.scatter)


# ------------------------------------------------------------------------------------------------------------ lanes

block_scales = _served(packed_ints.block_scales)
rotate = _served(packed_ints.rotate)
packed_int_add = _served(packed_ints.packed_int_add)
packed_int_accumulate = _served(packed_ints.packed_int_accumulate)
packed_int_repack = _served(packed_ints.packed_int_repack)


@_served
def packed_int_encode(
    x: Tensor, coding: PackedIntCoding, rounding: IntRounding, *, feedback: bool, clips: Tensor, out: Tensor
) -> int:
    if not x.numel():
        return 0
    amax_bits = packed_ints.packed_int_encode(x, coding, rounding, feedback=feedback, clips=clips, out=out)
    return 0 if amax_bits is None else _largest(amax_bits)


@_served
def packed_int_decode(packed: PackedIntSum, *, rotation_seed: int | None, out: Tensor, weight: float | None) -> None:
    flag = packed_ints.packed_int_decode(packed, rotation_seed=rotation_seed, out=out, weight=weight)
    _refuse(flag, f"a scale that is not a finite, non-negative number, or a sum above {packed.total}")


@_served
def packed_int_max(integers: Tensor, n: int, coding: PackedIntCoding) -> int:
    return _largest(packed_ints.packed_int_max(integers, n, coding)) if n else 0


# ---------------------------------------------------------------------------------------------------------- coding


@_served
def encode_symbols(symbols: Tensor, alphabet: int, coding: int, out: Tensor) -> int:
    if not symbols.numel():
        return 0
    if coding == Coding.HUFFMAN:
        return int(huffman_encode.huffman_write(symbols, alphabet, out))
    return int(coded_chunks.write(symbols, alphabet, coding, out))


def encode_values(x: Tensor, grid: Grid, coding: int, out: Tensor) -> int:
    return encode_symbols(grid_symbols(x, grid), grid.levels, coding, out)


class _Guess:
    """Modes that the section before had, as bits: what the next one is taken to have, until it tells."""

    modes = 1 << HUFFMAN


def _read(section: Tensor, n: int, alphabet: int, table: Tensor | None, out: Tensor, weight: float | None) -> None:
    """Symbols, or values of the table, into ``out``, or these added to it ``weight`` times.

    One wait tells whether they are good, and which modes there are: if more than had been thought, all is read again.
    """
    opened, verdict = huffman_decode.open_section(section, n, alphabet), 1
    if opened is not None:
        coded_chunks.read(opened, _Guess.modes, alphabet, table, out, weight)
        verdict, occurring = opened.verdict.tolist()
        guessed, _Guess.modes = _Guess.modes, occurring or _Guess.modes
        if not verdict and occurring & ~guessed:
            coded_chunks.read(opened, occurring, alphabet, table, out, weight)
            verdict = int(opened.verdict[0])
    if verdict:
        raise FrameError(f"the frame holds {n} symbols of {alphabet} that no coder wrote")


@_served
def decode_symbols(section: Tensor, n: int, alphabet: int) -> Tensor:
    if not n:
        return torch_fallback.decode_symbols(section, n, alphabet)
    symbols = torch.empty(coded_chunks.blocks_of_16(n), dtype=symbol_dtype(alphabet), device=section.device)
    _read(section, n, alphabet, None, symbols, None)
    return symbols[:n]


@_served
def decode_values(section: Tensor, table: Tensor, out: Tensor, weight: float | None) -> None:
    if not out.numel():
        torch_fallback.decode_values(section, table, out, weight)
    else:
        _read(section, out.numel(), table.numel(), table.to(out.device), out, weight)


chunk_modes = torch_fallback.chunk_modes


# --------------------------------------------------------------------------------------------------------- together

amax_bits_all = _served_together(multi_tensor.amax_bits_all)
qsgd_encode_all = _served_together(multi_tensor.qsgd_encode_all)
qsgd_decode_all = _served_together(multi_tensor.qsgd_decode_all)
sign_encode_all = _served_together(multi_tensor.sign_encode_all)
sign_decode_all = _served_together(multi_tensor.sign_decode_all)
gather_blocks = _served_together(multi_tensor.gather_blocks)
packed_int_decode_all = _served_together(multi_tensor.packed_int_decode_all)


# --------------------------------------------------------------------------------------------------------- low rank

project_rows = _served(lowrank.project_rows)
project_columns = _served(lowrank.project_columns)
lowrank_decode = torch_fallback.lowrank_decode
