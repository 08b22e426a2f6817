"""More that is done with memory that a program's threads share: see ``shared.py``."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["come", "load_byte", "load_four", "load_half", "load_pair", "settle", "store_pair"]


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
def settle(value, ASM: tl.constexpr):
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
