"""Decoded values and frame sizes of a channel, computed for all slots at once on their device, without frames.

Frames of every slot, iteration and worker cost hundreds of small kernels and as many waits on a GPU. Here the same
arithmetic runs over all slots together without waiting for the host, so that an iteration can be one CUDA graph. Values
equal those that the frames decode to, bit for bit, and sizes are equal byte for byte. The symbols of an entropy coder
are coded by the coder itself on the host afterwards. Tests compare every codec here with real frames, and every run
compares samples.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs import Chain, ChannelStage, parse
from laconic.codecs.cast import BF16, Raw
from laconic.codecs.coders import ChunkCoder
from laconic.codecs.memory import MomentumCorrection, residual_decay
from laconic.codecs.qsgd import QSGD
from laconic.codecs.sign import Sign
from laconic.codecs.topk import TopK, num_kept
from laconic.errors import ConfigError
from laconic.kernels import random
from laconic.kernels.sections import POSITIONS_HEADER, coded_max_nbytes, low_bits_candidates, packed_nbytes
from laconic.packet import TensorSpec
from laconic.policy import Policy
from laconic.wire import ALIGN, FramePlan
from laconic_lab.studies.kothari2021 import passes

__all__ = ["ComputedChannel", "SentValues", "in_order", "rounding_keys", "splitmix64"]

log = logging.getLogger("laconic")


class SentValues(NamedTuple):
    """Decoded values of ``numel`` values of the flat tensor from ``first`` on: of all, or of those at positions."""

    positions: Tensor | None
    first: int
    numel: int
    values: Tensor

    def add_to(self, out: Tensor, weight: float) -> None:
        """Add weight * values, with two roundings, as frames are added."""
        values = self.values if weight == 1.0 else self.values * weight
        if self.positions is None:
            out[self.first : self.first + values.numel()].add_(values)
        else:
            out.index_put_((self.positions,), out[self.positions] + values)


def rounding_keys(seeds: np.ndarray) -> Tensor:
    """Return the low and high words of the keys of stochastic rounding for seeds (uint64) of any shape."""
    with np.errstate(over="ignore"):
        keys = splitmix64(splitmix64(seeds) ^ np.uint64(random.stream_word(random.ROUNDING)))
    words = np.stack([keys & np.uint64(random.M32), keys >> np.uint64(32)], -1)
    return torch.from_numpy(words.astype(np.int64))


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Return ``random.splitmix64`` of many numbers."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def in_order(slots: Mapping[str, Sequence[int]], policy: Policy) -> list[str]:
    """Return the slots with exempt ones last, so that slots of one codec are contiguous in a flat tensor."""
    exempt = {
        name: bool(policy.choose(name, TensorSpec(tuple(shape), torch.float32), "none").reason)
        for name, shape in slots.items()
    }
    return sorted(slots, key=lambda name: exempt[name])  # stable


class ComputedChannel:
    """A channel over slots that are consecutive in a flat float32 tensor.

    Args:
        slots: Names and shapes in the order of the flat tensor; slots of one codec are consecutive.
        policy: Decides which slots get another codec.
        ring: Number of rounds whose sizes are kept until ``nbytes`` reads them.
    """

    def __init__(
        self, slots: Mapping[str, Sequence[int]], spec: str, policy: Policy, device: torch.device, ring: int = 1
    ) -> None:
        self.ring = ring
        self._groups: list[_SlotGroup] = []
        first, names = 0, list(slots)
        specs = [policy.choose(name, TensorSpec(tuple(slots[name]), torch.float32), spec).spec for name in names]
        begin = 0
        for end in range(1, len(names) + 1):
            if end == len(names) or specs[end] != specs[begin]:
                shapes = [tuple(slots[name]) for name in names[begin:end]]
                group = _SlotGroup(range(begin, end), shapes, first, specs[begin], device, ring)
                self._groups.append(group)
                first += group.numel
                begin = end

    @property
    def seeded(self) -> bool:
        """Whether the values of a round depend on its seeds."""
        return any(isinstance(g.codec.values, QSGD) and g.codec.values.round == "stochastic" for g in self._groups)

    def state(self) -> list[Tensor]:
        """Return all memory between rounds."""
        return [x for group in self._groups for x in (group.residual, group.velocity) if x is not None]

    def memories(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return a copy of the memory in the form of ``Channel.state_dict``."""
        memories: dict[str, Tensor] = {}
        for group in self._groups:
            for slot, (begin, end), shape in zip(group.members, group.spans, group.shapes, strict=True):
                for kind, x in (("residual", group.residual), ("velocity", group.velocity)):
                    if x is not None:
                        memories[f"{names[slot]}/{kind}"] = x[begin:end].view(shape).clone()
        return memories

    def send(self, x: Tensor, keys: Tensor | None, at: Tensor) -> list[SentValues]:
        """Return what the receiver decodes in this round, and update the memory.

        Args:
            x: This round's tensors, flat.
            keys: ``rounding_keys`` of the slots' seeds, in the order of the slots; None if nothing is random.
            at: Index of this round in the ring, an int64 tensor with one element on the device.
        """
        return [
            group.send(
                x[group.first : group.first + group.numel],
                None if keys is None else keys[group.members.start : group.members.stop],
                at,
            )
            for group in self._groups
        ]

    def nbytes(self, rounds: int) -> np.ndarray:
        """Return the bytes of all frames of each of the first ``rounds`` rounds in the ring."""
        return sum((group.nbytes(rounds) for group in self._groups), np.zeros(rounds, np.int64))


