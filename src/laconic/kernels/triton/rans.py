"""rANS on a GPU: a warp for each chunk and a lane for each of its states, row after row of symbols.

As with Huffman's code, all chunks of a large tensor are under way at once, and what counts is how many cycles a row
takes. A writer's symbols are known beforehand, so all it looks up for them is called for in time; a reader cannot but
wait twice a row, for its slots and for its words, which hence lie in the nearest cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.interface import CHUNK, RANS
from laconic.kernels.triton.shares import NEVER, chunk_lanes

__all__ = ["GROUP_ROWS", "LANES", "read_lanes", "write_lanes"]

_CHUNK = tl.constexpr(CHUNK)
_RANS = tl.constexpr(RANS)
_LOW = tl.constexpr(1 << 15)
LANES = tl.constexpr(32)
GROUP_ROWS = tl.constexpr(8)
"""Rows between two looks at the loop."""
AHEAD = tl.constexpr(256)
"""Words of 4 bytes from a reader's place to those that it calls into the cache."""


@triton.jit
def _rank(raised, below, WARP: tl.constexpr):
    """How many lanes below raise a flag (0 or 1), and how many do in all. WARP: by a vote, else by a sum."""
    if WARP:
        vote = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }", "=r,r", [raised],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        before = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [vote & below], tl.int32, True, 1)
        total = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [vote], tl.int32, True, 1)
    else:
        before = tl.cumsum(raised, 0) - raised
        total = before * 0 + tl.sum(raised, 0)
    return before, total


# --------------------------------------------------------------------------------------------------------- writing


@triton.jit
def _symbols(symbols, group, lanes, lane, here):
    """The symbols of a group of rows."""
    found = ()
    for k in tl.static_range(GROUP_ROWS):
        at = (group * GROUP_ROWS + k) * lanes + lane
        there = (lane < lanes) & (at >= 0) & (at < here)
        found = found + (tl.load(symbols + at, mask=there, other=0).to(tl.int32),)
    return found


@triton.jit
def _entries(table, found):
    entries = ()
    for k in tl.static_range(GROUP_ROWS):
        entries = entries + (tl.load(table + found[k]),)
    return entries


@triton.jit
def _limits(table, found, group, lanes, lane, here):
    """The least states that give a word away; none does where there is no symbol."""
    limits = ()
    for k in tl.static_range(GROUP_ROWS):
        at = (group * GROUP_ROWS + k) * lanes + lane
        limits = limits + (tl.where((lane < lanes) & (at < here), tl.load(table + found[k]), NEVER),)
    return limits


@triton.jit
def _push(x, entry, limit, end, below, words, WARP: tl.constexpr):
    """A symbol onto each state; the words that overflow are put before ``end``."""
    gives = (x | 15) >= limit
    before, total = _rank(gives.to(tl.int32), below, WARP)
    end -= total
    tl.store(words + end + before, x.to(tl.int16), mask=gives)
    x = tl.where(gives, x >> 16, x)
    low = entry.to(tl.int32)
    reciprocal = (entry >> 32).to(tl.uint32)
    quotient = tl.umulhi(x.to(tl.uint32), reciprocal) >> (limit & 15).to(tl.uint32)
    pushed = quotient.to(tl.int32) * (low & 0xFFFF) + x + ((low >> 16) & 0xFFFF)
    return tl.where(limit == NEVER, x, pushed), end


