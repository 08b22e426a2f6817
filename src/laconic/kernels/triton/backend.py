"""The backend for CUDA tensors: Triton where a kernel exists, torch and the host elsewhere, which is counted.

A call synchronizes with the device here, and once: an encoder reads amax_bits, a decoder its flag. The functions of the
other modules only launch, so that a CUDA graph can capture them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from triton.errors import TritonError

from laconic import counters
from laconic.errors import FrameError
from laconic.kernels import torch_fallback
from laconic.kernels.interface import NONFINITE, ChunkCounts, Grid, LinearGrid, PackedIntSum, UniformGrid
from laconic.kernels.known_amax import known_amax
from laconic.kernels.reference.casts import BFLOAT16_MAX, FLOAT16_MAX
from laconic.kernels.reference.selection import SAMPLES
from laconic.kernels.sections import PackedIntCoding, symbol_bits
from laconic.kernels.triton import (
    bins,
    casts,
    entropy_coding,
    linear,
    lowrank,
    multi_tensor,
    packed_int_sums,
    packed_ints,
    packing,
    positions,
    qsgd,
    randk,
    round_keys,
    selectors,
    sign,
    sparse,
    stochastic_rounding,
    ternary,
)
from laconic.kernels.triton import topk_chunks as topk_chunk_kernels
from laconic.kernels.triton.grid_sync import MAX_NUMEL, STATE_WORDS

HOST_MAX = 4096
"""The largest number of amax bits that the host compares itself: those of all programs for up to 2^23 values."""

P = ParamSpec("P")
T = TypeVar("T")


def _count_fallback(kernel: str, reason: str) -> None:
    counters.count("hosted_kernels", 1, f"{kernel} {reason}: torch and the host compute it, with the same bytes")


def _with_fallback(kernel: Callable[P, T]) -> Callable[P, T]:
    """Launch on the device of the tensors; fall back to torch if Triton cannot compile the kernel there."""

    @wraps(kernel)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        try:
            if device.type == "cuda" and device.index != torch.cuda.current_device():
                with torch.cuda.device(device):  # Triton launches on the current device
                    return kernel(*args, **kwargs)
            return kernel(*args, **kwargs)
        except (TritonError, RuntimeError) as error:
            if not isinstance(error, TritonError) and "PassManager" not in str(error):
                raise  # not from the compiler, whose pass manager raises a plain RuntimeError
            reason = f"cannot be compiled here ({str(error).splitlines()[-1:] or error!r})"
            _count_fallback(kernel.__name__, reason)
            result: T = getattr(torch_fallback, kernel.__name__)(*args, **kwargs)
            return result

    return call


def _on_device(kernel: Callable[P, T]) -> Callable[P, T]:
    """Launch a multi-tensor kernel on the device of its tensors; its callers handle a failure to compile."""

    @wraps(kernel)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        sequences = (value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)))
        device = next(value[0].device for value in sequences if isinstance(value[0], Tensor))
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return kernel(*args, **kwargs)

    return call


def _maximum(amax_bits: Tensor) -> int:
    if 0 < amax_bits.numel() <= HOST_MAX:  # a copy that is waited for anyway; one launch less
        return int(amax_bits.cpu().numpy().max())
    return int(amax_bits.max()) if amax_bits.numel() else 0


def _encoder(kernel: Callable[P, Tensor]) -> Callable[P, int]:
    """Return the maximum of a kernel's amax_bits; an empty tensor is not encoded."""

    @wraps(kernel)
    def encode(*args: P.args, **kwargs: P.kwargs) -> int:
        x: Any = args[0]
        if not x.numel():
            return 0
        amax_bits, known = kernel(*args, **kwargs), known_amax()
        return _maximum(amax_bits) if known is None else known

    return _with_fallback(encode)


def _raise_if(flag: Tensor, invalid: str) -> None:
    if int(flag):
        raise FrameError(f"the frame holds {invalid}")


def _decoder(kernel: Callable[P, Tensor], invalid: str) -> Callable[P, None]:
    """Raise FrameError if a kernel sets its flag."""

    @wraps(kernel)
    def decode(*args: P.args, **kwargs: P.kwargs) -> None:
        _raise_if(kernel(*args, **kwargs), invalid)

    return _with_fallback(decode)


# ------------------------------------------------------------------------------------------------ packing and casts

pack = _with_fallback(packing.pack)
unpack = _with_fallback(packing.unpack)
pack_symbols = _with_fallback(packing.pack_symbols)
unpack_symbols = _with_fallback(packing.unpack_symbols)
add_momentum = _with_fallback(casts.add_momentum)
stochastic_bf16 = _with_fallback(stochastic_rounding.stochastic_bf16)


