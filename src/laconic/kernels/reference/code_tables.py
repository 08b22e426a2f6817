"""Code tables: Huffman lengths, rANS frequencies, and their bytes. Integer arithmetic only, so all backends agree."""

from __future__ import annotations

from laconic.errors import FrameError

MAX_LENGTH = 15
"""Bits of the longest code, and of the largest frequency scale."""

_FIRST_CLASS = 8


def code_lengths(counts: list[int]) -> list[int]:
    """Return the lengths of an optimal length-limited prefix code; 0 for symbols that do not occur.

    At least two symbols must occur. Package-merge (Larmore and Hirschberg 1990): level by level the cheapest pairs of
    the level below are merged with the leaves; a symbol's length is the number of levels at which its leaf is among
    the 2 n - 2 cheapest items.
    """
    order = sorted((symbol for symbol, count in enumerate(counts) if count), key=lambda symbol: counts[symbol])
    used = len(order)
    limit = min(MAX_LENGTH, max(12, (used - 1).bit_length() + 3))
    leaves = [(counts[symbol], True) for symbol in order]
    levels = [leaves]
    for _ in range(limit - 1):
        below = levels[-1]
        pairs = [(below[i][0] + below[i + 1][0], False) for i in range(0, len(below) - 1, 2)]
        levels.append(sorted(leaves + pairs, key=lambda item: item[0]))  # stable: leaves first among equals
    lengths = [0] * len(counts)
    cheapest = 2 * used - 2
    for level in reversed(levels):
        num_leaves = sum(is_leaf for _, is_leaf in level[:cheapest])
        for symbol in order[:num_leaves]:
            lengths[symbol] += 1
        cheapest = 2 * (cheapest - num_leaves)
    return lengths


def canonical_codes(lengths: list[int]) -> list[int]:
    """Return canonical codes, ordered by length, then by symbol; the lowest bit is read first."""
    codes, code, length = [0] * len(lengths), 0, 0
    for symbol in sorted((s for s, n in enumerate(lengths) if n), key=lambda s: lengths[s]):
        code <<= lengths[symbol] - length
        length = lengths[symbol]
        codes[symbol] = int(f"{code:0{length}b}"[::-1], 2)
        code += 1
    return codes


def scale_frequencies(counts: list[int], scale: int) -> list[int]:
    """Return frequencies that sum to 2^scale, proportional to the counts, at least 1 for each symbol that occurs.

    At most 2^scale / 4 symbols occur, so one round of corrections suffices.
    """
    n, total = sum(counts), 1 << scale
    frequencies = [max(1, count * total // n) if count else 0 for count in counts]
    missing = total - sum(frequencies)
    if missing > 0:  # one more for the symbols with the largest remainders
        rounded = [symbol for symbol, count in enumerate(counts) if count * total >= n]
        rounded.sort(key=lambda symbol: (-(counts[symbol] * total % n), symbol))
        for symbol in rounded[:missing]:
            frequencies[symbol] += 1
    elif missing < 0:  # rare symbols were raised to 1; the others lose in proportion, less than a third each
        by_count = sorted((symbol for symbol, count in enumerate(counts) if count), key=lambda symbol: counts[symbol])
        by_count.reverse()  # of equal counts the last symbol loses first
        reducible, excess = sum(frequency for frequency in frequencies if frequency > 1), -missing
        for symbol in by_count:
            reduction = min(-(missing * frequencies[symbol] // reducible), excess, frequencies[symbol] - 1)
            frequencies[symbol] -= reduction
            excess -= reduction
    return frequencies


def log2_fixed(frequency: int) -> int:
    """Return log2 in units of 2^-16, by repeated squaring, which is the same on every machine."""
    whole = frequency.bit_length() - 1
    y, fraction = frequency << (31 - whole), 0
    for _ in range(16):
        y = y * y >> 31
        fraction <<= 1
        if y >> 32:
            fraction |= 1
            y >>= 1
    return whole << 16 | fraction


class _Bits:
    """A bit stream, the first bit lowest, in one large integer."""

    def __init__(self) -> None:
        self.value = self.count = 0

    def put(self, value: int, count: int) -> None:
        self.value |= value << self.count
        self.count += count

    def to_bytes(self) -> bytes:
        return self.value.to_bytes(-(-self.count // 8), "little")


def write_code_table(classes: list[int], frequencies: list[int] | None = None) -> bytes:
    """Write a class per symbol (0: does not occur), each followed by its frequency without the leading one, if given.

    Layout: u16 first symbol that occurs, u16 distance to the last one, then tokens: ``0`` the previous class (initially
    8), ``10s`` one less or one more, ``110vvvv`` class v, ``111`` and an Elias gamma number: a run of symbols that do
    not occur. The class of a Huffman code is its length, that of a frequency its number of bits.
    """
    bits = _Bits()
    symbols = [symbol for symbol, value in enumerate(classes) if value]
    first, last, previous = symbols[0], symbols[-1], _FIRST_CLASS
    bits.put(first, 16)
    bits.put(last - first, 16)
    expected = first
    for symbol in symbols:
        if symbol > expected:
            run = symbol - expected
            exponent = run.bit_length() - 1
            bits.put(0b111, 3)
            bits.put(1 << exponent, exponent + 1)
            bits.put(run - (1 << exponent), exponent)
        current = classes[symbol]
        if current == previous:
            bits.put(0, 1)
        elif abs(current - previous) == 1:
            bits.put(0b101 if current > previous else 0b001, 3)
        else:
            bits.put(0b011 | current << 3, 7)
        if frequencies is not None:
            bits.put(frequencies[symbol] - (1 << (current - 1)), current - 1)
        previous, expected = current, symbol + 1
    return bits.to_bytes()


def read_code_table(data: bytes, alphabet: int, *, with_frequencies: bool) -> tuple[list[int], list[int], int]:
    """Return classes, frequencies and the table's number of bytes; raise ``FrameError`` if the table is invalid."""
    stream, left = int.from_bytes(data, "little"), 8 * len(data)

    def take(count: int) -> int:
        nonlocal stream, left
        if count > left:
            raise FrameError("the frame holds a truncated code table")
        value = stream & ((1 << count) - 1)
        stream >>= count
        left -= count
        return value

    first = take(16)
    last = first + take(16)
    if last >= alphabet:
        raise FrameError(f"the frame holds a code table with symbol {last}, the alphabet has {alphabet}")
    classes, frequencies = [0] * alphabet, [0] * alphabet
    symbol, current = first, _FIRST_CLASS
    while symbol <= last:
        if take(1):
            if not take(1):
                current += 1 if take(1) else -1
            elif not take(1):
                current = take(4)
            else:
                exponent = 0
                while exponent < 12 and not take(1):
                    exponent += 1
                if exponent >= 12:
                    raise FrameError("the frame holds a code table with a run that is too long")
                symbol += 1 << exponent | take(exponent)
                if symbol > last:
                    raise FrameError("the frame holds a code table that ends with symbols that do not occur")
                continue
        if not 1 <= current <= MAX_LENGTH:
            raise FrameError(f"the frame holds a code table with class {current}, which must be 1 to {MAX_LENGTH}")
        classes[symbol] = current
        if with_frequencies:
            frequencies[symbol] = 1 << (current - 1) | take(current - 1)
        symbol += 1
    if take(left % 8):
        raise FrameError("the frame holds a code table with nonzero padding")
    return classes, frequencies, len(data) - left // 8
