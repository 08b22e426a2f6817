"""Positions as decisions, one for each value of a matrix: sent or not, by a binary arithmetic coder.

The probability of a decision is the product of what remains to be sent, what the row sent so far, and what the column
sent so far: a matrix whose rows or columns differ takes fewer bits than independent positions would. In chunks that
send equally many values, it is the column's share of what the rest of the chunk has to send. All arithmetic is in
whole numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.kernels.interface import ChunkCounts
from laconic.kernels.reference.selection import index_dtype
from laconic.kernels.sections import (
    CONTEXTS,
    MAX_PRIOR,
    ContextHeader,
    num_buckets,
    read_bytes,
    read_contexts_header,
    write_bytes,
)

__all__ = ["contexts_decode", "contexts_encode"]

SEGMENT = 16
"""Values after which the rate of a row is computed again, if nothing was sent."""
EVENT = 256
"""Weight that a column gains when it sends."""
MAX_WEIGHT = 1 << 16
"""Weight of a column at which all weights are halved."""
MAX_RATE = 1 << 18
"""Of a row, in units of 2^-12."""
LEAST, MOST = 16, 15 << 16
"""Probabilities, in units of 2^-20."""
CERTAIN = 1 << 20
"""A probability for which the coder takes no bits."""

Decide = Callable[[int, int], bool]


def _walk_rows(n: int, k: int, header: ContextHeader, decide: Decide) -> bool:
    """Call ``decide(position, probability)`` until k values are sent; return False if they do not fit into n."""
    columns, prior, weights, left = header.columns, 32 << header.row_prior, _first_weights(header), k
    total = sum(weights)
    for begin in range(0, n, columns):
        if not left:
            break
        if left > n - begin:
            return False
        # what a unit of weight is expected to send, in units of 2^-36
        unit = (((left << 24) // (n - begin) * columns) << 12) // total
        width, seen, column = min(columns, n - begin), 0, 0
        sent: list[int] = []
        while column < width and left:
            expected = (unit * seen) >> 28
            rate = min((((len(sent) << 8) + prior) << 12) // (expected + prior), MAX_RATE)
            scale = (unit * rate) >> 12
            end, before = min(width, (column // SEGMENT + 1) * SEGMENT), left
            while column < end and left == before:
                weight = weights[column]
                seen += weight
                if decide(begin + column, min(max((scale * weight) >> 16, LEAST), MOST)):
                    sent.append(column)
                    left -= 1
                column += 1
        for column in sent:
            weights[column] += EVENT
        if any(weights[column] >= MAX_WEIGHT for column in sent):
            weights = [(weight + 1) // 2 for weight in weights]
        total = sum(weights)
    return left == 0


def _walk_chunks(n: int, k: int, header: ContextHeader, decide: Decide) -> bool:
    """Call ``decide(position, probability)`` for the values of each chunk until it has sent its share of k."""
    columns, chunk, weights, remaining = header.columns, 1 << header.chunk_bits, _first_weights(header), k
    for begin in range(0, n, chunk):
        end, left = min(n, begin + chunk), min(header.each, remaining)
        remaining -= left
        total = sum(weights[position % columns] for position in range(begin, end))
        sent: list[int] = []
        for position in range(begin, end):
            if not left:
                break
            weight = weights[position % columns]
            share = CERTAIN if left == end - position else min(max((left << 20) * weight // total, LEAST), MOST)
            total -= weight
            if decide(position, share):
                sent.append(position % columns)
                left -= 1
        for column in sent:
            weights[column] += EVENT
        if any(weights[column] >= MAX_WEIGHT for column in sent):
            weights = [(weight + 1) // 2 for weight in weights]
    return True


def _first_weights(header: ContextHeader) -> list[int]:
    return [32 << header.column_prior] * header.columns


def _walk(n: int, k: int, header: ContextHeader, decide: Decide) -> bool:
    return (_walk_chunks if header.chunk_bits else _walk_rows)(n, k, header, decide)


class _Interval:
    """The interval of an arithmetic coder: 32 bits, of which leading bytes that both ends share are shifted out."""

    def __init__(self) -> None:
        self.low, self.high = 0, 0xFFFFFFFF

    def middle(self, probability: int) -> int:
        return self.low + ((self.high - self.low) * probability >> 20)

    def take(self, sent: bool, middle: int) -> list[int]:
        """Keep the part of a decision; return the bytes that are shifted out."""
        if sent:
            self.high = middle
        else:
            self.low = middle + 1
        shifted = []
        while self.low >> 24 == self.high >> 24:
            shifted.append(self.high >> 24)
            self.low, self.high = self.low << 8 & 0xFFFFFFFF, self.high << 8 & 0xFFFFFFFF | 0xFF
        return shifted

    def final(self) -> tuple[int, int]:
        """Return how many bytes of the end, followed by zeros, are within the interval, and their value."""
        for count in range(5):
            value = self.high >> (32 - 8 * count) << (32 - 8 * count)
            if value >= self.low:
                break
        return count, value


def _prior(counts: Counter[int], lines: int) -> int:
    """Return the prior of rates with these counts: by the variance beyond that of chance."""
    k, squares = sum(counts.values()), sum(count * count for count in counts.values())
    excess = lines * squares - k * k - k * lines
    if excess <= 0:
        return MAX_PRIOR
    return next((p for p in range(MAX_PRIOR) if k * k << 15 <= (excess * 181 * 32) << p), MAX_PRIOR)


def contexts_encode(positions: Tensor, n: int, columns: int, counts: ChunkCounts | None, out: Tensor) -> int:
    """Write the header and the decisions if ``out`` has room for them; return the bytes, 0 if not."""
    listed, k = positions.tolist(), positions.numel()
    assert counts is None or counts.total(n) == k
    row_prior = 0 if counts else _prior(Counter(position // columns for position in listed), num_buckets(n, columns))
    column_prior = _prior(Counter(position % columns for position in listed), columns)
    coded, interval, sending = [], _Interval(), set(listed)

    def decide(position: int, probability: int) -> bool:
        sent = position in sending
        if probability == CERTAIN and not sent:
            raise ValueError("positions that are not ascending, or not those of the chunks' counts")
        coded.extend(interval.take(sent, interval.middle(probability)))
        return sent

    header = ContextHeader(columns, row_prior, column_prior, *((counts.chunk_bits, counts.each) if counts else (0, 0)))
    _walk(n, k, header, decide)
    count, value = interval.final()
    coded.extend(value.to_bytes(4, "big")[:count])
    fields = CONTEXTS | k << 16 | columns << 64 | row_prior << 96 | column_prior << 104 | header.chunk_bits << 112
    data = (fields | header.each << 128).to_bytes(header.nbytes, "little") + bytes(coded)
    if len(data) > out.numel():
        return 0
    write_bytes(out[: len(data)], data)
    return len(data)


def contexts_decode(section: Tensor, n: int, k: int) -> Tensor:
    """Return k ascending positions below n; ``FrameError`` if the section does not hold them."""
    header = read_contexts_header(section, n, k)
    body = read_bytes(section, section.numel())[header.nbytes :]
    positions, interval = [], _Interval()
    value, shifted = int.from_bytes(body[:4].ljust(4, b"\0"), "big"), 0

    def decide(position: int, probability: int) -> bool:
        nonlocal value, shifted
        middle = interval.middle(probability)
        sent = value <= middle
        if sent:
            positions.append(position)
        for _ in interval.take(sent, middle):
            value = value << 8 & 0xFFFFFFFF | (body[4 + shifted] if 4 + shifted < len(body) else 0)
            shifted += 1
        return sent

    complete = _walk(n, k, header, decide)
    count, final = interval.final()
    if not complete or len(body) != shifted + count or value != final:
        raise FrameError(f"the frame holds decisions that do not lead to {k} positions below {n}")
    return torch.tensor(positions, dtype=index_dtype(n), device=section.device)
