"""Kernels for GPUs, as far as a machine can show: interpreted and compiled on any, run where there is a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import laws

HERE = Path(__file__).resolve().parent


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: no GPU kernel is tested here")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run(*options: str, interpreted: bool) -> str:
    """Whether Triton interprets is settled when it is imported: hence a process of its own."""
    env = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTEST_XDIST_WORKER")}
    if interpreted:
        env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider",
               "-o", "python_files=*on_triton.py", *map(str, sorted(HERE.glob("*on_triton.py"))), *options]  # fmt: skip
    done = subprocess.run(command, env=env, cwd=HERE.parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@needs_triton
def test_interpreted_kernels_give_the_bytes_of_the_reference():
    assert " passed" in run("-m", "not slow", interpreted=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs_triton
def test_interpreted_kernels_give_the_bytes_of_the_reference_for_all_sizes_and_values():
    assert " passed" in run("-m", "slow", interpreted=True)


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@needs_triton
@needs_gpu
def test_compiled_kernels_give_the_bytes_of_the_reference():
    assert " passed" in run("-m", "not slow", interpreted=False)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs_triton
@needs_gpu
def test_compiled_kernels_give_the_bytes_of_the_reference_for_all_sizes_and_values():
    assert " passed" in run("-m", "slow", interpreted=False)


def compiled(*cases: tuple[str, int]) -> int:
    """How many kernels were compiled; each must keep to the roundings of the reference."""
    import offline

    if not offline.KNOWN:
        pytest.skip("this version of Triton cannot be made to compile without a GPU: no PTX is looked at")
    count = 0
    for spec, n in cases:
        for name, ptx in offline.compile_codec(spec, n).items():
            assert ".entry" in ptx and not offline.inexact(ptx), (spec, n, name, offline.inexact(ptx))
            count += 1
    return count


@needs_triton
def test_kernels_compile_for_a_gpu_that_is_not_here():
    assert compiled(("qsgd:4", 5000)) == 4


LAUNCHED = [
    spec
    for spec in laws.QUANTIZERS + laws.PACKED_INTS + laws.CASTS + ("threshold:0.5", "randk:0.1", "union", "powersgd:2")
    if spec != "none"
]
"""What needs no answer of a kernel to launch the next one, as ``topk`` and ``adaptive`` do."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_triton
@pytest.mark.parametrize("n", [1, 8192, 5000])
@pytest.mark.parametrize("spec", LAUNCHED)
def test_all_kernels_compile_for_a_gpu_that_is_not_here(spec, n):
    assert compiled((spec, n)) or n == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_triton
@pytest.mark.parametrize("levels", [17, 300])
def test_kernels_of_adaptive_compile_for_a_gpu_that_is_not_here(levels):
    import offline

    from laconic.kernels.interface import LinearGrid, packed_nbytes, symbol_bits
    from laconic.kernels.triton import linear

    if not offline.KNOWN:
        pytest.skip("this version of Triton cannot be made to compile without a GPU: no PTX is looked at")
    grid, x = LinearGrid(1.0, -3.0, levels / 6, levels), torch.zeros(5000)
    packed = torch.zeros(packed_nbytes(5000, symbol_bits(levels)), dtype=torch.uint8)
    with offline.compiling() as made:
        linear.histogram(linear.sample(x, 1024, 1), grid)
        linear.grid_symbols(x, grid)
        linear.pack_bins(x, grid, packed)
        linear.table_decode(packed, torch.zeros(levels), x, 0.5)
    assert len(made) == 6 and not any(map(offline.inexact, made.values()))


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("width, lane", [(4, 8), (3, 16), (4, 32)])
def test_kernels_of_sums_compile_for_a_gpu_that_is_not_here(width, lane):
    import offline

    from laconic.kernels.interface import GROUP, num_buckets, packed_nbytes
    from laconic.kernels.triton import packed_ints

    if not offline.KNOWN:
        pytest.skip("this version of Triton cannot be made to compile without a GPU: no PTX is looked at")
    packed = torch.zeros(packed_nbytes(5000, width), dtype=torch.uint8)
    total = torch.zeros(num_buckets(5000, GROUP) * 32 * lane, dtype=torch.uint8)
    with offline.compiling() as made:
        packed_ints.packed_int_accumulate(packed, 5000, width, lane, total)
        packed_ints.packed_int_repack(total, 5000, lane, width, packed)
    assert len(made) >= 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_triton
