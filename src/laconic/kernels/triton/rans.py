"""rANS on a GPU: one warp per chunk, one lane per state, row after row of symbols.

As with Huffman coding, all chunks of a large tensor are in flight at once, and the cost is the cycles per row. The
encoder knows its symbols, so it requests table entries in time. The decoder has to wait twice per row, for its slots
and for its words, which therefore are in shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.sections import RANS
from laconic.kernels.triton import shared_memory
from laconic.kernels.triton.rans_tables import num_states
from laconic.kernels.triton.shared_memory import load2, load4, load_symbol, store2, sync_warp, wait_fetched
from laconic.kernels.triton.streams import CHUNK_SYMBOLS, symbols_in_chunk

__all__ = ["DECODE_SHARED_NBYTES", "LANES", "SHARED_TABLE_BINS", "encode_shared_nbytes", "rans_decode", "rans_encode"]

_RANS = tl.constexpr(RANS)
_LOW = tl.constexpr(1 << 15)
LANES = tl.constexpr(32)
GROUP_ROWS = tl.constexpr(8)
"""Rows per iteration."""
GROUPS_AHEAD = tl.constexpr(8)
"""Groups of symbols that the encoder holds in shared memory or has requested."""
_WAIT_FETCHED = tl.constexpr(f"cp.async.wait_group {GROUPS_AHEAD.value - 2}; bar.warp.sync 0xffffffff; mov.u32 $0, $1;")
SHARED_TABLE_BINS = 1024
"""Up to this many symbols the encoder's table is in shared memory."""


def encode_shared_nbytes(bins: int, symbol: int) -> int:
    """Return the encoder's bytes of shared memory: a ring of symbols, and the table if it fits."""
    return int(GROUPS_AHEAD.value * GROUP_ROWS.value * LANES.value * symbol) + (
        16 * bins if bins <= SHARED_TABLE_BINS else 0
    )


_GROUP_WORDS = tl.constexpr(GROUP_ROWS.value * LANES.value)
"""Words of 16 bits that a group can consume."""
_RING = tl.constexpr(4 * _GROUP_WORDS.value)
"""Words of the decoder's ring, in four bytes each; the first ones are stored twice, so that no group wraps around."""
VALUES_AT = tl.constexpr(4 * (_RING.value + _GROUP_WORDS.value))
SLOTS_AT = tl.constexpr(VALUES_AT.value + 4 * 256)
DECODE_SHARED_NBYTES = SLOTS_AT.value + 8 * 4096
"""The decoder's bytes of shared memory: a ring of words, values by symbol, slots of scale 12."""


@triton.jit
def _vote(flag):
    """Return a bit for each lane whose flag (0 or 1) is set."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }", "=r,r", [flag],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _word_addresses(address, flag, below, ASM: tl.constexpr):
    """Return where each lane finds its word, after those of the lower lanes with a flag, and the end of all words.

    On the device this is a warp vote.
    """
    if ASM != "":
        # The first count is on the critical path: the other one uses the same unit, so an operand that is always 0
        # delays it.
        word_address, end = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            popc.b32 a, $3; mad.lo.s32 $0, a, 4, $4;
            and.b32 b, a, 64; or.b32 b, b, $2; popc.b32 b, b; mad.lo.s32 $1, b, 4, $4;
            }""", "=&r,=&r,r,r,r", [_vote(flag), _vote(flag) & below, address],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        word_address = address + 4 * (tl.cumsum(flag, 0) - flag)
        end = address + 4 * tl.sum(flag, 0)
    return word_address, end


@triton.jit
def _count_set(flag, below, ASM: tl.constexpr):
    """Count the lower lanes whose flag is set, and all of them."""
    if ASM != "":
        vote = _vote(flag)
        before = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [vote & below], tl.int32, True, 1)
        total = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [vote], tl.int32, True, 1)
    else:
        before = tl.cumsum(flag, 0) - flag
        total = before * 0 + tl.sum(flag, 0)
    return before, total


# -------------------------------------------------------------------------------------------------------- encoding


