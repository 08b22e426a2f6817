"""What a quantizer decodes to, Top-k and sizes of positions, by passes of torch over the values of all slots.

These run on every device. ``fused`` has the same classes for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.codecs.qsgd import QSGD
from laconic.codecs.sign import Sign
from laconic.kernels import random
from laconic.kernels.interface import FLOAT32_MAX
from laconic.kernels.reference.quantizers import _bucket_norms, _steps, _stochastic_symbols
from laconic.kernels.reference.reductions import PIECE, pairwise_sum
from laconic.kernels.sections import num_buckets

__all__ = ["Gaps", "RoundTrip", "Selector"]

FAR = 0xFFFFFFFF
"""Larger than every index within a slot."""


class Selector:
    """Selects the largest magnitudes of each of several slots of a flat tensor; of equal ones the lowest indices.

    Args:
        spans: Begin and end of each slot.
        counts: How many each slot keeps.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], counts: Sequence[int], device: torch.device) -> None:
        self._spans, self._counts = list(spans), list(counts)
        ranks = [FAR - torch.arange(end - begin, dtype=torch.int64) for begin, end in spans]
        self._rank = torch.cat(ranks).to(device)

    def choose(self, x: Tensor) -> Tensor:
        """Return the kept positions of all slots (int64), ascending."""
        order = (x.view(torch.int32) & 0x7FFFFFFF).to(torch.int64) << 32 | self._rank
        chosen = [
            order[begin:end].topk(k, sorted=False).indices + begin
            for (begin, end), k in zip(self._spans, self._counts, strict=True)
        ]
        return torch.cat(chosen).sort().values


