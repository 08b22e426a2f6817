"""rANS on a GPU: a warp for each chunk and a lane for each of its states, row after row of symbols.

As with Huffman's code, all chunks of a large tensor are under way at once, and what counts is how many cycles a row
takes. A writer's symbols are known beforehand, so all it looks up for them is called for in time; a reader cannot but
wait twice a row, for its slots and for its words, which hence lie in the nearest cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.sections import CHUNK, RANS
from laconic.kernels.triton import shared_memory
from laconic.kernels.triton.rans_tables import chunk_lanes
from laconic.kernels.triton.shared_memory import come, load_byte, load_four, load_half, load_pair, store_pair, sync_warp

__all__ = ["LANES", "NEAR_BINS", "NEAR_NBYTES", "read_lanes", "write_lanes", "write_near_nbytes"]

_CHUNK = tl.constexpr(CHUNK)
_RANS = tl.constexpr(RANS)
_LOW = tl.constexpr(1 << 15)
LANES = tl.constexpr(32)
GROUP_ROWS = tl.constexpr(8)
"""Rows between two looks at the loop."""
CALLED = tl.constexpr(8)
"""Groups of symbols that a writer has near, or is waiting for."""
_HAVE_COME = tl.constexpr(f"cp.async.wait_group {CALLED.value - 2}; bar.warp.sync 0xffffffff; mov.u32 $0, $1;")
NEAR_BINS = 1024
"""Symbols that a writer's table may have to be near."""


def write_near_nbytes(bins: int, symbol: int) -> int:
    """Of a writer: symbols, and what is to be done with them."""
    return int(CALLED.value * GROUP_ROWS.value * LANES.value * symbol) + (16 * bins if bins <= NEAR_BINS else 0)


_TAKEN = tl.constexpr(GROUP_ROWS.value * LANES.value)
"""Words of 16 bits that a group can take."""
_RING = tl.constexpr(4 * _TAKEN.value)
"""Words that a reader has near, in four bytes each; the first are there twice, so that no group comes to the end."""
VALUES_AT = tl.constexpr(4 * (_RING.value + _TAKEN.value))
SLOTS_AT = tl.constexpr(VALUES_AT.value + 4 * 256)
NEAR_NBYTES = SLOTS_AT.value + 8 * 4096
"""Of a reader: a ring of words, values by symbol, slots of scale 12."""


@triton.jit
def _vote(raised):
    """A bit for each lane that raises a flag (0 or 1)."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }", "=r,r", [raised],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _behind(place, raised, below, ASM: tl.constexpr):
    """Where a lane finds its word, behind those of the lanes below that raise a flag, from ``place`` on; and the end.

    By a vote of the warp, where it has one.
    """
    if ASM != "":
        # The first count is waited for: the other one, which takes the same unit, comes behind it by what is always 0.
        own, end = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            popc.b32 a, $3; mad.lo.s32 $0, a, 4, $4;
            and.b32 b, a, 64; or.b32 b, b, $2; popc.b32 b, b; mad.lo.s32 $1, b, 4, $4;
            }""", "=&r,=&r,r,r,r", [_vote(raised), _vote(raised) & below, place],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        own = place + 4 * (tl.cumsum(raised, 0) - raised)
        end = place + 4 * tl.sum(raised, 0)
    return own, end


@triton.jit
def _rank(raised, below, ASM: tl.constexpr):
    """How many lanes below raise a flag, and how many do in all."""
    if ASM != "":
        vote = _vote(raised)
        before = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [vote & below], tl.int32, True, 1)
        total = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [vote], tl.int32, True, 1)
    else:
        before = tl.cumsum(raised, 0) - raised
        total = before * 0 + tl.sum(raised, 0)
    return before, total


# --------------------------------------------------------------------------------------------------------- writing


