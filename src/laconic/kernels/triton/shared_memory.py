"""Memory that a program's threads share, through lines of PTX: Triton has no word for it that takes an address.

A program asks for room once and gets its address. Where PTX cannot be had, as in Triton's interpreter, the room is a
part of global memory, and the same kernel runs on that: ``ASM`` is then empty.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "Room",
    "address_of",
    "clear16",
    "come",
    "count_one",
    "drop_bits",
    "fetch16",
    "lane_of",
    "load",
    "load_byte",
    "load_four",
    "load_half",
    "load_pair",
    "put_or",
    "seal",
    "settle",
    "store",
    "store4",
    "store_pair",
    "store_some",
    "sync_warp",
]

_WAIT_0 = tl.constexpr("cp.async.wait_group 0; mov.u32 $0, $1;")
_WAIT_5 = tl.constexpr("cp.async.wait_group 5; mov.u32 $0, $1;")

PTX = os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None


class Room:
    """So many bytes for each program, as a launch hands them over."""

    def __init__(self, nbytes: int, programs: int, device: torch.device) -> None:
        self.asm = f".shared .align 16 .b8 laconic_room[{nbytes}]; mov.u32 $0, laconic_room;" if PTX else ""
        self.words = (nbytes + 15) // 16 * 4
        self.memory: Tensor | None = (
            None if PTX else torch.empty(programs * self.words, dtype=torch.int32, device=device)
        )


@triton.jit
def address_of(ASM: tl.constexpr):
    """Where the room is. To be called once in a kernel: it is also its declaration."""
    if ASM == "":
        found = tl.program_id(0) * 0
    else:
        found = tl.inline_asm_elementwise(ASM, "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1)
    return found


@triton.jit
def lane_of(at, ASM: tl.constexpr):
    """A thread's place in its warp; what the interpreter takes for it is as good."""
    if ASM == "":
        found = at % 32
    else:
        found = tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r,r", [at], dtype=tl.int32, is_pure=True, pack=1)
    return found


