"""Compile Triton's kernels for sm_90 on a machine without a GPU.

The interpreter accepts programs that the compiler rejects; this covers the other half. Within ``compiling()`` a launch
compiles its kernel instead of running it, so its outputs keep their old contents. Each function below returns the PTX
of the kernels that its calls would launch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.code_generator import CodeGenerator
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime import jit

import laconic
import laws
from laconic import kernels
from laconic.codecs import parse
from laconic.collective.reductions.device_codings import coding_of
from laconic.kernels.interface import ChunkCounts, LinearGrid
from laconic.kernels.sections import (
    GROUP,
    Coding,
    coded_max_nbytes,
    num_buckets,
    packed_nbytes,
    positions_max_nbytes,
    symbol_bits,
    symbol_dtype,
)

# Compiling for an absent device uses private parts of Triton, which may change with its version.
SUPPORTED = all(hasattr(jit, name) for name in ("JITFunction", "create_function_from_signature")) and hasattr(
    jit.JITFunction, "_pack_args"
)

H100 = GPUTarget("cuda", 90, 32)


@contextmanager
def compiling() -> Iterator[dict[str, str]]:
    """Compile instead of launching; yields PTX by kernel name and specialization."""
    backend, ptx, run, empty = make_backend(H100), {}, jit.JITFunction.run, torch.empty
    call = CodeGenerator.call_JitFunction

    def compile_only(self, *args, grid, warmup, **kwargs):
        kwargs.setdefault("debug", False)
        bind = jit.create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, options = bind(*args, **kwargs)
        name = f"{self.__name__} {specialization} {options}"
        if name not in ptx:
            options, signature, constants, attributes = self._pack_args(backend, kwargs, bound, specialization, options)
            source = ASTSource(self, signature, constants, attributes)
            ptx[name] = triton.compile(source, target=H100, options=options.__dict__).asm["ptx"]

    def call_as_before_3_7(self, function, *args, **kwargs):
        result = call(self, function, *args, **kwargs)
        returned = result if isinstance(result, triton.language.core.tuple) else [result]
        nones = len(returned) > 1 and any(getattr(each, "value", each) is None for each in returned)
        assert not nones, f"{function.__name__} returns None among others, which Triton before 3.7 does not compile"
        return result

    CodeGenerator.call_JitFunction = call_as_before_3_7
    jit.JITFunction.run = compile_only
    torch.empty = torch.zeros  # memory that no kernel writes must not decide which kernel is launched next
    try:
        yield ptx
    finally:
        jit.JITFunction.run, torch.empty, CodeGenerator.call_JitFunction = run, empty, call


def inexact(ptx: str) -> set[str]:
    """Return the instructions that round otherwise than the reference: fused, approximate, or flushing subnormals."""
    floats = re.findall(r"\b((?:add|sub|mul|div|fma|mad|sqrt|rcp|cvt|max|min)\.[a-z0-9.]*f(?:32|64)[a-z0-9.]*)", ptx)
    inexact_parts = ("ftz", "approx", "full")
    return {name for name in floats if name.startswith(("fma", "mad")) or any(part in name for part in inexact_parts)}


def codec_kernels(spec: str, n: int) -> dict[str, str]:
    """Kernels that encode, decode and accumulate a packet."""
    x, codec = laws.normal(n), laconic.codec(spec)
    packet = codec.encode(x)
    with kernels.use_backend("triton"), compiling() as ptx:
        codec.encode(x)
        codec.decode(packet, out=torch.zeros(n))
        codec.accumulate(packet, torch.zeros(n), 0.5)
    return ptx


def multi_tensor_kernels(spec: str) -> dict[str, str]:
    """Kernels that encode, decode and accumulate many tensors, some of which are to be skipped."""
    from laconic.kernels.triton import backend

    coding, sizes = coding_of(laconic.codec(spec)), (5000, 300)
    tensors, residuals = [torch.zeros(size) for size in sizes], [torch.zeros(size) for size in sizes]
    buffer, counts = torch.zeros(1 << 17, dtype=torch.uint8), torch.zeros(5, dtype=torch.int32)
    first = buffer.data_ptr() // 16 * 16 + 16
    sections = [[first + 8192 * (2 * i + at) for at in range(2)] for i in range(len(coding.section_nbytes(300)))]
    with compiling() as ptx:
        skip = backend.amax_bits_all(tensors)
        backend.amax_bits_all(tensors, only=skip)
        backend.scale_all(residuals, 0.9, skip)
        backend.fill_all(tensors, skip, float("nan"))
        backend.copy_all(tensors, residuals, skip)
        for memory in (None, residuals):
            for skipped in (None, skip):
                coding.encode(tensors, memory, backend, torch.zeros(2, 2, dtype=torch.int32), sections, skipped, counts)
                coding.decode(sections, backend, tensors, None, skipped)
                coding.decode(sections, backend, tensors, 0.5, skipped)
        backend.next_round_keys(*torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int32))
        backend.agreed_clips(
            torch.zeros(8), torch.zeros(6), torch.tensor([0, 5, 6], dtype=torch.int32), 0.5, 7, counts[0], counts[3]
        )
    return ptx


def lowrank_kernels(rank: int) -> dict[str, str]:
    """Kernels of PowerSGD for many matrices."""
    from laconic.kernels.triton.lowrank_all import Matrices

    matrices = Matrices([(40, 24, rank), (1100, 5, min(rank, 5))], rank, torch.device("cpu"))
    tensors, flag = [torch.zeros(40 * 24), torch.zeros(1100 * 5)], torch.zeros(1, dtype=torch.int32)
    places, start = matrices.addresses(tensors), torch.zeros_like(matrices.factor)
    with compiling() as ptx:
        matrices.write_sketch(places, matrices.flags, start)
        matrices.write_basis(flag)
        matrices.write_factor(places)
        matrices.store_products(places, matrices.factor, flag)
        matrices.store_products(places, matrices.factor, flag, places)
        matrices.write_start(start, start)
    return ptx


def adaptive_kernels(levels: int) -> dict[str, str]:
    from laconic.kernels.triton import linear

    grid, x = LinearGrid(1.0, -3.0, levels / 6, levels), torch.zeros(5000)
    packed = torch.zeros(packed_nbytes(5000, symbol_bits(levels)), dtype=torch.uint8)
    with compiling() as ptx:
        linear.histogram(linear.sample(x, 1024, 1), grid)
        linear.grid_symbols(x, grid)
        linear.pack_bins(x, grid, packed)
        linear.table_decode(packed, torch.zeros(levels), x, 0.5)
    return ptx


def sum_kernels(width: int, lane: int) -> dict[str, str]:
    from laconic.kernels.triton import backend

    packed = torch.zeros(packed_nbytes(5000, width), dtype=torch.uint8)
    total = torch.zeros(num_buckets(5000, GROUP) * 32 * lane, dtype=torch.uint8)
    with compiling() as ptx:
        backend.packed_int_accumulate(packed, 5000, width, lane, total)
        backend.packed_int_repack(total, 5000, lane, width, packed)
    return ptx


def selection_kernels(multiprocessors: int) -> dict[str, str]:
    """Kernels that run in phases: one launch per phase, or one launch on so many multiprocessors."""
    from laconic.kernels.triton import grid_sync, launch_cache, linear, randk, rice, scatter, selectors, topk_chunks

    n, k, x = 50_000, 100, torch.zeros(50_000)
    section, seed = torch.zeros(positions_max_nbytes(n, k), dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    count_multiprocessors = grid_sync._multiprocessors
    grid_sync._multiprocessors = lambda device: multiprocessors
    try:
        with compiling() as ptx:
            selectors.topk(x, k, section)
            selectors.above(x, 5)
            for chunk in (64, 4096, 65536):
                topk_chunks.topk_chunks(x, ChunkCounts(chunk, 5, 3))
            randk.randk_encode(x, k, 0, seed)
            rice.rice_encode(torch.zeros(k, dtype=torch.int32), n, section)
            linear.uniform_encode(x, 256, seed, torch.zeros(n, dtype=torch.uint8))
            linear.range_histogram(x, 16, False, 1024, 1)
            for weight in (None, 0.5):
                scatter.decode_and_scatter(section, x[:k], x, weight)
                randk.randk_decode(seed, x[:k], 2.0, x, weight)
    finally:
        grid_sync._multiprocessors = count_multiprocessors
        launch_cache.launches_for.cache_clear()
    return ptx


def huffman_kernels(alphabet: int, n: int) -> dict[str, str]:
    from laconic.kernels.triton import coded_chunks, huffman_decode, huffman_encode

    symbols, section = torch.zeros(n, dtype=symbol_dtype(alphabet)), torch.zeros(coded_max_nbytes(n, alphabet)).byte()
    with compiling() as ptx:
        huffman_encode.encode_section(symbols, alphabet, section)
        coded = huffman_decode.open_section(section, n, alphabet)
        assert coded is not None
        huffman_decode.decode_streams(coded, symbols)
        for weight in (None, 0.5):
            coded_chunks.lookup_values(coded, symbols, 15, torch.zeros(alphabet), torch.zeros(n), weight)
    return ptx


def rans_kernels(alphabet: int, n: int) -> dict[str, str]:
    from laconic.kernels.triton import coded_chunks, huffman_decode

    symbols, section = torch.zeros(n, dtype=symbol_dtype(alphabet)), torch.zeros(coded_max_nbytes(n, alphabet)).byte()
    with compiling() as ptx:
        for coding in (Coding.RANS, Coding.HUFFMAN_AUTO, Coding.RANS_AUTO):
            coded_chunks.encode_chunks(symbols, alphabet, coding, section)
        coded = huffman_decode.open_section(section, n, alphabet)
        assert coded is not None
        coded_chunks.decode_chunks(coded, 15, alphabet, None, symbols, None)
        for modes, weight in ((15, None), (8, None), (15, 0.5)):
            coded_chunks.decode_chunks(coded, modes, alphabet, torch.zeros(alphabet), torch.zeros(n), weight)
    return ptx


def study_kernels(spec: str) -> dict[str, str]:
    """Kernels of the studies' steps and of exchanges that are computed for a codec of gradients."""
    from laconic_lab.studies import fused_norm, fused_steps
    from laconic_lab.studies.kothari2021 import fused

    x, keys, rate = torch.zeros(9000), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(1)
    counts, spans, low = [4500, 4500], [(0, 4500), (4500, 9000)], torch.zeros(3, 2, dtype=torch.int64)
    quantizer = parse(spec)[1].values
    trips = [fused.RoundTrip(counts, quantizer, x.device, coded) for coded in (False, True)]
    gaps = fused.Gaps(spans, counts, low)
    with compiling() as ptx:
        for trip in trips:
            trip(x, keys if spec.startswith("qsgd") and "nearest" not in spec else None)
        gaps.high_sums(torch.zeros(9000, dtype=torch.int64))
        fused_steps.weighted_sum([x] * 3, 1 / 3, x)
        for momentum, decay in ((0.9, 5e-4), (0.0, 0.0)):
            fused_steps.descend(x, x, x, rate, momentum=momentum, decay=decay)
        if spec == "sign":
            norm = torch.nn.BatchNorm2d(64)
            for side, pool in ((32, True), (4, True), (16, False)):
                images = torch.zeros(64, 64, side, side, requires_grad=True)
                copies = [[norm.weight] * 2, [norm.bias] * 2]
                fused_norm.norm_relu(images, [None] * 2, *copies, norm.eps, pool=pool).sum().backward()
    return ptx