@triton.jit(do_not_specialize=["n", "room"])
def write_lanes(symbols, entries, limits, plans, words, states, sizes, n, room, BINS: tl.constexpr, WARP: tl.constexpr):
    """The words of each chunk to the end of its room, and how many bytes it has."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    if tl.load(plans + 4 * wide) == _RANS:
        here = tl.minimum(n - wide * _CHUNK, _CHUNK).to(tl.int32)
        lanes = chunk_lanes(here)
        lane = tl.arange(0, LANES)
        below = (tl.full((LANES,), 1, tl.int32) << lane) - 1
        symbols += wide * _CHUNK
        entries += wide * BINS
        limits += wide * BINS
        words += wide * room
        group = (here + lanes * GROUP_ROWS - 1) // (lanes * GROUP_ROWS) - 1
        x = tl.full((LANES,), _LOW, tl.int32)
        end = tl.zeros((LANES,), tl.int32) + room
        found = _symbols(symbols, group, lanes, lane, here)
        entry = _entries(entries, found)
        limit = _limits(limits, found, group, lanes, lane, here)
        found = _symbols(symbols, group - 1, lanes, lane, here)
        ahead = _symbols(symbols, group - 2, lanes, lane, here)
        while group >= 0:
            # All loads first: behind a store, the compiler would not dare to.
            next_entry = _entries(entries, found)
            next_limit = _limits(limits, found, group - 1, lanes, lane, here)
            found = ahead
            ahead = _symbols(symbols, group - 3, lanes, lane, here)
            for k in tl.static_range(GROUP_ROWS):
                x, end = _push(x, entry[GROUP_ROWS - 1 - k], limit[GROUP_ROWS - 1 - k], end, below, words, WARP)
            entry = next_entry
            limit = next_limit
            group -= 1
        tl.store(states + wide * LANES + lane, x)
        left = tl.max(end, 0)
        tl.store(plans + 4 * wide + 3, left)
        size = 2 + tl.load(plans + 4 * wide + 2) + 4 * lanes + 2 * (room - left)
        tl.store(sizes + wide, size.to(tl.int64))


# --------------------------------------------------------------------------------------------------------- reading


@triton.jit
def _pop_rows(x, place, slots, scale, words, count, below, out, there, lanes, WARP: tl.constexpr, EDGE: tl.constexpr):
    """A group of rows off the states. ``there`` says how many of a lane's symbols are left, where it is the EDGE."""
    for k in tl.static_range(GROUP_ROWS):
        entry = tl.load(slots + (x & ((1 << scale) - 1)))
        step = entry.to(tl.int32)
        value = (entry >> 32).to(tl.int32)
        popped = (step & 0xFFFF) * (x >> scale) + ((step >> 16) & 0xFFFF)
        if EDGE:
            valid = there > k
        else:
            valid = there > 0
        takes = (popped < _LOW) & valid
        before, total = _rank(takes.to(tl.int32), below, WARP)
        at = place + before
        inside = takes & (at < count)
        word = tl.load(words + 2 * at, mask=inside, other=0).to(tl.int32)
        word |= tl.load(words + 2 * at + 1, mask=inside, other=0).to(tl.int32) << 8
        place += total
        popped = tl.where(takes, (popped << 16) | word, popped)
        if EDGE:
            x = tl.where(valid, popped, x)
        else:
            x = popped
        if out.dtype.element_ty == tl.float32:
            tl.store(out + k * lanes + tl.arange(0, LANES), value.to(tl.float32, bitcast=True), mask=valid)
        else:
            tl.store(out + k * lanes + tl.arange(0, LANES), value.to(out.dtype.element_ty), mask=valid)
    return x, place


@triton.jit(do_not_specialize=["n", "whole"])
def read_lanes(section, words, whole, bounds, plans, slots, out, traces, verdict, n, WARP: tl.constexpr):
    """Symbols, or what they stand for, to where they belong; the verdict on words and states."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    if tl.load(plans + 8 * wide) == _RANS:
        here = tl.minimum(n - wide * _CHUNK, _CHUNK).to(tl.int32)
        lanes = chunk_lanes(here)
        scale = tl.load(plans + 8 * wide + 1)
        begin = tl.load(bounds + chunk) + tl.load(plans + 8 * wide + 2)
        count = tl.load(plans + 8 * wide + 3)
        lane = tl.arange(0, LANES)
        busy = lane < lanes
        below = (tl.full((LANES,), 1, tl.int32) << lane) - 1
        slots += wide * 32768
        out += wide * _CHUNK
        x = tl.zeros((LANES,), tl.int32)
        for k in tl.static_range(4):
            x |= tl.load(section + begin + 4 * lane + k, mask=busy, other=0).to(tl.int32) << (8 * k)
        wrong = busy & (x < _LOW)
        x = tl.where(busy & (wrong == 0), x, _LOW)
        begin += 4 * lanes
        section += begin
        words += begin >> 2
        whole = tl.minimum(whole - (begin >> 2), 1 << 30).to(tl.int32)
        place = tl.zeros((LANES,), tl.int32)
        there = tl.where(busy, 1, 0)
        trace = tl.zeros((LANES,), tl.int32)
        ahead = trace
        further = trace
        done = here * 0
        while done + GROUP_ROWS * lanes <= here:
            trace = trace ^ ahead ^ further
            to = (place >> 1) + AHEAD + lane
            ahead = tl.load(words + to, mask=to < whole, other=0)
            further = tl.load(words + to + LANES, mask=to + LANES < whole, other=0)
            x, place = _pop_rows(x, place, slots, scale, section, count, below, out + done, there, lanes, WARP, False)
            done += GROUP_ROWS * lanes
        there = tl.where(busy, (here - done - lane + lanes - 1) // lanes, 0)
        x, place = _pop_rows(x, place, slots, scale, section, count, below, out + done, there, lanes, WARP, True)
        wrong = wrong | (busy & (x != _LOW)) | (place != count)
        tl.atomic_or(verdict, 1, mask=tl.max(wrong.to(tl.int32), 0) > 0, sem="relaxed")
        # Else the compiler would see that nobody needs what is called into the cache.
        tl.store(traces + wide * LANES + lane, trace ^ ahead ^ further)
