"""Positions, read as section 7 of docs/wire-format.md defines them.

A part of ``wire_reader``: plain Python and numpy, written from the document, and nothing of laconic is imported.
"""

from __future__ import annotations

import math
import struct

import numpy as np

from wire_symbols import bit_stream, bits_of, ceil_div, chunked_symbols, packed_nbytes, require, unpack


def kept(keep: float, count: int) -> int:
    return min(count, max(1, math.floor(keep * count + 0.5)))


def class_of(gap: int) -> int:
    if gap < 8:
        return gap
    width = gap.bit_length() - 3
    return 4 * (width + 1) + (gap >> width) - 4


def rice_gaps(body: bytes, r: int, k: int) -> np.ndarray:
    require(len(body) >= packed_nbytes(k, r), "a Rice section has no room for the low bits")
    low, unary = body[: packed_nbytes(k, r)], bit_stream(body[packed_nbytes(k, r) :])
    ones = np.flatnonzero(unary)
    require(len(ones) == k and ones[-1] >= len(unary) - 8, "the unary stream does not end with its k-th one bit")
    high = np.diff(ones, prepend=-1) - 1
    return (high << r) + unpack(low, k, r)


def coded_gaps(body: bytes, k: int, n: int) -> np.ndarray:
    require(k < n and len(body) >= 8, "a section of gaps needs k < n and the size of its classes")
    nbytes = int.from_bytes(body[:8], "little")
    require(8 + nbytes <= len(body), "the classes end beyond their section")
    classes = chunked_symbols(body[8 : 8 + nbytes], k, class_of(n - 1) + 1)
    widths = np.where(classes < 8, 0, classes // 4 - 1)
    rest = body[8 + nbytes :]
    total = int(widths.sum())
    require(len(rest) == ceil_div(total, 8), "the low bits do not fill their section")
    stream, gaps, at = int.from_bytes(rest, "little"), [], 0
    require(stream >> total == 0, "the bits after the low bits are not zero")
    for klass, width in zip(classes.tolist(), widths.tolist(), strict=True):
        low = stream >> at & (1 << width) - 1
        gaps.append(klass if klass < 8 else ((4 + klass % 4) << width) + low)
        at += width
    return np.array(gaps, np.int64)


def ranked_positions(body: bytes, k: int, n: int) -> np.ndarray:
    require(len(body) >= 8, "a section of ranks has no header")
    chunk, m, last = struct.unpack("<IHH", body[:8])
    require(chunk <= 65536 and 1 <= m <= chunk / 2, "the header of a section of ranks is not valid")
    require(math.comb(chunk, m) < 1 << 31, "the ranks of a section have more than 31 bits")
    chunks = ceil_div(n, chunk)
    rest = n - (chunks - 1) * chunk
    require(1 <= last <= min(m, rest) and k == (chunks - 1) * m + last, "the counts of a section of ranks are wrong")
    ranks = unpack(body[8:], chunks, bits_of(math.comb(chunk, m))).tolist()
    positions = []
    for index, rank in enumerate(ranks):
        size, count = (rest, last) if index == chunks - 1 else (chunk, m)
        require(rank < math.comb(size, count), "a rank is too large")
        offsets = []
        for j in range(count, 0, -1):
            low, high = j - 1, size  # the largest p below size with C(p, j) <= rank
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if math.comb(middle, j) <= rank else (low, middle)
            offsets.append(low)
            rank -= math.comb(low, j)
        positions += [index * chunk + offset for offset in reversed(offsets)]
    return np.array(positions, np.int64)


def decided_positions(body: bytes, k: int, n: int) -> np.ndarray:
    require(k < n <= 4096 * k and len(body) >= 8, "a section of decisions needs k < n <= 4096 k and a header")
    c, a, b, q, zero = struct.unpack("<IBBBB", body[:8])
    require(1 <= c <= 16384 and a <= 9 and b <= 9 and zero == 0, "the header of a section of decisions is not valid")
    decisions = Decisions(body[12 if q else 8 :])
    weights = [2 ** (5 + b)] * c
    if q:
        require(6 <= q <= 16 and a == 0 and len(body) >= 12, "the header of decisions by chunks is not valid")
        positions = by_chunks(decisions, k, n, 2**q, struct.unpack("<I", body[8:12])[0], weights)
    else:
        positions = by_rows(decisions, k, n, a, weights)
    decisions.end()
    return np.array(positions, np.int64)


class Decisions:
    """The arithmetic code of decisions."""

    def __init__(self, code: bytes) -> None:
        self.size, self.shifts = len(code), 0
        self.stream = code + bytes(8)  # a reader takes zeros after the end
        self.value, self.low, self.high = int.from_bytes(self.stream[:4], "big"), 0, 2**32 - 1

    def take(self, p: int) -> bool:
        middle = self.low + (self.high - self.low) * p // 2**20
        selected = self.value <= middle
        if selected:
            self.high = middle
        else:
            self.low = middle + 1
        while self.low >> 24 == self.high >> 24:
            require(self.shifts < self.size, "a section of decisions is too short")
            self.low, self.high = self.low * 256 % 2**32, (self.high * 256 + 255) % 2**32
            self.value = (self.value * 256 + self.stream[4 + self.shifts]) % 2**32
            self.shifts += 1
        return selected

    def end(self) -> None:
        for count in range(5):
            last = self.high >> (32 - 8 * count) << (32 - 8 * count)
            if last >= self.low:
                break
        require(
            self.value == last and self.size == self.shifts + count, "a section of decisions does not end with them"
        )


def selected_more(weights: list[int], sent: list[int]) -> list[int]:
    """Return the weights after these columns were selected."""
    for column in sent:
        weights[column] += 256
    return [(weight + 1) // 2 for weight in weights] if any(weights[j] >= 2**16 for j in sent) else weights


def by_chunks(decisions: Decisions, k: int, n: int, chunk: int, m: int, weights: list[int]) -> list[int]:
    chunks, c = ceil_div(n, chunk), len(weights)
    last = k - (chunks - 1) * m
    require(1 <= m <= chunk and 1 <= last <= min(m, n - (chunks - 1) * chunk), "chunks cannot hold their positions")
    positions: list[int] = []
    for index in range(chunks):
        begin, end = index * chunk, min(n, (index + 1) * chunk)
        f, rest, sent = m if index < chunks - 1 else last, sum(weights[i % c] for i in range(begin, end)), []
        for i in range(begin, end):
            if f == 0:
                break
            p = 2**20 if f == end - i else min(max(f * 2**20 * weights[i % c] // rest, 16), 15 * 2**16)
            rest -= weights[i % c]
            if decisions.take(p):
                positions.append(i)
                sent.append(i % c)
                f -= 1
        weights = selected_more(weights, sent)
    return positions


def by_rows(decisions: Decisions, k: int, n: int, a: int, weights: list[int]) -> list[int]:
    positions, at, c = [], 0, len(weights)
    while len(positions) < k:
        row = at - at % c
        if at == row:  # a new row
            require(at < n and k - len(positions) <= n - at, "the values end before the positions")
            u = ((k - len(positions)) * 2**24 // (n - at) * c * 2**12) // sum(weights)
            sent, seen = [], 0
            refresh = True
        if (at - row) % 16 == 0 or refresh:
            rate = min((len(sent) * 256 + 2 ** (5 + a)) * 2**12 // (u * seen // 2**28 + 2 ** (5 + a)), 2**18)
            scale, refresh = u * rate // 2**12, False
        weight = weights[at - row]
        p = min(max(scale * weight // 2**16, 16), 15 * 2**16)
        if decisions.take(p):
            refresh = True
            positions.append(at)
            sent.append(at - row)
        seen += weight
        at += 1
        if at == min(row + c, n):
            weights = selected_more(weights, sent)
            if at == n:
                require(len(positions) == k, "the values end before the positions")
    return positions


def read_positions(section: bytes, n: int, most: int) -> np.ndarray:
    """Return the positions of a section, at most ``most`` of ``n``, ascending."""
    require(len(section) >= 8, "a position section has no header")
    mode, r, k = section[0], section[1], int.from_bytes(section[2:8], "little")
    body = section[8:]
    require(1 <= k <= min(n, most), "a position section has too many positions or none")
    require(r <= (31 if mode == 1 else 0), "the Rice parameter is not valid")
    if mode == 0:
        require(k == n and not body, "mode all needs k = n and no body")
        return np.arange(n)
    if mode == 2:
        require(len(body) == ceil_div(n, 8), "a bitmap does not have n bits")
        positions = np.flatnonzero(bit_stream(body))
        require(len(positions) == k and positions[-1] < n, "a bitmap does not have k bits below n")
        return positions
    if mode == 4:
        return ranked_positions(body, k, n)
    if mode == 5:
        return decided_positions(body, k, n)
    require(mode in (1, 3), "a position section has an unknown mode")
    gaps = rice_gaps(body, r, k) if mode == 1 else coded_gaps(body, k, n)
    positions = np.cumsum(gaps + 1) - 1
    require(np.all(positions < n) and np.all(positions >= 0), "a position is beyond the tensor")
    return positions