@_with_fallback
def all_finite(x: Tensor) -> bool:
    if x.dtype != torch.float32 or not x.is_contiguous() or not x.numel():
        return torch_fallback.all_finite(x)
    return _maximum(selectors.amax_bits_by_tile(x.view(-1))) < NONFINITE


@_with_fallback
def copy_finite(x: Tensor, out: Tensor) -> bool:
    if x.dtype == torch.float32 and x.is_contiguous() and out.data_ptr() % 4 == 0:
        return not int(casts.accumulate_values(x.view(-1), out.view(torch.float32), None))
    if x.is_floating_point() and not all_finite(x):
        return False
    out.copy_(x.view(torch.uint8))
    return True


@_with_fallback
def raw_decode(section: Tensor, dtype: torch.dtype, out: Tensor, weight: float | None) -> None:
    if dtype != torch.float32 or section.data_ptr() % 4:
        torch_fallback.raw_decode(section, dtype, out, weight)
        return
    _raise_if(casts.accumulate_values(section.view(dtype), out, weight), "a value that is not finite")


@_with_fallback
def cast_encode(x: Tensor, to: str, out: Tensor) -> tuple[int, int]:
    if out.data_ptr() % 2 or not x.numel():
        return torch_fallback.cast_encode(x, to, out)
    bf16 = to == "bf16"
    limit = BFLOAT16_MAX if bf16 else FLOAT16_MAX
    amax_bits, saturated = casts.cast_encode(x, out.view(torch.int16), limit, bf16).tolist()
    return amax_bits, saturated


@_with_fallback
def cast_decode(section: Tensor, source: str, out: Tensor, weight: float | None) -> None:
    if section.data_ptr() % 2:
        torch_fallback.cast_decode(section, source, out, weight)
        return
    values = section.view(torch.float16 if source == "fp16" else torch.bfloat16)
    _raise_if(casts.accumulate_values(values, out, weight), f"a {source} value that is not finite")


# ------------------------------------------------------------------------------------------------------- quantizers

_INVALID = "that is not a finite, non-negative number"

qsgd_encode = _encoder(qsgd.qsgd_encode)
qsgd_feedback = _encoder(qsgd.qsgd_feedback)
qsgd_decode = _decoder(qsgd.qsgd_decode, f"a norm {_INVALID}")
ternary_encode = _encoder(ternary.ternary_encode)
ternary_decode = _decoder(ternary.ternary_decode, f"a byte that is not five ternary values, or a scale {_INVALID}")
sign_encode = _encoder(sign.sign_encode)
sign_decode = _decoder(sign.sign_decode, f"a scale {_INVALID}")
onebit_encode = _encoder(sign.onebit_encode)
onebit_decode = _decoder(sign.onebit_decode, f"a mean {_INVALID}")
bins_encode = _encoder(bins.bins_encode)
bins_decode = _decoder(bins.bins_decode, "a mean that is not a finite number")


def _float_pair(bits: list[int]) -> tuple[float, float]:
    low, high = struct.unpack("<2f", struct.pack("<2i", *bits))
    return low, high


def value_range(x: Tensor) -> tuple[float, float, int]:
    """Return both ends of the range, which torch finds in one pass, and amax_bits; a NaN shows in both ends."""
    if not x.numel():
        return 0.0, 0.0, 0
    ends = torch.stack(torch.aminmax(x)).cpu()
    amax_bits = int((ends.view(torch.int32) & 0x7FFFFFFF).max())
    low, high = ends.tolist()
    return (0.0, 0.0, amax_bits) if amax_bits >= NONFINITE else (low, high, amax_bits)


@_with_fallback
def uniform_encode(x: Tensor, *, levels: int, bounds: Tensor, packed: Tensor) -> tuple[float, float, int]:
    if not 0 < x.numel() <= MAX_NUMEL:
        return torch_fallback.uniform_encode(x, levels=levels, bounds=bounds, packed=packed)
    amax_bits, *ends = linear.uniform_encode(x, levels, bounds, packed).tolist()
    return *_float_pair(ends), amax_bits


@_with_fallback
def uniform_decode(packed: Tensor, *, low: float, high: float, levels: int, out: Tensor, weight: float | None) -> None:
    linear.uniform_decode(packed, UniformGrid(low, high, levels), out, weight)


@_with_fallback
def linear_encode(x: Tensor, grid: LinearGrid, packed: Tensor) -> None:
    linear.pack_bins(x, grid, packed)


