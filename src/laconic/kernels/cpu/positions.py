"""Coded positions, and values scattered to them."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic import _core
from laconic.kernels import reference
from laconic.kernels.cpu.casts import all_finite
from laconic.kernels.cpu.entropy_coding import decode_symbols, encode_symbols
from laconic.kernels.cpu.packing import pack, unpack
from laconic.kernels.cpu.pointers import (
    bytes_at,
    empty,
    empty_positions,
    floats_at,
    is_wide,
    require_valid,
    threads,
    weight_of,
)
from laconic.kernels.cpu.selection import random_positions, topk, topk_chunks
from laconic.kernels.interface import ChunkCounts
from laconic.kernels.reference.positions import scale_saturating
from laconic.kernels.reference.ranks import read_ranks, write_ranks
from laconic.kernels.sections import (
    ALL,
    CONTEXTS,
    GAPS,
    GAPS_HEADER,
    POSITIONS_HEADER,
    RANKS,
    Coding,
    PositionHeader,
    PositionPlan,
    coded_max_nbytes,
    gap_alphabet,
    gaps_max_nbytes,
    positions_max_nbytes,
    read_contexts_header,
    read_gaps_header,
    read_positions_header,
    read_seed,
    symbol_dtype,
    write_bytes,
)


def topk_encode(x: Tensor, k: int, out: Tensor) -> tuple[int, Tensor, int]:
    n = x.numel()
    if x.dtype != torch.float32 or not k:
        positions, values, amax_bits = topk(x, k)
        return positions_encode(positions, n, out), values, amax_bits
    values = empty(k)
    address = bytes_at(out, positions_max_nbytes(n, k))
    nbytes, amax_bits = _core.topk_encode(floats_at(x), n, k, values.data_ptr(), address, threads())
    return nbytes, values, amax_bits


def topk_chunks_encode(x: Tensor, counts: ChunkCounts, out: Tensor) -> tuple[int, Tensor, int]:
    positions, values, amax_bits = topk_chunks(x, counts)
    return positions_encode(positions, x.numel(), out), values, amax_bits


def positions_plan(positions: Tensor, n: int) -> PositionPlan:
    return PositionPlan(*_core.plan_positions(positions.data_ptr(), positions.numel(), is_wide(positions), n))


def positions_write(positions: Tensor, n: int, plan: PositionPlan, out: Tensor) -> None:
    mode, low_bits, nbytes = plan
    address, k = positions.data_ptr(), positions.numel()
    _core.write_positions(address, k, is_wide(positions), mode, low_bits, nbytes, bytes_at(out, nbytes))


def positions_encode(positions: Tensor, n: int, out: Tensor) -> int:
    k = positions.numel()
    address = bytes_at(out, positions_max_nbytes(n, k))
    return _core.encode_positions(positions.data_ptr(), k, is_wide(positions), n, address)


def gaps_encode(positions: Tensor, n: int, out: Tensor) -> int:
    k, alphabet = positions.numel(), gap_alphabet(n)
    bytes_at(out, gaps_max_nbytes(n, k))
    classes = torch.empty(k, dtype=symbol_dtype(alphabet))
    low_begin = GAPS_HEADER + coded_max_nbytes(k, alphabet)
    low_nbytes = _core.split_gaps(
        positions.data_ptr(), k, is_wide(positions), classes.data_ptr(), out[low_begin:].data_ptr()
    )
    nbytes = encode_symbols(classes, alphabet, Coding.RANS_AUTO, out[GAPS_HEADER:low_begin])
    write_bytes(out[:GAPS_HEADER], (GAPS | k << 16 | nbytes << 64).to_bytes(GAPS_HEADER, "little"))
    end = GAPS_HEADER + nbytes
    out[end : end + low_nbytes] = out[low_begin : low_begin + low_nbytes].clone()
    return end + low_nbytes


def _gaps_decode(section: Tensor, n: int, k: int) -> Tensor:
    end = read_gaps_header(section)
    classes = decode_symbols(section[GAPS_HEADER:end], k, gap_alphabet(n))
    wide, positions = empty_positions(n, k)
    low = section[end:]
    valid = _core.join_gaps(classes.data_ptr(), k, n, low.data_ptr(), low.numel(), wide, positions.data_ptr())
    require_valid(valid, f"gaps that do not lead to {k} positions below {n}")
    return positions


def ranks_encode(positions: Tensor, n: int, counts: ChunkCounts, out: Tensor) -> int:
    return write_ranks(positions, n, counts, out, pack)


def contexts_encode(positions: Tensor, n: int, columns: int, counts: ChunkCounts | None, out: Tensor) -> int:
    k, capacity = positions.numel(), out.numel()
    assert counts is None or counts.total(n) == k
    bits, each = (counts.chunk_bits, counts.each) if counts else (0, 0)
    data, address = positions.data_ptr(), bytes_at(out, capacity)
    return _core.write_contexts(data, k, is_wide(positions), n, columns, bits, each, address, capacity)


def _contexts_decode(section: Tensor, n: int, k: int) -> Tensor:
    header = read_contexts_header(section, n, k)
    wide, positions = empty_positions(n, k)
    body, nbytes = section.data_ptr() + header.nbytes, section.numel() - header.nbytes
    valid = _core.read_contexts(body, nbytes, *header, k, n, wide, positions.data_ptr())
    require_valid(valid, f"decisions that do not lead to {k} positions below {n}")
    return positions


def positions_decode(section: Tensor, n: int, header: PositionHeader) -> Tensor:
    mode, low_bits, k = header
    if mode == CONTEXTS:
        return _contexts_decode(section, n, k)
    if mode == GAPS:
        return _gaps_decode(section, n, k)
    if mode == RANKS:
        return read_ranks(section, n, k, unpack)
    wide, positions = empty_positions(n, k)
    if mode == ALL:
        return torch.arange(n, dtype=positions.dtype)
    body, nbytes = section.data_ptr() + POSITIONS_HEADER, section.numel() - POSITIONS_HEADER
    valid = _core.read_positions(body, nbytes, mode, low_bits, k, n, wide, positions.data_ptr())
    require_valid(valid, f"positions that are not {k} ascending ones below {n}")
    return positions


def sparse_decode(section: Tensor, values: Tensor, out: Tensor, weight: float | None) -> bool:
    if values.dtype == out.dtype == torch.float32 and section.is_contiguous():
        address, nbytes, k, store = section.data_ptr(), section.numel(), values.numel(), weight_of(weight)
        if _core.sparse_decode(address, nbytes, floats_at(values), k, floats_at(out), out.numel(), store, threads()):
            return True  # else the positions are coded in another way, or something is wrong with them
    header = read_positions_header(section, out.numel())
    if header.kept != values.numel():
        return False
    positions = positions_decode(section, out.numel(), header)
    require_valid(all_finite(values), "a value that is not finite")
    scatter(positions, values if weight is None else values.to(torch.float32), out, weight)
    return True


def randk_decode(section: Tensor, values: Tensor, gain: float, out: Tensor, weight: float | None) -> None:
    if values.dtype != torch.float32 or gain == 1.0:
        scaled, finite = scale_saturating(values, gain), all_finite(values)
    else:
        scaled = torch.empty_like(values)
        finite = _core.scale_saturating(floats_at(values), values.numel(), gain, scaled.data_ptr())
    require_valid(finite, "a value that is not finite")
    positions = random_positions(out.numel(), values.numel(), read_seed(section), out)
    scatter(positions, scaled if weight is None else scaled.to(torch.float32), out, weight)


def scatter(positions: Tensor, values: Tensor, out: Tensor, weight: float | None) -> None:
    if out.dtype != torch.float32:
        reference.scatter(positions, values, out, weight)
        return
    k = positions.numel()
    assert values.numel() == k
    address, wide = positions.data_ptr(), is_wide(positions)
    weight = weight_of(weight)
    _core.scatter(address, floats_at(values), k, wide, floats_at(out), out.numel(), weight, threads())