class _SlotGroup:
    """Consecutive slots of the flat tensor that share a codec."""

    def __init__(
        self, members: range, shapes: Sequence[tuple[int, ...]], first: int, spec: str, device: torch.device, ring: int
    ) -> None:
        stages, self.codec = parse(spec)
        self.stage, self.decay = _memory(stages), residual_decay(stages)
        self.members, self.shapes, self.first = members, list(shapes), first
        self.sizes = [TensorSpec(shape, torch.float32).numel for shape in shapes]
        self.numel = sum(self.sizes)
        ends = np.cumsum(self.sizes).tolist()
        self.spans = list(zip([0, *ends[:-1]], ends, strict=True))
        self.residual = torch.zeros(self.numel, device=device) if self.stage is not None else None
        corrects = isinstance(self.stage, MomentumCorrection)
        self.velocity = torch.zeros(self.numel, device=device) if corrects else None
        codec, selector = self.codec, self.codec.selector
        if not isinstance(selector, (TopK, type(None))) or (selector and (selector.approx or selector.chunk)):
            raise ConfigError(f"the only selector that is computed here is topk:keep, got {selector}")
        if selector and not isinstance(codec.values, (QSGD, Sign)):
            raise ConfigError(f"topk must be followed by qsgd or sign here, got {codec}")
        if not isinstance(codec.values, (QSGD, Sign, Raw, BF16, type(None))):
            raise ConfigError(f"only qsgd, sign, bf16 and none are computed here, got {codec.values}")
        self.counts = [num_kept(selector.keep, n) if selector else n for n in self.sizes]
        self._topk = _TopKPositions(self, device, ring) if selector else None
        bucketed = isinstance(codec.values, (QSGD, Sign))
        self._buckets = _Buckets(self.counts, codec.values, device, ring, codec.coder is not None) if bucketed else None  # type: ignore[arg-type]

    @torch.no_grad()
    def send(self, x: Tensor, keys: Tensor | None, at: Tensor) -> SentValues:
        if self.residual is not None:
            if self.velocity is not None:
                assert isinstance(self.stage, MomentumCorrection)
                self.velocity.mul_(self.stage.m).add_(x)
                look_ahead = self.stage.nesterov
                x = torch.add(x, self.velocity, alpha=self.stage.m) if look_ahead else self.velocity
            if self.decay != 1.0:
                self.residual.mul_(self.decay)
            x = self.residual.add_(x)
        positions = None if self._topk is None else self._topk.choose(x, at)
        values = x if positions is None else x[positions]
        nonzero: Tensor | None = None
        if self._buckets is not None:
            values, nonzero = self._buckets.round_trip(values, keys, at)
        elif isinstance(self.codec.values, BF16):
            values = values.to(torch.bfloat16).to(torch.float32)
        elif self.residual is not None and positions is None:
            values = values.clone()  # all values are sent, and the residual is set to zero below
        if self.residual is not None:
            if positions is None:
                self.residual.add_(values * -1.0)
            else:
                self.residual.index_put_((positions,), self.residual[positions] + values * -1.0)
            if self.velocity is not None and positions is not None:
                left = torch.zeros_like(values)
                if nonzero is not None:  # a slot of zeros sends nothing, so it keeps its velocity
                    assert self._buckets is not None
                    left = torch.where(nonzero[self._buckets.slot_of_value], left, self.velocity[positions])
                self.velocity.index_put_((positions,), left)
        if positions is not None:
            positions = positions + self.first
        return SentValues(positions, self.first, self.numel, values)

    def nbytes(self, rounds: int) -> np.ndarray:
        """Return the bytes of each round from the rings."""
        total = np.zeros(rounds, np.int64)
        positions = None if self._topk is None else self._topk.nbytes(rounds)
        buckets = None if self._buckets is None else self._buckets.read(rounds)
        for i, (shape, k) in enumerate(zip(self.shapes, self.counts, strict=True)):
            spec = TensorSpec(shape, torch.float32)
            sections = [] if positions is None else [positions[:, i]]
            if buckets is None:
                sections.append(np.full(rounds, (2 if isinstance(self.codec.values, BF16) else 4) * k))
            else:
                assert self._buckets is not None
                floats, packed = (np.full(rounds, nbytes) for nbytes in self._buckets.section_nbytes(i))
                if buckets.symbols is not None:
                    by_round = buckets.symbols[:, self._buckets.span(i)]
                    packed = np.array([_coded_nbytes(symbols, self.codec) for symbols in by_round])
                sections += [floats, packed]
            nbytes = _frames_nbytes(self.codec.text, spec, sections)
            if buckets is not None:
                nbytes = np.where(buckets.nonzero[:, i], nbytes, FramePlan.of(self.codec.text, spec, ()).limit)
            total += nbytes
        return total