@triton.jit
def _request_group(symbols, memory, ring, group, span, SYMBOL: tl.constexpr, ASM: tl.constexpr):
    """Request the symbols of a group, if it exists, into the ring."""
    byte = 16 * tl.arange(0, LANES)
    end = tl.where(group >= 0, span * SYMBOL, 0)
    part = (group & (GROUPS_AHEAD - 1)) * (GROUP_ROWS * LANES * SYMBOL)
    source = symbols.to(tl.pointer_type(tl.uint8)) + group * (span * SYMBOL) + byte
    shared_memory.fetch16_async(memory, ring + part + byte, source, byte, 0, end, ASM)
    shared_memory.commit_fetches(ASM)


@triton.jit
def _entry(table, memory, table_shared, symbol, IN_SHARED: tl.constexpr, ASM: tl.constexpr):
    """Load the table entry that pushes a symbol onto a state."""
    if IN_SHARED:
        return load4(memory, table_shared + 16 * symbol, ASM)
    pointer = table + 4 * symbol
    return tl.load(pointer), tl.load(pointer + 1), tl.load(pointer + 2), tl.load(pointer + 3)


@triton.jit
def _entries(
    table, memory, table_shared, ring, group, lane,
    STRIDE: tl.constexpr, SYMBOL: tl.constexpr, IN_SHARED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Load the entries of a group whose symbols have arrived."""
    address = ring + (group & (GROUPS_AHEAD - 1)) * (GROUP_ROWS * LANES * SYMBOL) + (lane % STRIDE) * SYMBOL
    entries = ()
    for k in tl.static_range(GROUP_ROWS):
        symbol = load_symbol(memory, address + SYMBOL * k * STRIDE, SYMBOL, ASM)
        entries = entries + (_entry(table, memory, table_shared, symbol, IN_SHARED, ASM),)  # type: ignore[assignment]
    return entries


@triton.jit
def _push(x, entry, valid, EDGE: tl.constexpr):
    """Push a symbol onto each state; return the states and which of them emit their lower half first."""
    emits = x >= entry[2]
    if EDGE:
        emits = emits & valid
    rest = tl.where(emits, x >> 16, x)
    reciprocal = entry[1].to(tl.uint32, bitcast=True)
    quotient = (tl.umulhi(rest.to(tl.uint32), reciprocal) >> entry[3].to(tl.uint32)).to(tl.int32)
    pushed = quotient * (entry[0] & 0xFFFF) + rest + ((entry[0] >> 16) & 0xFFFF)
    if EDGE:
        pushed = tl.where(valid, pushed, x)
    return pushed, emits.to(tl.int32)


@triton.jit
def _store_words(words, x, emits, below, ASM: tl.constexpr):
    """Store the emitted halves in the order of their lanes, before ``words``."""
    before, total = _count_set(emits, below, ASM)
    words -= total
    tl.store(words + before, x.to(tl.int16), mask=emits == 1)
    return words


@triton.jit
def _push_chunk(
    symbols, table, memory, table_shared, ring, words, chunk_size,
    STRIDE: tl.constexpr, SYMBOL: tl.constexpr, IN_SHARED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Push all symbols of a chunk with STRIDE states, from its end; return states and first word.

    Idle lanes follow along.
    """
    lane = tl.arange(0, LANES)
    below = (tl.full((LANES,), 1, tl.int32) << lane) - 1
    busy = (lane < STRIDE).to(tl.int32)
    x = tl.full((LANES,), _LOW, tl.int32)
    words += tl.zeros((LANES,), tl.int32)
    span: tl.constexpr = GROUP_ROWS * STRIDE
    group = (chunk_size - 1) // span
    for k in tl.static_range(1, GROUPS_AHEAD):  # all groups but the last are full
        _request_group(symbols, memory, ring, group - k, span, SYMBOL, ASM)
    first = group * span + lane
    for k in tl.static_range(GROUP_ROWS - 1, -1, -1):
        valid = (busy == 1) & (first + k * STRIDE < chunk_size)
        symbol = tl.load(symbols + first + k * STRIDE, mask=valid, other=0).to(tl.int32)
        pushed, emits = _push(x, _entry(table, memory, table_shared, symbol, IN_SHARED, ASM), valid, True)
        words = _store_words(words, x, emits, below, ASM)
        x = pushed
    if group > 0:
        group -= 1
        wait_fetched(_WAIT_FETCHED, ASM)
        entries = _entries(table, memory, table_shared, ring, group, lane, STRIDE, SYMBOL, IN_SHARED, ASM)
        while group >= 0:
            if STRIDE < LANES:
                busy = sync_warp(busy, ASM)  # see the decoder
            # A group's entries are loaded while the group after it is pushed; all loads come first, since they do not
            # pass a store.
            _request_group(symbols, memory, ring, group - (GROUPS_AHEAD - 1), span, SYMBOL, ASM)
            wait_fetched(_WAIT_FETCHED, ASM)
            previous_group = tl.maximum(group - 1, 0)
            next_entries = _entries(
                table, memory, table_shared, ring, previous_group, lane, STRIDE, SYMBOL, IN_SHARED, ASM
            )
            # The states do not wait for the stores of words, which therefore come after all of them.
            emitted = ()
            for k in tl.static_range(GROUP_ROWS - 1, -1, -1):
                pushed, emits = _push(x, entries[k], busy == 1, STRIDE < LANES)
                emitted = emitted + ((x, emits),)  # type: ignore[assignment]
                x = pushed
            for k in tl.static_range(GROUP_ROWS):
                words = _store_words(words, emitted[k][0], emitted[k][1], below, ASM)
            entries = next_entries
            group -= 1
    return x, words


@triton.jit(do_not_specialize=["n", "buffer_words"])
def rans_encode(
    symbols, table, memory, plans, words, states, sizes, n, buffer_words,
    BINS: tl.constexpr, SYMBOL: tl.constexpr, IN_SHARED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Write the words of each chunk to the end of its buffer, and its size. Symbols begin at a multiple of 16."""
    chunk = tl.program_id(0)
    chunk64 = chunk.to(tl.int64)
    ring = shared_memory.declare_shared(ASM)
    table_shared = ring + GROUPS_AHEAD * GROUP_ROWS * LANES * SYMBOL
    if ASM == "":
        memory += chunk64 * (table_shared // 4 + 4 * BINS * IN_SHARED)
    if tl.load(plans + 4 * chunk64) == _RANS:
        chunk_size = symbols_in_chunk(n, chunk64)
        lanes = num_states(chunk_size)
        symbols += chunk64 * CHUNK_SYMBOLS
        table += chunk64 * (4 * BINS)
        if IN_SHARED:
            offsets = tl.arange(0, 4 * BINS)
            shared_memory.store(memory, table_shared + 4 * offsets, tl.load(table + offsets), ASM)
            tl.debug_barrier()
        end = words + (chunk64 + 1) * buffer_words
        if lanes == LANES:
            x, first = _push_chunk(
                symbols, table, memory, table_shared, ring, end, chunk_size, LANES, SYMBOL, IN_SHARED, ASM
            )
        else:
            x, first = _push_chunk(
                symbols, table, memory, table_shared, ring, end, chunk_size, 4, SYMBOL, IN_SHARED, ASM
            )
        tl.store(states + chunk64 * LANES + tl.arange(0, LANES), x)
        written = tl.max((end.to(tl.int64) - first.to(tl.int64)) >> 1, 0).to(tl.int32)
        tl.store(plans + 4 * chunk64 + 3, buffer_words - written)
        size = 2 + tl.load(plans + 4 * chunk64 + 2) + 4 * lanes + 2 * written
        tl.store(sizes + chunk64, size.to(tl.int64))


# -------------------------------------------------------------------------------------------------------- decoding


@triton.jit
def _fetch_words(words, rest, first, whole, shift, needed, before):
    """Load the words of a group in pairs, from index ``first`` on, where needed; else return the previous ones.

    The section's last word, ``rest``, may have fewer than four bytes; it replaces all words after it.
    """
    lane = tl.arange(0, LANES)
    fetched = ()
    for k in tl.static_range(_GROUP_WORDS // (2 * LANES)):
        place = first + k * LANES + lane
        low = (
            tl.load(words + place, mask=needed & (place < whole), other=rest).to(tl.uint32, bitcast=True).to(tl.uint64)
        )
        high = tl.load(words + place + 1, mask=needed & (place + 1 < whole), other=rest).to(tl.uint32, bitcast=True)
        both = ((((high.to(tl.uint64) << 32) | low) >> shift).to(tl.uint32)).to(tl.int32, bitcast=True)
        fetched = fetched + (tl.where(needed, both, before[k]),)  # type: ignore[assignment]
    return fetched


@triton.jit
def _add_slot(word):
    """Return a word with the offset of its slot in the upper half: a state that takes it uses that slot next."""
    return word | ((word & 4095) << 19)


@triton.jit
def _fill_ring(memory, shared, fetched, filled, needed, ASM: tl.constexpr):
    """Store fetched words into the ring, where needed; return how many have been stored so far."""
    block = (4 * filled) & (4 * _RING - 1)
    twice = needed & (block == 0)
    for k in tl.static_range(_GROUP_WORDS // (2 * LANES)):
        offsets = shared + block + 8 * (k * LANES + tl.arange(0, LANES))
        first = _add_slot(fetched[k] & 0xFFFF)
        second = _add_slot((fetched[k] >> 16) & 0xFFFF)
        store2(memory, offsets, first, second, needed, ASM)
        store2(memory, offsets + 4 * _RING, first, second, twice, ASM)
    return sync_warp(filled + tl.where(needed, _GROUP_WORDS, 0), ASM)


@triton.jit
def _pop_shared(x, slot, address, memory, shared, below, ASM: tl.constexpr):
    """Pop a symbol from each state, and append a word of the ring to the states that need one."""
    entry, bound = load2(memory, shared + SLOTS_AT + slot, ASM)
    takes = (x >> 12) < bound
    word_address, address = _word_addresses(address, takes.to(tl.int32), below, ASM)
    word = shared_memory.load(memory, word_address, ASM)
    popped = (entry & 4095) * (x >> 12) + ((entry >> 20) & 4095)
    slot = tl.where(takes, word >> 16, (popped & 4095) << 3)
    x = tl.where(takes, (popped << 16) | (word & 0xFFFF), popped)
    return x, slot, address, (entry >> 12) & 255


@triton.jit
def _pop_global(x, address, slots, memory, scale, below, valid, ASM: tl.constexpr):
    """Pop a symbol with slots in global memory, for valid lanes only."""
    entry = tl.load(slots + (x & ((1 << scale) - 1)))
    step = entry.to(tl.int32)
    popped = (step & 0xFFFF) * (x >> scale) + ((step >> 16) & 0xFFFF)
    takes = (popped < _LOW) & valid
    word_address, address = _word_addresses(address, takes.to(tl.int32), below, ASM)
    popped = tl.where(takes, (popped << 16) | (shared_memory.load(memory, word_address, ASM) & 0xFFFF), popped)
    return tl.where(valid, popped, x), address, (entry >> 32).to(tl.int32)


@triton.jit
def _pop_chunk(
    x, words, rest, whole, shift, slots, table, memory, shared, scale, out, chunk_size, lanes,
    IN_SHARED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Pop all symbols of a chunk; return the final states and the words consumed. IN_SHARED needs all lanes.

    Words are fetched one group before they enter the ring, which always holds as many as a group can consume. The
    contents after the last word do not matter: a chunk that consumes them is rejected.
    """
    lane = tl.arange(0, LANES)
    below = (tl.full((LANES,), 1, tl.int32) << lane) - 1
    needed = lane >= 0
    filled = tl.zeros((LANES,), tl.int32)
    taken = filled
    fetched = ()
    for _ in tl.static_range(_GROUP_WORDS // (2 * LANES)):
        fetched = fetched + (filled,)  # type: ignore[assignment]
    fetched = _fetch_words(words, rest, filled, whole, shift, needed, fetched)
    for _ in range(2):
        filled = _fill_ring(memory, shared, fetched, filled, needed, ASM)
        fetched = _fetch_words(words, rest, filled >> 1, whole, shift, needed, fetched)
    done = chunk_size * 0
    slot = (x & 4095) << 3
    busy = (lane < lanes).to(tl.int32)
    while done < chunk_size:
        busy = sync_warp(busy, ASM)  # else the compiler would split the loop in two, and lanes would vote separately
        needed = filled - taken <= _RING - _GROUP_WORDS
        filled = _fill_ring(memory, shared, fetched, filled, needed, ASM)
        fetched = _fetch_words(words, rest, filled >> 1, whole, shift, needed, fetched)
        begin = shared + ((4 * taken) & (4 * _RING - 1))
        address = begin
        out_row = out + done + lane
        if IN_SHARED & (done + GROUP_ROWS * LANES <= chunk_size):
            for k in tl.static_range(GROUP_ROWS):
                x, slot, address, symbol = _pop_shared(x, slot, address, memory, shared, below, ASM)
                if out.dtype.element_ty == tl.float32:
                    value = shared_memory.load(memory, shared + VALUES_AT + 4 * symbol, ASM).to(
                        tl.float32, bitcast=True
                    )
                else:
                    value = symbol.to(out.dtype.element_ty)
                tl.store(out_row + k * LANES, value)
        else:
            for k in tl.static_range(GROUP_ROWS):
                valid = (busy == 1) & (done + k * lanes + lane < chunk_size)
                x, address, symbol = _pop_global(x, address, slots, memory, scale, below, valid, ASM)
                if out.dtype.element_ty == tl.float32:
                    value = tl.load(table + symbol)
                else:
                    value = symbol.to(out.dtype.element_ty)
                tl.store(out_row + k * lanes, value, mask=valid)
        taken += (address - begin) >> 2
        done += GROUP_ROWS * lanes
    return x, taken


@triton.jit
def _copy_tables(slots, table, memory, shared, alphabet, VALUES: tl.constexpr, ASM: tl.constexpr):
    """Copy slots of scale 12, symbols below 256 and their values to shared memory.

    A slot has one word with all of its fields, and another with the bound above which a state needs no word.
    """
    for first in range(0, 4096, 256):
        offsets = first + tl.arange(0, 256)
        entry = tl.load(slots + offsets)
        freq = (entry & 4095).to(tl.int32)
        offset = ((entry >> 16) & 4095).to(tl.int32)
        shared_memory.store(
            memory, shared + SLOTS_AT + 8 * offsets, freq | ((entry >> 32).to(tl.int32) << 12) | (offset << 20), ASM
        )
        shared_memory.store(
            memory, shared + SLOTS_AT + 8 * offsets + 4, (-offset + (_LOW - 1)) // tl.maximum(freq, 1) + 1, ASM
        )
    if VALUES:
        offsets = tl.arange(0, 256)
        value = tl.load(table + offsets, mask=offsets < alphabet, other=0.0).to(tl.int32, bitcast=True)
        shared_memory.store(memory, shared + VALUES_AT + 4 * offsets, value, ASM)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["n", "nbytes", "alphabet"])
def rans_decode(
    section, nbytes, plans, slots, table, memory, out, status, n, alphabet,
    IN_SHARED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Decode rANS chunks to symbols or values; sets the status if words or states are invalid."""
    chunk = tl.program_id(0)
    chunk64 = chunk.to(tl.int64)
    shared = shared_memory.declare_shared(ASM)
    if ASM == "":
        memory += chunk64 * (DECODE_SHARED_NBYTES // 4)
    if tl.load(plans + 8 * chunk64) == _RANS:
        chunk_size = symbols_in_chunk(n, chunk64)
        lanes = num_states(chunk_size)
        scale = tl.load(plans + 8 * chunk64 + 1)
        begin = tl.load((plans + 8 * chunk64 + 6).to(tl.pointer_type(tl.int64))) + tl.load(plans + 8 * chunk64 + 2)
        count = tl.load(plans + 8 * chunk64 + 3)
        lane = tl.arange(0, LANES)
        busy = lane < lanes
        slots += chunk64 * 32768
        out += chunk64 * CHUNK_SYMBOLS
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
        if IN_SHARED & close:
            _copy_tables(slots, table, memory, shared, alphabet, out.dtype.element_ty == tl.float32, ASM)
            x, taken = _pop_chunk(
                x, words, rest, whole, shift, slots, table, memory, shared, scale, out, chunk_size, lanes, IN_SHARED,
                ASM,
            )  # fmt: skip
        else:
            x, taken = _pop_chunk(
                x, words, rest, whole, shift, slots, table, memory, shared, scale, out, chunk_size, lanes, False, ASM
            )
        wrong = wrong | (busy & (x != _LOW)) | (taken != count)
        tl.atomic_or(status, 1, mask=tl.max(wrong.to(tl.int32), 0) > 0, sem="relaxed")