@triton.jit
def clear16(memory, address, ASM: tl.constexpr):
    """Zeros from an address that is a multiple of 16."""
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
        found = tl.load(memory + (address >> 2))
    else:
        found = tl.inline_asm_elementwise(
            "ld.shared.b32 $0, [$1];", "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1
        )
    return found


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
def store_some(memory, address, value, there, ASM: tl.constexpr):
    if ASM == "":
        tl.store(memory + (address >> 2), value, mask=there)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.shared.b32 [$1], $2; mov.u32 $0, $3; }", "=r,r,r,r",
            [address, value, there.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def count_one(memory, address, there, ASM: tl.constexpr):
    """One more at each address that is there. A tile must be as large as the program, or some would count twice."""
    if ASM == "":
        tl.atomic_add(memory + (address >> 2), tl.zeros_like(address) + 1, mask=there, sem="relaxed")
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p red.shared.add.u32 [$1], 1; mov.u32 $0, $2; }", "=r,r,r",
            [address, there.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def put_or(memory, address, bits, ASM: tl.constexpr):
    """Bits that are added to those at the address."""
    if ASM == "":
        tl.atomic_or(memory + (address >> 2), bits, mask=bits != 0, sem="relaxed")
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p red.shared.or.b32 [$1], $2; mov.u32 $0, $2; }", "=r,r,r",
            [address, bits], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def store4(pointer, a, b, c, d, there, ASM: tl.constexpr):
    """Four words of global memory at a multiple of 16 bytes, at once."""
    if ASM == "":
        tl.store(pointer, a, mask=there)
        tl.store(pointer + 1, b, mask=there)
        tl.store(pointer + 2, c, mask=there)
        tl.store(pointer + 3, d, mask=there)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $6, 0; @p st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.u32 $0, $6; }",
            "=r,l,r,r,r,r,r", [pointer, a, b, c, d, there.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def drop_bits(low, high, count, ASM: tl.constexpr):
    """64 bits in two halves without their lowest; only the lowest 5 bits of their number count."""
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
def fetch16(memory, address, pointer, byte, begin, end, ASM: tl.constexpr):
    """Sixteen bytes of global memory into the room, underway until ``settle``: of those from ``begin`` to ``end``.

    Both places are multiples of 16; ``byte`` is what is at the pointer. Where none is inside, nothing happens.
    """
    if ASM == "":
        at = tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        bytes_ = byte[:, None, None] + at
        found = tl.load(pointer[:, None, None] + at, mask=(bytes_ >= begin) & (bytes_ < end), other=0).to(tl.int32)
        words = tl.sum(found << (8 * tl.arange(0, 4)[None, None, :]), 2)
        tl.store(memory + (address >> 2)[:, None] + tl.arange(0, 4)[None, :], words, mask=(byte < end)[:, None])
    else:
        # Aligned blocks of which a byte is allocated are so as a whole.
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p cp.async.cg.shared.global [$1], [$2], 16; mov.u32 $0, $3; }",
            "=r,r,l,r", [address, pointer, (byte < end).to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def seal(ASM: tl.constexpr):
    """What a thread has fetched since it last said so becomes one batch."""
    if ASM != "":
        tl.inline_asm_elementwise(
            "cp.async.commit_group; mov.u32 $0, $1;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def settle(PENDING: tl.constexpr, ASM: tl.constexpr):
    """Waits for a thread's batches but for so many, the latest ones."""
    if ASM != "":
        tl.static_assert(PENDING == 0 or PENDING == 5)
        wait: tl.constexpr = _WAIT_0 if PENDING == 0 else _WAIT_5
        tl.inline_asm_elementwise(wait, "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_four(memory, address, ASM: tl.constexpr):
    """Four words from an address that is a multiple of 16."""
    if ASM == "":
        at = memory + (address >> 2)
        found = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        found = tl.inline_asm_elementwise(
            "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [address],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    return found


@triton.jit
def load_byte(memory, address, ASM: tl.constexpr):
    """Eight bits."""
    if ASM == "":
        found = tl.load(memory.to(tl.pointer_type(tl.uint8)) + address).to(tl.int32)
    else:
        found = tl.inline_asm_elementwise(
            "ld.shared.u8 $0, [$1];", "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1
        )
    return found


@triton.jit
def load_half(memory, address, ASM: tl.constexpr):
    """Sixteen bits from an even address."""
    if ASM == "":
        found = tl.load(memory.to(tl.pointer_type(tl.int16)) + (address >> 1)).to(tl.int32) & 0xFFFF
    else:
        found = tl.inline_asm_elementwise(
            "ld.shared.u16 $0, [$1];", "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1
        )
    return found


@triton.jit
def load_pair(memory, address, ASM: tl.constexpr):
    """Two words from an address that is a multiple of 8."""
    if ASM == "":
        at = memory + (address >> 2)
        found = tl.load(at), tl.load(at + 1)
    else:
        found = tl.inline_asm_elementwise(
            "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r", [address],
            dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    return found


@triton.jit
def store_pair(memory, address, first, second, there, ASM: tl.constexpr):
    """Two words to an address that is a multiple of 8, for others of the warp, where they are there."""
    if ASM == "":
        at = memory + (address >> 2)
        tl.store(at, first, mask=there)
        tl.store(at + 1, second, mask=there)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $4, 0; @p st.shared.v2.b32 [$1], {$2, $3}; mov.u32 $0, $2; }",
            "=r,r,r,r,r", [address, first, second, there.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def sync_warp(value, ASM: tl.constexpr):
    """What the warp's threads have stored is there for all of them; gives the value."""
    if ASM != "":
        value = tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.u32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
        )
    return value


@triton.jit
def come(WAIT: tl.constexpr, ASM: tl.constexpr):
    """Waits, in PTX of the caller's, until what the warp has fetched is there for all of its threads."""
    if ASM != "":
        tl.inline_asm_elementwise(WAIT, "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1)