@_with_fallback
def table_decode(packed: Tensor, table: Tensor, out: Tensor, weight: float | None) -> None:
    if symbol_bits(table.numel()) == 0:
        torch_fallback.table_decode(packed, table, out, weight)
    else:
        linear.table_decode(packed, table, out, weight)


sample = _with_fallback(linear.sample)
grid_symbols = _with_fallback(linear.grid_symbols)


@_with_fallback
def histogram(x: Tensor, grid: LinearGrid) -> Tensor:
    return linear.histogram(x, grid).cpu()


@_with_fallback
def range_histogram(x: Tensor, *, bins: int, zero: bool, count: int, seed: int) -> tuple[float, float, int, list[int]]:
    if not 0 < x.numel() <= MAX_NUMEL:
        return torch_fallback.range_histogram(x, bins=bins, zero=zero, count=count, seed=seed)
    result = linear.range_histogram(x, bins, zero, count, seed).tolist()
    amax_bits, (low, high), counts = result[0], _float_pair(result[1:3]), result[STATE_WORDS:]
    if amax_bits >= NONFINITE:
        return 0.0, 0.0, amax_bits, []
    return low, high, amax_bits, counts if low < high else []


# --------------------------------------------------------------------------------------------------------- selectors


def _is_float64(x: Tensor, kernel: str) -> bool:
    """Return whether the selector needs the fallback, and count it."""
    if x.dtype == torch.float64:
        _count_fallback(kernel, "has no GPU kernel for float64")
        return True
    return False


@_with_fallback
def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor, int]:
    if _is_float64(x, "topk") or not x.numel():
        return torch_fallback.topk(x, k)
    selected = selectors.topk(x.to(torch.float32), k, torch.empty(0, dtype=torch.uint8, device=x.device))
    return selected.positions, selected.values.to(x.dtype), selected.amax_bits


@_with_fallback
def topk_encode(x: Tensor, k: int, out: Tensor) -> tuple[int, Tensor, int]:
    n = x.numel()
    if x.dtype == torch.float64 or not n:
        kept, values, amax_bits = topk(x, k)
        return positions_encode(kept, n, out), values, amax_bits
    selected = selectors.topk(x.to(torch.float32), k, out)
    nbytes = positions_encode(selected.positions, n, out) if selected.nbytes is None else selected.nbytes
    return nbytes, selected.values.to(x.dtype), selected.amax_bits


@_with_fallback
def topk_chunks(x: Tensor, counts: ChunkCounts) -> tuple[Tensor, Tensor, int]:
    if _is_float64(x, "topk_chunks"):
        return torch_fallback.topk_chunks(x, counts)
    kept, values, state = topk_chunk_kernels.topk_chunks(x.to(torch.float32), counts)
    return kept, values.to(x.dtype), int(state[topk_chunk_kernels.AMAX_WORD])


@_with_fallback
def topk_chunks_encode(x: Tensor, counts: ChunkCounts, out: Tensor) -> tuple[int, Tensor, int]:
    if _is_float64(x, "topk_chunks"):
        kept, values, amax_bits = torch_fallback.topk_chunks(x, counts)
        return positions_encode(kept, x.numel(), out), values, amax_bits
    kept, values, state = topk_chunk_kernels.topk_chunks(x.to(torch.float32), counts)
    nbytes, words = positions.encode_with_state(kept, x.numel(), out, state)
    return nbytes, values.to(x.dtype), words[topk_chunk_kernels.AMAX_WORD]