class Gaps:
    """The gaps between the kept positions of each slot, on which the sizes of coded positions depend.

    Args:
        spans: Begin and end of each slot in the flat tensor.
        counts: Number of positions of each slot.
        low: Numbers of low bits by candidate and slot, int64.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], counts: Sequence[int], low: Tensor) -> None:
        device, numbers = low.device, torch.tensor(counts)
        self._low = low
        self._slot = torch.arange(len(spans)).repeat_interleave(numbers).to(device)
        starts = torch.tensor([begin for begin, _ in spans], dtype=torch.int64)
        self._before = starts.repeat_interleave(numbers).to(device) - 1
        is_head = torch.zeros(int(numbers.sum()), dtype=torch.bool)
        is_head[torch.cumsum(numbers, 0) - numbers] = True
        self._is_head = is_head.to(device)
        self._lasts = (torch.cumsum(numbers, 0) - 1).to(device)

    def high_sums(self, positions: Tensor) -> Tensor:
        """Return the sums (int64) of the gaps without their low bits, by candidate and slot."""
        previous = torch.cat([positions.new_zeros(1), positions[:-1]])
        gaps = positions - torch.where(self._is_head, self._before, previous) - 1
        shifted = gaps >> self._low[:, self._slot]
        high = shifted.cumsum(1)[:, self._lasts]
        return torch.diff(high, dim=1, prepend=high.new_zeros(len(high), 1))


class RoundTrip:
    """What a quantizer's frames of several slots decode to; the slots follow one another in a flat tensor.

    Args:
        counts: Number of values of each slot.
        coded: Whether the symbols are returned, too.
    """

    def __init__(self, counts: Sequence[int], quantizer: QSGD | Sign, device: torch.device, coded: bool) -> None:
        self._counts, self._quantizer, self._coded = list(counts), quantizer, coded
        bucket = self._bucket = quantizer.bucket or PIECE  # without buckets the rows of a slot share its norm
        rows = self._rows = [num_buckets(k, bucket) for k in counts]
        indices = [torch.arange(k, dtype=torch.int64) for k in counts]
        starts = [bucket * sum(rows[:i]) for i in range(len(rows))]
        self._place = torch.cat([index + start for index, start in zip(indices, starts, strict=True)]).to(device)
        self._padded = bucket * sum(rows)
        self._whole = self._padded == self._place.numel()
        self._slot_of_row = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows)).to(device)
        self._filled = torch.cat([
            torch.tensor([bucket] * (row - 1) + [k - (row - 1) * bucket], dtype=torch.float32)
            for row, k in zip(rows, self._counts, strict=True)
        ]).to(device)  # fmt: skip
        self._stochastic = isinstance(quantizer, QSGD) and quantizer.round == "stochastic"
        if self._stochastic:
            element = torch.cat([torch.arange(bucket * row, dtype=torch.int64) for row in rows])
            self._counter = (((element >> 8) << 3) | (element & 7)).to(device)
            factors = torch.tensor([random.row_factor(r) for r in range(32)], dtype=torch.int64)
            self._factor = factors[(element >> 3) & 31].to(device)
            self._slot_of_padded = self._slot_of_row.repeat_interleave(bucket)

    def __call__(self, values: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return decoded values, whether each slot has a value other than zero, and the symbols (uint8).

        Args:
            keys: Two words for each slot, int64 below 2^32; None where nothing is random.
        """
        bucket = self._bucket
        if self._whole:
            rows = values.view(-1, bucket)
        else:
            rows = values.new_zeros(self._padded).index_copy_(0, self._place, values).view(-1, bucket)
        magnitudes = rows.abs().amax(1)
        largest = magnitudes.new_zeros(len(self._counts)).scatter_reduce_(0, self._slot_of_row, magnitudes, "amax")
        if isinstance(self._quantizer, Sign):
            scaled = pairwise_sum(rows.abs() * (1.0 / bucket))
            scale = (scaled * (torch.full_like(self._filled, bucket) / self._filled)).clamp(
                max=torch.finfo(torch.float32).max
            )
            negative = rows.view(torch.int32) < 0
            symbols = negative.to(torch.int64)
            scales = scale.unsqueeze(1).expand_as(rows)
            decoded = torch.where(negative, -scales, scales)
        else:
            bits = self._quantizer.bits
            levels, fraction_bits = (1 << (bits - 1)) - 1, 31 - bits
            l2 = self._quantizer.norm == "l2"
            norms = _bucket_norms(rows, l2) if self._quantizer.bucket else self._slot_norms(rows, largest, l2)
            noise = self._noise(keys, fraction_bits).view(-1, bucket) if self._stochastic else self._half(rows, bits)
            symbols = _stochastic_symbols(rows, norms, levels, fraction_bits, noise)
            centred = (symbols - levels).clamp(max=levels)
            decoded = centred.to(torch.float32) * _steps(norms, levels).unsqueeze(1)
        symbols = symbols.to(torch.uint8)
        if self._whole:
            return decoded.reshape(-1), largest > 0, symbols.view(-1) if self._coded else None
        return decoded.reshape(-1)[self._place], largest > 0, symbols.view(-1)[self._place] if self._coded else None

    def _slot_norms(self, rows: Tensor, largest: Tensor, l2: bool) -> Tensor:
        """Return for each row the norm of its slot, as ``reference.whole_norm`` computes it."""
        if l2:
            sums = pairwise_sum(rows.to(torch.float64).square())
            roots = []
            for slot_sums in torch.split(sums, self._rows):
                padded = sums.new_zeros(1, max(16, 1 << (slot_sums.numel() - 1).bit_length()))
                padded[0, : slot_sums.numel()] = slot_sums
                roots.append(pairwise_sum(padded).sqrt().to(torch.float32))
            largest = torch.maximum(torch.cat(roots), largest).clamp(max=FLOAT32_MAX)
        return largest[self._slot_of_row]

    def _half(self, rows: Tensor, bits: int) -> Tensor:
        return torch.full((1, 1), 1 << (30 - bits), dtype=torch.int64, device=rows.device)

    def _noise(self, keys: Tensor | None, fraction_bits: int) -> Tensor:
        """Return ``random.dither`` with a key for every slot."""
        assert keys is not None
        words = keys[self._slot_of_padded]
        hashes = random.hash32_by_words(self._counter, words[:, 0], words[:, 1])
        return random.multiply32(hashes, self._factor) >> (32 - fraction_bits)