def _memory(stages: Sequence[ChannelStage]) -> ChannelStage | None:
    return next((stage for stage in stages if isinstance(stage, MomentumCorrection)), stages[0] if stages else None)


def _frames_nbytes(codec: str, spec: TensorSpec, sections: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sizes of frames whose sections have these sizes, an array for each section."""
    total = np.zeros_like(sections[0])
    for nbytes in sections:
        total = (total + ALIGN - 1) // ALIGN * ALIGN + nbytes
    return total + FramePlan.of(codec, spec, (0,) * len(sections)).start


def _coded_nbytes(symbols: Tensor, codec: Chain) -> int:
    """Return the size of the section that the coder makes of the symbols."""
    alphabet = codec.values.max_alphabet  # type: ignore[union-attr]
    coder = codec.coder
    assert isinstance(coder, ChunkCoder)
    buffer = torch.empty(coded_max_nbytes(symbols.numel(), alphabet), dtype=torch.uint8)
    coding = coder.auto if coder.mode == "auto" else coder.pure
    return kernels.backend_for(symbols).encode_symbols(symbols, alphabet, coding, buffer)


class _TopKPositions:
    """Selects the largest values of each slot of a group and computes the sizes of the position sections."""

    def __init__(self, group: _SlotGroup, device: torch.device, ring: int) -> None:
        spans, counts, sizes = group.spans, group.counts, group.sizes
        low = [(low_bits_candidates(n, k) * 3)[:3] for n, k in zip(sizes, counts, strict=True)]
        fixed = [
            [POSITIONS_HEADER + packed_nbytes(k, bits) for bits in candidates]
            for k, candidates in zip(counts, low, strict=True)
        ]
        self._fixed = torch.tensor(fixed, dtype=torch.int64).T.contiguous().to(device)  # [candidate, slot]
        self._k = torch.tensor(counts, device=device)
        bitmaps = [POSITIONS_HEADER + -(-n // 8) for n in sizes]
        self._bitmap = torch.tensor(bitmaps, dtype=torch.int64).to(device)
        self._all = torch.tensor([k == n for k, n in zip(counts, sizes, strict=True)]).to(device)
        self._ring = torch.zeros(ring, len(spans), dtype=torch.int64, device=device)
        module = kernels_on(device)
        self._selector = module.Selector(spans, counts, device)
        self._gaps = module.Gaps(spans, counts, torch.tensor(low, dtype=torch.int64, device=device).T.contiguous())

    def choose(self, x: Tensor, at: Tensor) -> Tensor:
        """Return ascending positions within the group; the sizes of the sections go into the ring."""
        positions: Tensor = self._selector.choose(x)
        unary = self._k + self._gaps.high_sums(positions)
        rice = (self._fixed + (unary + 7) // 8).amin(0)
        nbytes = torch.where(self._all, POSITIONS_HEADER, torch.minimum(rice, self._bitmap))
        self._ring.index_copy_(0, at, nbytes.unsqueeze(0))
        return positions

    def nbytes(self, rounds: int) -> np.ndarray:
        nbytes: np.ndarray = self._ring[:rounds].cpu().numpy()
        return nbytes


@lru_cache(maxsize=16)
def kernels_on(device: torch.device) -> Any:
    """Return the module that computes on a device: ``fused`` where Triton compiles kernels, otherwise ``passes``."""
    if device.type == "cuda":
        try:
            from laconic_lab.studies.kothari2021 import fused

            return fused
        except ImportError as error:
            log.warning("exchanges are computed in many passes, which is slow, because Triton is missing: %s", error)
    return passes


class _BucketRing(NamedTuple):
    """Copies of the rings of ``_Buckets`` on the host."""

    nonzero: np.ndarray
    """Whether a slot has a value other than zero, by round and slot."""
    symbols: Tensor | None


class _Buckets:
    """Quantizes the values of several slots in buckets; every slot begins with a new bucket."""

    def __init__(
        self, counts: Sequence[int], quantizer: QSGD | Sign, device: torch.device, ring: int, coded: bool
    ) -> None:
        self.counts, self.quantizer = list(counts), quantizer
        self._round_trip = kernels_on(device).RoundTrip(counts, quantizer, device, coded)
        slots = torch.arange(len(counts), device=device)
        self.slot_of_value = slots.repeat_interleave(torch.tensor(counts, device=device))
        self._nonzero = torch.zeros(ring, len(counts), dtype=torch.bool, device=device)
        num = sum(self.counts)
        self._symbols = torch.zeros(ring, num, dtype=torch.uint8, device=device) if coded else None

    def span(self, slot: int) -> slice:
        begin = sum(self.counts[:slot])
        return slice(begin, begin + self.counts[slot])

    def section_nbytes(self, slot: int) -> tuple[int, int]:
        floats, packed = self.quantizer.section_nbytes(self.counts[slot], 4)
        return floats, packed

    def read(self, rounds: int) -> _BucketRing:
        symbols = None if self._symbols is None else self._symbols[:rounds].cpu()
        return _BucketRing(self._nonzero[:rounds].cpu().numpy(), symbols)

    def round_trip(self, values: Tensor, keys: Tensor | None, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return the decoded values, and for each slot whether it has a value other than zero."""
        decoded, nonzero, symbols = self._round_trip(values, keys)
        self._nonzero.index_copy_(0, at, nonzero.unsqueeze(0))
        if self._symbols is not None:
            assert symbols is not None
            self._symbols.index_copy_(0, at, symbols.unsqueeze(0))
        return decoded, nonzero
