"""Triton's kernels compile for a GPU that is not present, and round as the reference does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

import laws

pytest.importorskip("triton", reason="no triton")
import triton_compile

pytestmark = pytest.mark.skipif(not triton_compile.SUPPORTED, reason="no GPU-less compiler in this triton")

CODINGS = pytest.mark.parametrize("alphabet, n", [(2, 1), (92, 600_000), (300, 70_000), (4096, 3000)])

Compile = Callable[..., dict[str, str]]


@pytest.fixture(scope="module")
def compile_kernels() -> Iterator[Compile]:
    """Compile in a process of its own: in this one Triton may have been imported as an interpreter."""
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        patch.setenv("TRITON_INTERPRET", "0")
        process.submit(os.getpid).result()  # starts the process with that environment

        def compile_kernels(kernels: Compile, *args: object) -> dict[str, str]:
            ptx = process.submit(kernels, *args).result()
            for name, text in ptx.items():
                assert ".entry" in text and not triton_compile.inexact(text), (name, triton_compile.inexact(text))
            return ptx

        yield compile_kernels


def kernel_names(ptx: dict[str, str]) -> list[str]:
    return [name.split()[0] for name in ptx]


def test_qsgd_kernels_compile(compile_kernels):
    assert len(compile_kernels(triton_compile.codec_kernels, "qsgd:4", 5000)) == 4


def test_kernels_with_shared_memory_compile(compile_kernels):
    """They returned None beside the address of their memory, which compiles since Triton 3.7 only."""
    assert len(compile_kernels(triton_compile.huffman_kernels, 2, 1)) in (7, 8)


LAUNCHED = [
    spec
    for spec in laws.QUANTIZERS + laws.PACKED_INTS + laws.CASTS + ("threshold:0.5", "randk:0.1", "union", "powersgd:2")
    if spec != "none"
]
"""Codecs that launch all kernels without reading a result in between, as ``topk`` and ``adaptive`` do."""

FEW = ("qsgd:4", "sign", "terngrad", "thc:4", "fp16")
"""Codecs whose kernels are also compiled for sizes that are not divisible by 16."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "spec, n", [*((spec, 8192) for spec in LAUNCHED), *((spec, n) for spec in FEW for n in (1, 5000))]
)
def test_kernels_of_every_codec_compile(spec, n, compile_kernels):
    assert compile_kernels(triton_compile.codec_kernels, spec, n) or n == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "spec", ["qsgd:4", "qsgd:8,bucket=128", "sign", "onebit", "bins:2", "fp16", "bf16", "topk:0.1", "topk:0.1|qsgd:4"]
)
def test_multi_tensor_kernels_compile(spec, compile_kernels):
    names = kernel_names(compile_kernels(triton_compile.multi_tensor_kernels, spec))
    assert {"_largest", "_scale", "_fill", "_copy", "_agreed_clips"} <= set(names)
    selects = {"_write", "_write_positions", "_scatter"} <= set(names)
    assert selects == ("topk" in spec) and ("16" not in spec) == ("_pack_tails" in names or spec == "topk:0.1")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rank", [1, 4])
def test_lowrank_kernels_compile(rank, compile_kernels):
    names = kernel_names(compile_kernels(triton_compile.lowrank_kernels, rank))
    assert set(names) == {"_sketch", "_orthonormal", "_factor", "_product", "_unit_rows"} and len(names) == 6


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("levels", [17, 300])
def test_adaptive_kernels_compile(levels, compile_kernels):
    assert len(compile_kernels(triton_compile.adaptive_kernels, levels)) == 6


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("spec", ["qsgd:4,norm=l2", "qsgd:8,bucket=0,norm=l2", "qsgd:4,round=nearest", "sign"])
def test_kernels_of_the_studies_compile(spec, compile_kernels):
    names = set(kernel_names(compile_kernels(triton_compile.study_kernels, spec)))
    round_trip = "_sign_round_trip" if spec == "sign" else "_qsgd_round_trip"
    assert {round_trip, "_high_sums", "_weighted_sum", "_descend"} <= names
    assert ("_square_sums" in names) == ("bucket=0" in spec)
    assert ("_backward_sums" in names) == (spec == "sign")


@pytest.mark.slow
@pytest.mark.parametrize("width, lane", [(4, 8), (3, 16), (4, 32)])
def test_sum_kernels_compile(width, lane, compile_kernels):
    assert len(compile_kernels(triton_compile.sum_kernels, width, lane)) >= 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("multiprocessors", [0, 132], ids=["launch per phase", "one launch"])
def test_selection_kernels_compile(multiprocessors, compile_kernels):
    names = kernel_names(compile_kernels(triton_compile.selection_kernels, multiprocessors))
    assert {"_settle", "_write", "_above", "_uniform_encode", "_range_histogram"} <= set(names)
    phases = sum(name.endswith("_phases") for name in names)
    assert phases == 7 if multiprocessors else phases > 30


@pytest.mark.slow
@pytest.mark.timeout(1200)
@CODINGS
def test_huffman_kernels_compile(alphabet, n, compile_kernels):
    assert len(compile_kernels(triton_compile.huffman_kernels, alphabet, n)) in (7, 8)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@CODINGS
def test_rans_kernels_compile(alphabet, n, compile_kernels):
    ptx = compile_kernels(triton_compile.rans_kernels, alphabet, n)
    names = {
        "build_frequency_tables", "rans_encode", "_copy_chunks", "read_frequency_tables", "build_slot_tables",
        "rans_decode", "_decode_raw",
    }  # fmt: skip
    assert names <= set(kernel_names(ptx))
    assert "vote.sync.ballot" in "".join(ptx.values()) and "ld.shared" in "".join(ptx.values())