@triton.jit
def _call(symbols, memory, ring, group, span, SYMBOL: tl.constexpr, ASM: tl.constexpr):
    """Calls for the symbols of a group, if there is such a group, to their part of the ring."""
    byte = 16 * tl.arange(0, LANES)
    end = tl.where(group >= 0, span * SYMBOL, 0)
    part = (group & (CALLED - 1)) * (GROUP_ROWS * LANES * SYMBOL)
    source = symbols.to(tl.pointer_type(tl.uint8)) + group * (span * SYMBOL) + byte
    shared_memory.fetch16(memory, ring + part + byte, source, byte, 0, end, ASM)
    shared_memory.seal(ASM)


@triton.jit
def _entry(table, memory, room, symbol, NEAR: tl.constexpr, ASM: tl.constexpr):
    """What is to be done with a state to push a symbol."""
    if NEAR:
        return load_four(memory, room + 16 * symbol, ASM)
    at = table + 4 * symbol
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def _entries(
    table, memory, room, ring, group, lane,
    STRIDE: tl.constexpr, SYMBOL: tl.constexpr, NEAR: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Those of a group, whose symbols have come."""
    at = ring + (group & (CALLED - 1)) * (GROUP_ROWS * LANES * SYMBOL) + (lane % STRIDE) * SYMBOL
    entries = ()
    for k in tl.static_range(GROUP_ROWS):
        if SYMBOL == 1:
            symbol = load_byte(memory, at + k * STRIDE, ASM)
        else:
            symbol = load_half(memory, at + 2 * k * STRIDE, ASM)
        entries = entries + (_entry(table, memory, room, symbol, NEAR, ASM),)  # type: ignore[assignment]
    return entries


@triton.jit
def _push(x, entry, there, EDGE: tl.constexpr):
    """A symbol onto each state; and which states gave their lower half away before."""
    gives = x >= entry[2]
    if EDGE:
        gives = gives & there
    rest = tl.where(gives, x >> 16, x)
    reciprocal = entry[1].to(tl.uint32, bitcast=True)
    quotient = (tl.umulhi(rest.to(tl.uint32), reciprocal) >> entry[3].to(tl.uint32)).to(tl.int32)
    pushed = quotient * (entry[0] & 0xFFFF) + rest + ((entry[0] >> 16) & 0xFFFF)
    if EDGE:
        pushed = tl.where(there, pushed, x)
    return pushed, gives.to(tl.int32)


@triton.jit
def _put(words, x, gives, below, ASM: tl.constexpr):
    """Halves that were given away, in the order of their lanes, before ``words``."""
    before, total = _rank(gives, below, ASM)
    words -= total
    tl.store(words + before, x.to(tl.int16), mask=gives == 1)
    return words


@triton.jit
def _push_all(
    symbols, table, memory, room, ring, words, here,
    STRIDE: tl.constexpr, SYMBOL: tl.constexpr, NEAR: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """States of a chunk of so many lanes, and its first word, from where it ends; idle lanes follow the others."""
    lane = tl.arange(0, LANES)
    below = (tl.full((LANES,), 1, tl.int32) << lane) - 1
    busy = (lane < STRIDE).to(tl.int32)
    x = tl.full((LANES,), _LOW, tl.int32)
    words += tl.zeros((LANES,), tl.int32)
    span: tl.constexpr = GROUP_ROWS * STRIDE
    group = (here - 1) // span
    for k in tl.static_range(1, CALLED):  # all but the last are full
        _call(symbols, memory, ring, group - k, span, SYMBOL, ASM)
    at = group * span + lane
    for k in tl.static_range(GROUP_ROWS - 1, -1, -1):
        there = (busy == 1) & (at + k * STRIDE < here)
        symbol = tl.load(symbols + at + k * STRIDE, mask=there, other=0).to(tl.int32)
        pushed, gives = _push(x, _entry(table, memory, room, symbol, NEAR, ASM), there, True)
        words = _put(words, x, gives, below, ASM)
        x = pushed
    if group > 0:
        group -= 1
        come(_HAVE_COME, ASM)
        entries = _entries(table, memory, room, ring, group, lane, STRIDE, SYMBOL, NEAR, ASM)
        while group >= 0:
            if STRIDE < LANES:
                busy = sync_warp(busy, ASM)  # as for readers
            # A group is looked up while the one behind it is pushed; all loads first, for they do not pass a store.
            _call(symbols, memory, ring, group - (CALLED - 1), span, SYMBOL, ASM)
            come(_HAVE_COME, ASM)
            before = tl.maximum(group - 1, 0)
            following = _entries(table, memory, room, ring, before, lane, STRIDE, SYMBOL, NEAR, ASM)
            # States do not wait for the stores of words either, which hence come behind all of them.
            given = ()
            for k in tl.static_range(GROUP_ROWS - 1, -1, -1):
                pushed, gives = _push(x, entries[k], busy == 1, STRIDE < LANES)
                given = given + ((x, gives),)  # type: ignore[assignment]
                x = pushed
            for k in tl.static_range(GROUP_ROWS):
                words = _put(words, given[k][0], given[k][1], below, ASM)
            entries = following
            group -= 1
    return x, words


@triton.jit(do_not_specialize=["n", "room"])
def write_lanes(
    symbols, table, memory, plans, words, states, sizes, n, room,
    BINS: tl.constexpr, SYMBOL: tl.constexpr, NEAR: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The words of each chunk to the end of its room, and how many bytes it has. Symbols lie at a multiple of 16."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    ring = shared_memory.address_of(ASM)
    near = ring + CALLED * GROUP_ROWS * LANES * SYMBOL
    if ASM == "":
        memory += wide * (near // 4 + 4 * BINS * NEAR)
    if tl.load(plans + 4 * wide) == _RANS:
        here = tl.minimum(n - wide * _CHUNK, _CHUNK).to(tl.int32)
        lanes = chunk_lanes(here)
        symbols += wide * _CHUNK
        table += wide * (4 * BINS)
        if NEAR:
            at = tl.arange(0, 4 * BINS)
            shared_memory.store(memory, near + 4 * at, tl.load(table + at), ASM)
            tl.debug_barrier()
        end = words + (wide + 1) * room
        if lanes == LANES:
            x, first = _push_all(symbols, table, memory, near, ring, end, here, LANES, SYMBOL, NEAR, ASM)
        else:
            x, first = _push_all(symbols, table, memory, near, ring, end, here, 4, SYMBOL, NEAR, ASM)
        tl.store(states + wide * LANES + tl.arange(0, LANES), x)
        written = tl.max((end.to(tl.int64) - first.to(tl.int64)) >> 1, 0).to(tl.int32)
        tl.store(plans + 4 * wide + 3, room - written)
        size = 2 + tl.load(plans + 4 * wide + 2) + 4 * lanes + 2 * written
        tl.store(sizes + wide, size.to(tl.int64))


# --------------------------------------------------------------------------------------------------------- reading


@triton.jit
def _fetch(words, rest, at, whole, shift, need, before):
    """Words of a group, two and two, from the place ``at`` on, where there is need for them; else those before.

    The section's last word, ``rest``, may have less than four bytes, and stands for all behind it.
    """
    lane = tl.arange(0, LANES)
    found = ()
    for k in tl.static_range(_TAKEN // (2 * LANES)):
        place = at + k * LANES + lane
        low = tl.load(words + place, mask=need & (place < whole), other=rest).to(tl.uint32, bitcast=True).to(tl.uint64)
        high = tl.load(words + place + 1, mask=need & (place + 1 < whole), other=rest).to(tl.uint32, bitcast=True)
        both = ((((high.to(tl.uint64) << 32) | low) >> shift).to(tl.uint32)).to(tl.int32, bitcast=True)
        found = found + (tl.where(need, both, before[k]),)  # type: ignore[assignment]
    return found


@triton.jit
def _with_slot(word):
    """A word with the place of its slot in the upper half: who takes it, comes to that slot next."""
    return word | ((word & 4095) << 19)


@triton.jit
def _fill(memory, room, fetched, filled, need, ASM: tl.constexpr):
    """Fetched words into the ring, where there is need for them: how many have been put there by now."""
    block = (4 * filled) & (4 * _RING - 1)
    twice = need & (block == 0)
    for k in tl.static_range(_TAKEN // (2 * LANES)):
        at = room + block + 8 * (k * LANES + tl.arange(0, LANES))
        first = _with_slot(fetched[k] & 0xFFFF)
        second = _with_slot((fetched[k] >> 16) & 0xFFFF)
        store_pair(memory, at, first, second, need, ASM)
        store_pair(memory, at + 4 * _RING, first, second, twice, ASM)
    return sync_warp(filled + tl.where(need, _TAKEN, 0), ASM)


@triton.jit
def _pop_near(x, slot, place, memory, room, below, ASM: tl.constexpr):
    """A symbol off each state, and words of the ring, from ``place`` on, onto those that need one."""
    entry, bound = load_pair(memory, room + SLOTS_AT + slot, ASM)
    takes = (x >> 12) < bound
    own, place = _behind(place, takes.to(tl.int32), below, ASM)
    word = shared_memory.load(memory, own, ASM)
    popped = (entry & 4095) * (x >> 12) + ((entry >> 20) & 4095)
    slot = tl.where(takes, word >> 16, (popped & 4095) << 3)
    x = tl.where(takes, (popped << 16) | (word & 0xFFFF), popped)
    return x, slot, place, (entry >> 12) & 255


@triton.jit
def _pop_far(x, place, slots, memory, scale, below, there, ASM: tl.constexpr):
    """The same with slots of global memory, and for those lanes alone that are there."""
    entry = tl.load(slots + (x & ((1 << scale) - 1)))
    step = entry.to(tl.int32)
    popped = (step & 0xFFFF) * (x >> scale) + ((step >> 16) & 0xFFFF)
    takes = (popped < _LOW) & there
    own, place = _behind(place, takes.to(tl.int32), below, ASM)
    popped = tl.where(takes, (popped << 16) | (shared_memory.load(memory, own, ASM) & 0xFFFF), popped)
    return tl.where(there, popped, x), place, (entry >> 32).to(tl.int32)


@triton.jit
def _pop_all(
    x, words, rest, whole, shift, slots, table, memory, room, scale, out, here, lanes,
    NEAR: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """All symbols of a chunk: the states that are left, and how many words were taken. NEAR only where all lanes work.

    Words are fetched a group before they are put into the ring, which has always as many as a group can take. What lies
    behind the last one is of no matter: who takes that, has taken too many.
    """
    lane = tl.arange(0, LANES)
    below = (tl.full((LANES,), 1, tl.int32) << lane) - 1
    need = lane >= 0
    filled = tl.zeros((LANES,), tl.int32)
    taken = filled
    fetched = ()
    for _ in tl.static_range(_TAKEN // (2 * LANES)):
        fetched = fetched + (filled,)  # type: ignore[assignment]
    fetched = _fetch(words, rest, filled, whole, shift, need, fetched)
    for _ in range(2):
        filled = _fill(memory, room, fetched, filled, need, ASM)
        fetched = _fetch(words, rest, filled >> 1, whole, shift, need, fetched)
    done = here * 0
    slot = (x & 4095) << 3
    busy = (lane < lanes).to(tl.int32)
    while done < here:
        busy = sync_warp(busy, ASM)  # else the compiler would make two loops of it, and lanes would vote in either
        need = filled - taken <= _RING - _TAKEN
        filled = _fill(memory, room, fetched, filled, need, ASM)
        fetched = _fetch(words, rest, filled >> 1, whole, shift, need, fetched)
        begin = room + ((4 * taken) & (4 * _RING - 1))
        place = begin
        target = out + done + lane
        if NEAR & (done + GROUP_ROWS * LANES <= here):
            for k in tl.static_range(GROUP_ROWS):
                x, slot, place, symbol = _pop_near(x, slot, place, memory, room, below, ASM)
                if out.dtype.element_ty == tl.float32:
                    value = shared_memory.load(memory, room + VALUES_AT + 4 * symbol, ASM).to(tl.float32, bitcast=True)
                else:
                    value = symbol.to(out.dtype.element_ty)
                tl.store(target + k * LANES, value)
        else:
            for k in tl.static_range(GROUP_ROWS):
                there = (busy == 1) & (done + k * lanes + lane < here)
                x, place, symbol = _pop_far(x, place, slots, memory, scale, below, there, ASM)
                if out.dtype.element_ty == tl.float32:
                    value = tl.load(table + symbol)
                else:
                    value = symbol.to(out.dtype.element_ty)
                tl.store(target + k * lanes, value, mask=there)
        taken += (place - begin) >> 2
        done += GROUP_ROWS * lanes
    return x, taken


@triton.jit
def _bring_near(slots, table, memory, room, alphabet, VALUES: tl.constexpr, ASM: tl.constexpr):
    """Slots of scale 12 and symbols below 256, and what these stand for.

    A slot has a word with all of it, and another with how far above the slot a state must be that needs no word.
    """
    for first in range(0, 4096, 256):
        at = first + tl.arange(0, 256)
        entry = tl.load(slots + at)
        share = (entry & 4095).to(tl.int32)
        off = ((entry >> 16) & 4095).to(tl.int32)
        shared_memory.store(
            memory, room + SLOTS_AT + 8 * at, share | ((entry >> 32).to(tl.int32) << 12) | (off << 20), ASM
        )
        shared_memory.store(memory, room + SLOTS_AT + 8 * at + 4, (_LOW - 1 - off) // tl.maximum(share, 1) + 1, ASM)
    if VALUES:
        at = tl.arange(0, 256)
        value = tl.load(table + at, mask=at < alphabet, other=0.0).to(tl.int32, bitcast=True)
        shared_memory.store(memory, room + VALUES_AT + 4 * at, value, ASM)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["n", "nbytes", "alphabet"])
def read_lanes(
    section, nbytes, plans, slots, table, memory, out, verdict, n, alphabet,
    NEAR: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Symbols, or what they stand for, to where they belong; the verdict on words and states."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    room = shared_memory.address_of(ASM)
    if ASM == "":
        memory += wide * (NEAR_NBYTES // 4)
    if tl.load(plans + 8 * wide) == _RANS:
        here = tl.minimum(n - wide * _CHUNK, _CHUNK).to(tl.int32)
        lanes = chunk_lanes(here)
        scale = tl.load(plans + 8 * wide + 1)
        begin = tl.load((plans + 8 * wide + 6).to(tl.pointer_type(tl.int64))) + tl.load(plans + 8 * wide + 2)
        count = tl.load(plans + 8 * wide + 3)
        lane = tl.arange(0, LANES)
        busy = lane < lanes
        slots += wide * 32768
        out += wide * _CHUNK
        x = tl.zeros((LANES,), tl.int32)
        for k in tl.static_range(4):
            x |= tl.load(section + begin + 4 * lane + k, mask=busy, other=0).to(tl.int32) << (8 * k)
        wrong = busy & (x < _LOW)
        x = tl.where(busy & (wrong == 0), x, _LOW)
        begin += 4 * lanes
        words = section.to(tl.pointer_type(tl.int32)) + (begin >> 2)
        whole = tl.minimum((nbytes >> 2) - (begin >> 2), 1 << 30).to(tl.int32)
        shift = (8 * (begin & 3)).to(tl.uint64)
        rest = chunk * 0
        for k in tl.static_range(3):
            byte = (nbytes >> 2) * 4 + k
            rest |= tl.load(section + byte, mask=byte < nbytes, other=0).to(tl.int32) << (8 * k)
        close = (scale == 12) & (lanes == LANES)
        if NEAR & close:
            _bring_near(slots, table, memory, room, alphabet, out.dtype.element_ty == tl.float32, ASM)
            x, taken = _pop_all(
                x, words, rest, whole, shift, slots, table, memory, room, scale, out, here, lanes, NEAR, ASM
            )
        else:
            x, taken = _pop_all(
                x, words, rest, whole, shift, slots, table, memory, room, scale, out, here, lanes, False, ASM
            )
        wrong = wrong | (busy & (x != _LOW)) | (taken != count)
        tl.atomic_or(verdict, 1, mask=tl.max(wrong.to(tl.int32), 0) > 0, sem="relaxed")