@_with_fallback
def topk_sampled(x: Tensor, k: int, seed: int) -> tuple[Tensor, Tensor, int]:
    n = x.numel()
    if _is_float64(x, "topk_sampled"):
        return torch_fallback.topk_sampled(x, k, seed)
    if n <= SAMPLES:
        return topk(x, k)
    flat = x.to(torch.float32)
    rank = max(1, min(SAMPLES, (k * SAMPLES + n // 2) // n))
    threshold = selectors.sampled_threshold(flat, rank, seed)
    if threshold == 0:
        return topk(x, k)
    kept, values, amax_bits = selectors.above(flat, threshold)
    return topk(x, k) if kept.numel() > 2 * k + 16 else (kept, values.to(x.dtype), amax_bits)


@_with_fallback
def threshold_select(x: Tensor, threshold: float) -> tuple[Tensor, Tensor, int]:
    if _is_float64(x, "threshold_select") or not x.numel():
        return torch_fallback.threshold_select(x, threshold)
    kept, values, amax_bits = selectors.above(x.to(torch.float32), selectors.float_magnitude_bits(threshold))
    return kept, values.to(x.dtype), amax_bits


@_with_fallback
def random_positions(n: int, k: int, seed: int, like: Tensor) -> Tensor:
    kept = randk.random_positions(n, k, seed, like)
    return torch_fallback.random_positions(n, k, seed, like) if kept is None else kept


@_with_fallback
def randk_encode(x: Tensor, k: int, seed: int, section: Tensor) -> tuple[Tensor, int]:
    result = randk.randk_encode(x, k, seed, section) if x.dtype == torch.float32 else None
    return torch_fallback.randk_encode(x, k, seed, section) if result is None else result


@_with_fallback
def randk_decode(section: Tensor, values: Tensor, gain: float, out: Tensor, weight: float | None) -> None:
    float32 = values.dtype == out.dtype == torch.float32
    if not float32 or not randk.randk_decode(section, values, gain, out, weight):
        torch_fallback.randk_decode(section, values, gain, out, weight)


positions_encode = _with_fallback(positions.positions_encode)
gaps_encode = _with_fallback(positions.gaps_encode)
ranks_encode = _with_fallback(positions.ranks_encode)
contexts_encode = torch_fallback.contexts_encode
positions_decode = _with_fallback(positions.positions_decode)
sparse_decode = _with_fallback(positions.sparse_decode)
scatter = _with_fallback(positions.scatter)

# --------------------------------------------------------------------------------------------------- packed integers

block_scales = _with_fallback(packed_ints.block_scales)
rotate = _with_fallback(packed_ints.rotate)
packed_int_encode = _encoder(packed_ints.packed_int_encode)
packed_int_add = _with_fallback(packed_int_sums.packed_int_add)
packed_int_accumulate = _with_fallback(packed_int_sums.packed_int_accumulate)
packed_int_repack = _with_fallback(packed_int_sums.packed_int_repack)


@_with_fallback
def packed_int_decode(packed: PackedIntSum, *, rotation_seed: int | None, out: Tensor, weight: float | None) -> None:
    flag = packed_ints.packed_int_decode(packed, rotation_seed=rotation_seed, out=out, weight=weight)
    _raise_if(flag, f"a scale {_INVALID}, or a sum above {packed.total}")


@_with_fallback
def packed_int_max(integers: Tensor, n: int, coding: PackedIntCoding) -> int:
    return _maximum(packed_int_sums.packed_int_max(integers, n, coding)) if n else 0


# ---------------------------------------------------------------------------------------------------- entropy coding

encode_symbols = _with_fallback(entropy_coding.encode_symbols)
decode_symbols = _with_fallback(entropy_coding.decode_symbols)
decode_values = _with_fallback(entropy_coding.decode_values)
chunk_modes = torch_fallback.chunk_modes


def encode_values(x: Tensor, grid: Grid, coding: int, out: Tensor) -> int:
    return encode_symbols(grid_symbols(x, grid), grid.levels, coding, out)


# ------------------------------------------------------------------------------------------ multi-tensor and low rank

amax_bits_all = _on_device(multi_tensor.amax_bits_all)
fill_all = _on_device(multi_tensor.fill_all)
add_all = _on_device(multi_tensor.add_all)
copy_all = _on_device(multi_tensor.copy_all)
scale_all = _on_device(multi_tensor.scale_all)
qsgd_encode_all = _on_device(multi_tensor.qsgd_encode_all)
qsgd_decode_all = _on_device(multi_tensor.qsgd_decode_all)
sign_encode_all = _on_device(multi_tensor.sign_encode_all)
sign_decode_all = _on_device(multi_tensor.sign_decode_all)
bins_encode_all = _on_device(multi_tensor.bins_encode_all)
bins_decode_all = _on_device(multi_tensor.bins_decode_all)
gather_blocks = _on_device(multi_tensor.gather_blocks)
packed_int_decode_all = _on_device(multi_tensor.packed_int_decode_all)
agreed_clips = packed_int_sums.agreed_clips
cast_encode_all = _on_device(casts.cast_encode_all)
cast_decode_all = _on_device(casts.cast_decode_all)
stochastic_bf16_all = _on_device(stochastic_rounding.stochastic_bf16_all)
topk_all = _on_device(sparse.topk_all)
next_round_keys = round_keys.next_round_keys
sparse_decode_all = _on_device(sparse.sparse_decode_all)

project_rows = _with_fallback(lowrank.project_rows)
project_columns = _with_fallback(lowrank.project_columns)
lowrank_decode = torch_fallback.lowrank_decode