@pytest.mark.parametrize("programs", [0, 132], ids=["phase by phase", "all in one"])
def test_kernels_of_selection_compile_for_a_gpu_that_is_not_here(programs, monkeypatch):
    import offline

    from laconic.kernels.interface import positions_max_nbytes
    from laconic.kernels.triton import grid_sync, linear, randk, rice, scatter, selectors

    if not offline.KNOWN:
        pytest.skip("this version of Triton cannot be made to compile without a GPU: no PTX is looked at")
    monkeypatch.setattr(grid_sync, "_multiprocessors", lambda device: programs)
    n, k, x = 50_000, 100, torch.zeros(50_000)
    section, seed = torch.zeros(positions_max_nbytes(n, k), dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    with offline.compiling() as made:
        selectors.topk(x, k, section)
        selectors.above(x, 5)
        randk.randk_encode(x, k, 0, seed)
        rice.code(torch.zeros(k, dtype=torch.int32), n, section)
        linear.uniform_encode(x, 256, seed, torch.zeros(n, dtype=torch.uint8))
        linear.range_histogram(x, 16, False, 1024, 1)
        for weight in (None, 0.5):
            scatter.place(section, x[:k], x, weight)
            randk.randk_decode(seed, x[:k], 2.0, x, weight)
    names = [name.split()[0] for name in made]
    assert {"_settle", "_write", "_phases", "_above", "_uniform_encode", "_range_histogram"} <= set(names)
    assert names.count("_phases") == 7 if programs else names.count("_phases") > 30
    assert not any(map(offline.inexact, made.values()))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_triton
@pytest.mark.parametrize("alphabet, n", [(2, 1), (92, 600_000), (300, 70_000), (4096, 3000)])
def test_kernels_of_huffmans_code_compile_for_a_gpu_that_is_not_here(alphabet, n):
    import offline

    from laconic.kernels.interface import coded_max_nbytes, symbol_dtype
    from laconic.kernels.triton import huffman_decode, huffman_encode

    if not offline.KNOWN:
        pytest.skip("this version of Triton cannot be made to compile without a GPU: no PTX is looked at")
    symbols, room = torch.zeros(n, dtype=symbol_dtype(alphabet)), torch.zeros(coded_max_nbytes(n, alphabet)).byte()
    with offline.compiling() as made:
        huffman_encode.huffman_write(symbols, alphabet, room)
        opened = huffman_decode.open_section(room, n, alphabet)
        assert opened is not None
        huffman_decode.read_streams(opened, symbols)
        for weight in (None, 0.5):
            huffman_decode.look_up(opened, symbols, 15, torch.zeros(alphabet), torch.zeros(n), weight)
    assert len(made) in (7, 8) and not any(map(offline.inexact, made.values()))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_triton
@pytest.mark.parametrize("alphabet, n", [(2, 1), (92, 600_000), (300, 70_000), (4096, 3000)])
def test_kernels_of_rans_and_of_modes_compile_for_a_gpu_that_is_not_here(alphabet, n):
    import offline

    from laconic.kernels.interface import Coding, coded_max_nbytes, symbol_dtype
    from laconic.kernels.triton import coded_chunks, huffman_decode

    if not offline.KNOWN:
        pytest.skip("this version of Triton cannot be made to compile without a GPU: no PTX is looked at")
    symbols, room = torch.zeros(n, dtype=symbol_dtype(alphabet)), torch.zeros(coded_max_nbytes(n, alphabet)).byte()
    with offline.compiling() as made:
        for coding in (Coding.RANS, Coding.HUFFMAN_AUTO, Coding.RANS_AUTO):
            coded_chunks.write(symbols, alphabet, coding, room)
        opened = huffman_decode.open_section(room, n, alphabet)
        assert opened is not None
        coded_chunks.read(opened, 15, alphabet, None, symbols, None)
        for occurring, weight in ((15, None), (8, None), (15, 0.5)):
            coded_chunks.read(opened, occurring, alphabet, torch.zeros(alphabet), torch.zeros(n), weight)
    names = {name.split()[0] for name in made}
    assert {"plan_shares", "write_lanes", "_move", "read_shares", "deal_slots", "read_lanes", "_read_raw"} <= names
    assert not any(map(offline.inexact, made.values()))
    assert "vote.sync.ballot" in "".join(made.values()) and "ld.shared" in "".join(made.values())
