"""Codebooks: lengths of a prefix code, shares of rANS, and both as few bits for the receiver. Whole numbers only."""

from __future__ import annotations

from laconic.errors import FrameError

MAX_LENGTH = 15
"""Bits of the longest code, and of the finest shares."""

_FIRST_CLASS = 8


def code_lengths(counts: list[int]) -> list[int]:
    """Lengths of an optimal prefix code with a longest length; 0 for symbols that do not occur. Two or more must.

    Package-merge (Larmore and Hirschberg 1990): level by level the cheapest pairs of the level below are merged with
    the leaves; a symbol's length is the number of levels at which its leaf is among the 2 n - 2 cheapest items.
    """
    order = sorted((symbol for symbol, count in enumerate(counts) if count), key=lambda symbol: counts[symbol])
    used = len(order)
    limit = min(MAX_LENGTH, max(12, (used - 1).bit_length() + 3))
    leaves = [(counts[symbol], True) for symbol in order]
    levels = [leaves]
    for _ in range(limit - 1):
        below = levels[-1]
        pairs = [(below[i][0] + below[i + 1][0], False) for i in range(0, len(below) - 1, 2)]
        levels.append(sorted(leaves + pairs, key=lambda item: item[0]))  # stable: of equal ones the leaf comes first
    lengths = [0] * len(counts)
    chosen = 2 * used - 2
    for level in reversed(levels):
        among = sum(is_leaf for _, is_leaf in level[:chosen])
        for symbol in order[:among]:
            lengths[symbol] += 1
        chosen = 2 * (chosen - among)
    return lengths


def canonical_codes(lengths: list[int]) -> list[int]:
    """Codes by length, then by symbol; the bit that is read first is the lowest."""
    codes, code, length = [0] * len(lengths), 0, 0
    for symbol in sorted((s for s, n in enumerate(lengths) if n), key=lambda s: lengths[s]):
        code <<= lengths[symbol] - length
        length = lengths[symbol]
        codes[symbol] = int(f"{code:0{length}b}"[::-1], 2)
        code += 1
    return codes


def share_out(counts: list[int], scale: int) -> list[int]:
    """Whole shares of 2^scale in proportion to the counts, at least 1 for each symbol that occurs.

    At most a quarter as many symbols occur as there are shares, so one round of giving or taking suffices.
    """
    n, whole = sum(counts), 1 << scale
    shares = [max(1, count * whole // n) if count else 0 for count in counts]
    left = whole - sum(shares)
    if left > 0:  # to those cut off most
        cut = [symbol for symbol, count in enumerate(counts) if count * whole >= n]
        cut.sort(key=lambda symbol: (-(counts[symbol] * whole % n), symbol))
        for symbol in cut[:left]:
            shares[symbol] += 1
    elif left < 0:  # what the rare ones got too much, the others give in proportion: less than a third each
        often = sorted((symbol for symbol, count in enumerate(counts) if count), key=lambda symbol: counts[symbol])
        often.reverse()  # of equal counts the last symbol gives first
        givers, owed = sum(share for share in shares if share > 1), -left
        for symbol in often:
            give = min(-(left * shares[symbol] // givers), owed, shares[symbol] - 1)
            shares[symbol] -= give
            owed -= give
    return shares


def log2_fixed(share: int) -> int:
    """log2 in units of 2^-16, by squaring: the same on every machine."""
    whole = share.bit_length() - 1
    y, fraction = share << (31 - whole), 0
    for _ in range(16):
        y = y * y >> 31
        fraction <<= 1
        if y >> 32:
            fraction |= 1
            y >>= 1
    return whole << 16 | fraction


class _Bits:
    """Bits, the first one lowest, in one large number."""

    def __init__(self) -> None:
        self.value = self.count = 0

    def put(self, value: int, count: int) -> None:
        self.value |= value << self.count
        self.count += count

    def to_bytes(self) -> bytes:
        return self.value.to_bytes(-(-self.count // 8), "little")


def write_book(classes: list[int], shares: list[int] | None = None) -> bytes:
    """A small number per symbol (0: does not occur), each followed by its share without the leading one, if given.

    u16 first symbol that occurs, u16 how many from there to the last, less one; then tokens: ``0`` the class before
    (8 at first), ``10s`` one less or one more, ``110vvvv`` class v, ``111`` and an Elias gamma number: a run of
    symbols that do not occur.
    """
    bits = _Bits()
    symbols = [symbol for symbol, value in enumerate(classes) if value]
    first, last, before = symbols[0], symbols[-1], _FIRST_CLASS
    bits.put(first, 16)
    bits.put(last - first, 16)
    at = first
    for symbol in symbols:
        if symbol > at:
            run = symbol - at
            below = run.bit_length() - 1
            bits.put(0b111, 3)
            bits.put(1 << below, below + 1)
            bits.put(run - (1 << below), below)
        here = classes[symbol]
        if here == before:
            bits.put(0, 1)
        elif abs(here - before) == 1:
            bits.put(0b101 if here > before else 0b001, 3)
        else:
            bits.put(0b011 | here << 3, 7)
        if shares is not None:
            bits.put(shares[symbol] - (1 << (here - 1)), here - 1)
        before, at = here, symbol + 1
    return bits.to_bytes()


def read_book(data: bytes, alphabet: int, *, with_shares: bool) -> tuple[list[int], list[int], int]:
    """Classes, shares and the bytes they took; ``FrameError`` when they make no sense."""
    stream, left = int.from_bytes(data, "little"), 8 * len(data)

    def take(count: int) -> int:
        nonlocal stream, left
        if count > left:
            raise FrameError("a codebook in the frame is cut short")
        value = stream & ((1 << count) - 1)
        stream >>= count
        left -= count
        return value

    first = take(16)
    last = first + take(16)
    if last >= alphabet:
        raise FrameError(f"a codebook in the frame speaks of symbol {last} of {alphabet}")
    classes, shares = [0] * alphabet, [0] * alphabet
    at, before = first, _FIRST_CLASS
    while at <= last:
        here = before
        if take(1):
            if not take(1):
                here += 1 if take(1) else -1
            elif not take(1):
                here = take(4)
            else:
                below = 0
                while below < 12 and not take(1):
                    below += 1
                if below >= 12:
                    raise FrameError("a run in a codebook of the frame is too long")
                at += 1 << below | take(below)
                if at > last:
                    raise FrameError("a codebook in the frame ends with symbols that do not occur")
                continue
        if not 1 <= here <= MAX_LENGTH:
            raise FrameError(f"a codebook in the frame has the class {here}")
        classes[at] = here
        if with_shares:
            shares[at] = 1 << (here - 1) | take(here - 1)
        before = here
        at += 1
    if take(left % 8):
        raise FrameError("a codebook in the frame has something in its padding")
    return classes, shares, len(data) - left // 8
