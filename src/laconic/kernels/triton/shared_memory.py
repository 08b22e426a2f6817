"""Shared memory of a program at addresses, through inline PTX: Triton itself cannot address it.

A program declares its buffer once and gets the address. Where PTX is not available, as in Triton's interpreter, the
buffer is a part of global memory and ``ASM`` is empty; the same kernel runs on it.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "SharedBuffer", "atomic_or_shared", "clear16", "commit_fetches", "declare_shared", "fetch16_async", "increment",
    "lane_id", "load", "load2", "load4", "load_symbol", "shift_right64", "store", "store2", "store4_global",
    "store_masked", "sync_warp", "wait_fetched", "wait_fetches",
]  # fmt: skip

_WAIT_0 = tl.constexpr("cp.async.wait_group 0; mov.u32 $0, $1;")
_WAIT_5 = tl.constexpr("cp.async.wait_group 5; mov.u32 $0, $1;")

PTX = os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None


class SharedBuffer:
    """Shared memory of ``nbytes`` per program, as launch arguments."""

    def __init__(self, nbytes: int, programs: int, device: torch.device) -> None:
        self.asm = f".shared .align 16 .b8 laconic_room[{nbytes}]; mov.u32 $0, laconic_room;" if PTX else ""
        self.words = (nbytes + 15) // 16 * 4
        self.memory: Tensor | None = (
            None if PTX else torch.empty(programs * self.words, dtype=torch.int32, device=device)
        )


@triton.jit
def declare_shared(ASM: tl.constexpr):
    """Declare the buffer and return its address. Call it once in a kernel."""
    if ASM == "":
        address = tl.program_id(0) * 0
    else:
        address = tl.inline_asm_elementwise(ASM, "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1)
    return address


@triton.jit
def program_shared(memory, program, WORDS: tl.constexpr, ASM: tl.constexpr):
    """Declare the buffer; return its address and, for the interpreter, the program's words of ``memory``."""
    address = declare_shared(ASM)
    if ASM == "":
        words = memory + program * WORDS
    else:
        words = address  # on a GPU there is no memory, and Triton before 3.7 cannot return None
    return address, words


@triton.jit
def lane_id(index, ASM: tl.constexpr):
    """Return a thread's lane in its warp; for the interpreter any value below 32 will do."""
    if ASM == "":
        lane = index % 32
    else:
        lane = tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r,r", [index], dtype=tl.int32, is_pure=True, pack=1)
    return lane


@triton.jit
def clear16(memory, address, ASM: tl.constexpr):
    """Store 16 zero bytes at an address that is a multiple of 16."""
    if ASM == "":
        for k in tl.static_range(4):
            tl.store(memory + (address >> 2) + k, tl.zeros_like(address))
    else:
        tl.inline_asm_elementwise(
            "st.shared.v4.b32 [$1], {$2, $2, $2, $2}; mov.u32 $0, $2;", "=r,r,r", [address, tl.zeros_like(address)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def load(memory, address, ASM: tl.constexpr):
    if ASM == "":
        value = tl.load(memory + (address >> 2))
    else:
        value = tl.inline_asm_elementwise(
            "ld.shared.b32 $0, [$1];", "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1
        )
    return value


@triton.jit
def store(memory, address, value, ASM: tl.constexpr):
    if ASM == "":
        tl.store(memory + (address >> 2), value)
    else:
        tl.inline_asm_elementwise(
            "st.shared.b32 [$1], $2; mov.u32 $0, $2;", "=r,r,r", [address, value],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def store_masked(memory, address, value, valid, ASM: tl.constexpr):
    if ASM == "":
        tl.store(memory + (address >> 2), value, mask=valid)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.b32 [$1], $2; mov.u32 $0, $3; }", "=r,r,r,r",
            [address, value, valid.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def increment(memory, address, valid, ASM: tl.constexpr):
    """Increment the counters at the valid addresses. A tile must have the program's size, else threads count twice."""
    if ASM == "":
        tl.atomic_add(memory + (address >> 2), tl.zeros_like(address) + 1, mask=valid, sem="relaxed")
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p red.shared.add.u32 [$1], 1; mov.u32 $0, $2; }", "=r,r,r",
            [address, valid.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def atomic_or_shared(memory, address, bits, ASM: tl.constexpr):
    """Atomically OR bits into the word at an address."""
    if ASM == "":
        tl.atomic_or(memory + (address >> 2), bits, mask=bits != 0, sem="relaxed")
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p red.shared.or.b32 [$1], $2; mov.u32 $0, $2; }", "=r,r,r",
            [address, bits], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def store4_global(pointer, a, b, c, d, valid, ASM: tl.constexpr):
    """Store four words to global memory at once, at a multiple of 16 bytes."""
    if ASM == "":
        tl.store(pointer, a, mask=valid)
        tl.store(pointer + 1, b, mask=valid)
        tl.store(pointer + 2, c, mask=valid)
        tl.store(pointer + 3, d, mask=valid)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $6, 0; @p st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.u32 $0, $6; }",
            "=r,l,r,r,r,r,r", [pointer, a, b, c, d, valid.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def shift_right64(low, high, count, ASM: tl.constexpr):
    """Shift 64 bits, given in two halves, right by the lowest 5 bits of ``count``."""
    if ASM == "":
        both = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
        both = both >> (count & 31).to(tl.uint64)
        low, high = both.to(tl.uint32), (both >> 32).to(tl.uint32)
    else:
        low, high = tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $2, $3, $4; shf.r.wrap.b32 $1, $3, 0, $4;", "=&r,=r,r,r,r", [low, high, count],
            dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
    return low, high


@triton.jit
def fetch16_async(memory, address, pointer, byte, begin, end, ASM: tl.constexpr):
    """Copy 16 bytes of global memory into shared memory, asynchronously until ``wait_fetches``.

    Both addresses are multiples of 16; ``byte`` is the offset of ``pointer``. Nothing happens where none of the
    bytes is before ``end``; the others are copied whole, so the caller sees to it that the last block is all in memory.
    """
    if ASM == "":
        offsets = tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        source_bytes = byte[:, None, None] + offsets
        loaded = tl.load(
            pointer[:, None, None] + offsets, mask=(source_bytes >= begin) & (source_bytes < end), other=0
        ).to(tl.int32)
        words = tl.sum(loaded << (8 * tl.arange(0, 4)[None, None, :]), 2)
        tl.store(memory + (address >> 2)[:, None] + tl.arange(0, 4)[None, :], words, mask=(byte < end)[:, None])
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p cp.async.cg.shared.global [$1], [$2], 16; mov.u32 $0, $3; }",
            "=r,r,l,r", [address, pointer, (byte < end).to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def commit_fetches(ASM: tl.constexpr):
    """Close the batch of a thread's copies since the last call."""
    if ASM != "":
        tl.inline_asm_elementwise(
            "cp.async.commit_group; mov.u32 $0, $1;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait_fetches(PENDING: tl.constexpr, ASM: tl.constexpr):
    """Wait for a thread's batches except the latest PENDING ones."""
    if ASM != "":
        tl.static_assert(PENDING == 0 or PENDING == 5)
        wait: tl.constexpr = _WAIT_0 if PENDING == 0 else _WAIT_5
        tl.inline_asm_elementwise(wait, "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load4(memory, address, ASM: tl.constexpr):
    """Load four words from an address that is a multiple of 16."""
    if ASM == "":
        pointer = memory + (address >> 2)
        words = tl.load(pointer), tl.load(pointer + 1), tl.load(pointer + 2), tl.load(pointer + 3)
    else:
        words = tl.inline_asm_elementwise(
            "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [address],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def load_symbol(memory, address, NBYTES: tl.constexpr, ASM: tl.constexpr):
    """Load a symbol of one byte, or of two bytes from an even address."""
    if ASM == "":
        if NBYTES == 1:
            value = tl.load(memory.to(tl.pointer_type(tl.uint8)) + address).to(tl.int32)
        else:
            value = tl.load(memory.to(tl.pointer_type(tl.int16)) + (address >> 1)).to(tl.int32) & 0xFFFF
    else:
        asm: tl.constexpr = "ld.shared.u8 $0, [$1];" if NBYTES == 1 else "ld.shared.u16 $0, [$1];"
        value = tl.inline_asm_elementwise(asm, "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1)
    return value


@triton.jit
def load2(memory, address, ASM: tl.constexpr):
    """Load two words from an address that is a multiple of 8."""
    if ASM == "":
        pointer = memory + (address >> 2)
        words = tl.load(pointer), tl.load(pointer + 1)
    else:
        words = tl.inline_asm_elementwise(
            "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r", [address],
            dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def store2(memory, address, first, second, valid, ASM: tl.constexpr):
    """Store two words at the valid addresses, multiples of 8."""
    if ASM == "":
        pointer = memory + (address >> 2)
        tl.store(pointer, first, mask=valid)
        tl.store(pointer + 1, second, mask=valid)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $4, 0; @p st.shared.v2.b32 [$1], {$2, $3}; mov.u32 $0, $2; }",
            "=r,r,r,r,r", [address, first, second, valid.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def sync_warp(value, ASM: tl.constexpr):
    """Make the stores of the warp's threads visible to all of them; returns ``value``."""
    if ASM != "":
        value = tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.u32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
        )
    return value


@triton.jit
def wait_fetched(WAIT: tl.constexpr, ASM: tl.constexpr):
    """Wait, by the caller's PTX, until the warp's copies are visible to all of its threads."""
    if ASM != "":
        tl.inline_asm_elementwise(WAIT, "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1)
