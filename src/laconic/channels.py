"""Channel: a codec and its memory for one direction, keyed by slot name, checkpointable.

``ef`` keeps what a lossy codec did not send and adds it to the next round, times its decay; ``momentum`` does so with
momentum applied before compression (Deep Gradient Compression). The residual is the input minus the values that the
receiver decodes from the same bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laconic import counters, kernels, multi_tensor, wire
from laconic._core import bytes_at, zero_bytes
from laconic.codecs import Chain, ChannelStage, parse
from laconic.codecs import spec as grammar
from laconic.codecs.memory import MomentumCorrection, residual_decay
from laconic.errors import ConfigError, InputError, NonFiniteError
from laconic.frames import max_nbytes, write_frame, write_packet
from laconic.kernels import random
from laconic.kernels.interface import NONFINITE
from laconic.packet import FLOATS, Packet, TensorSpec
from laconic.policy import Choice, Policy
from laconic.residual_storage import ResidualStorage, residual_seed
from laconic.residuals import KeepsResiduals, RoundStats

__all__ = ["Channel", "ChannelStats", "channel"]

log = logging.getLogger("laconic")

Stages = tuple[ChannelStage, ...]


@dataclass
class ChannelStats(RoundStats):
    """Counts of a channel."""

    bytes_in: int = 0
    bytes_out: int = 0
    saturated: int = 0
    exempt: dict[str, str] = field(default_factory=dict)
    """Slots that do not get the channel's own spec, with the reason."""


class Channel(KeepsResiduals):
    """Encodes slots by one spec and keeps, per slot, what was not sent.

    Args:
        spec: ``ef|topk:0.01|qsgd:4``, ``ef:0.95|topk:0.01``, ``momentum:0.9|topk:0.001``, or a codec without memory.
        policy: Codecs for slots by name pattern; by default small and one-dimensional tensors are not compressed.
        nonfinite: ``raise`` on a NaN or an infinity, or ``skip``: send zeros, keep the memory and count the event.
        residual_dtype: ``torch.float32``, or ``torch.bfloat16``: half of the memory, rounded stochastically.
        residual_device: None keeps residuals beside their tensors; ``cpu`` those of a GPU in pinned memory of the host.

    >>> import torch, laconic
    >>> channel = laconic.channel("ef|topk:0.5", policy=laconic.Policy(min_numel=0, exempt_1d=False))
    >>> laconic.decode(channel.encode("w", torch.tensor([1.0, 3.0]), seed=0))
    tensor([0., 3.])
    >>> laconic.decode(channel.encode("w", torch.tensor([1.0, 1.0]), seed=1))
    tensor([2., 0.])
    """

    def __init__(
        self, spec: str, *, policy: Policy | Mapping[str, str] | None = None, nonfinite: str = "raise",
        residual_dtype: torch.dtype = torch.float32, residual_device: str | torch.device | None = None,
    ) -> None:  # fmt: skip
        if nonfinite not in ("raise", "skip"):
            raise ConfigError(f"nonfinite must be 'raise' or 'skip', got {nonfinite!r}")
        self.spec = spec
        self.policy = Policy.of(policy)
        self.nonfinite = nonfinite
        self.stats = ChannelStats()
        super().__init__("velocity", self.stats, ResidualStorage.of(residual_dtype, residual_device))
        self._own_buffer = torch.empty(0, dtype=torch.uint8)
        for text in (spec, self.policy.small, *self.policy.rules.values()):
            stages, codec = parse(text)
            if stages and not codec.contractive:
                log.warning("%s: an encoding may add more error than it removes, so the residual can grow", text)

    def __str__(self) -> str:
        stages, codec = parse(self.spec)
        return grammar.format_stages([*stages, *codec.stages])

    def encode(self, slot: str, x: Tensor, *, seed: int = 0) -> bytes:
        """Return the frame of this round's tensor for a slot, and update the slot's memory. ``x`` is not modified.

        An error leaves the memory unchanged, except for a residual that overflowed: it is reset and logged.
        """
        nbytes = self._encode_slot(slot, x, None, seed)
        return bytes_at(self._own_buffer.data_ptr(), nbytes)

    def encode_parts(self, slot: str, x: Tensor, *, seed: int = 0) -> tuple[memoryview, ...]:
        """Return what ``encode`` returns in parts that follow each other, without a copy of what is sent unchanged.

        They are valid until the channel encodes again and while ``x`` does not change.
        """
        choice = self.policy.choose(slot, TensorSpec.of(x), self.spec)
        parts = _unchanged(x) if choice.spec == "none" else None
        if parts is not None:
            self._note_exempt(slot, choice)
            self.stats.rounds += 1
            self.stats.bytes_in += x.nbytes
            self.stats.bytes_out += sum(map(len, parts))
            return parts
        nbytes = self._encode_slot(slot, x, None, seed)
        return (self._own_buffer.numpy().data[:nbytes],)

    def encode_into(self, slot: str, x: Tensor, buffer: Tensor, *, seed: int = 0) -> int:
        """Write the frame into a uint8 tensor of at least ``max_nbytes`` bytes; return the bytes written."""
        return self._encode_slot(slot, x, buffer, seed)

    def encode_all_into(
        self, slots: Sequence[str], tensors: Sequence[Tensor], buffer: Tensor, *, seeds: Sequence[int]
    ) -> list[tuple[int, int] | None]:
        """Write the frames of several slots one behind the other, 16-byte aligned; return where each begins and ends.

        None stands for a slot that is not finite, unless ``nonfinite="skip"``; the other slots are encoded. On a GPU
        the slots are encoded in one launch if the codec has kernels for it. The bytes are the same.
        """
        spans = self._encode_joined(slots, tensors, buffer, seeds)
        if spans is not None:
            return spans
        spans, begin = [], 0
        for slot, x, seed in zip(slots, tensors, seeds, strict=True):
            try:
                end = begin + self.encode_into(slot, x, buffer[begin:], seed=seed)
            except NonFiniteError:
                spans.append(None)
                continue
            spans.append((begin, end))
            begin = wire.align(end)
            zero_bytes(buffer.data_ptr() + end, min(begin, buffer.numel()) - end)
        return spans

    def residuals_of(self, slots: Sequence[str], tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the residuals of slots as they are kept, for an encoder that updates them; None without feedback."""
        if not parse(self.spec)[0]:
            return None
        return [self._stored_residual(slot, x) for slot, x in zip(slots, tensors, strict=True)]

    @property
    def decay(self) -> float:
        """The factor of a residual in the next round."""
        return residual_decay(parse(self.spec)[0])

    def max_nbytes(self, slot: str, x: Tensor) -> int:
        """Return the largest number of bytes that a frame of such a tensor can take."""
        stages, codec = parse(self.policy.choose(slot, TensorSpec.of(x), self.spec).spec)
        return max_nbytes(codec, TensorSpec(tuple(x.shape), torch.float32) if stages else x)

    # ------------------------------------------------------------------------------------------------------ one slot

    def _encode_slot(self, slot: str, x: Tensor, buffer: Tensor | None, seed: int) -> int:
        if not isinstance(x, Tensor) or x.dtype not in FLOATS:
            kind = str(x.dtype).removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"slot {slot!r}: expected a float tensor, got {kind}")
        choice = self.policy.choose(slot, TensorSpec.of(x), self.spec)
        stages, codec = parse(choice.spec)
        self._note_exempt(slot, choice)
        bytes_in, saturated = x.numel() * x.element_size(), counters.counts().get("saturated", 0)
        try:
            if not stages:
                nbytes = self._write(x, codec, seed, buffer)[0]
            else:  # the sum with a residual is float32: rounding it to x's dtype would lose small residuals
                x = x.detach().to(torch.float32)
                nbytes = self._encode_with_memory(slot, x, codec, stages, seed, buffer)
        except NonFiniteError as error:
            if self.nonfinite == "raise":
                raise NonFiniteError(f"slot {slot!r}: {error}") from None
            self.stats.skipped_nonfinite += 1
            self._warn_once(f"nonfinite {slot}", f"slot {slot!r} is not finite: its contribution is dropped")
            zeros = wire.as_bytes(wire.pack(Packet(codec.text, TensorSpec.of(x), ())))
            nbytes = zeros.numel()
            self._buffer_for(nbytes, buffer)[:nbytes].copy_(zeros)
        except InputError as error:
            raise type(error)(f"slot {slot!r}: {error}") from None
        self.stats.rounds += 1
        self.stats.bytes_in += bytes_in
        self.stats.bytes_out += nbytes
        self.stats.saturated += counters.counts().get("saturated", 0) - saturated
        return nbytes

    def _encode_with_memory(
        self, slot: str, x: Tensor, codec: Chain, stages: Stages, seed: int, buffer: Tensor | None
    ) -> int:
        flat = x.resolve_neg().contiguous()
        if not kernels.backend_for(flat).all_finite(flat.view(-1)):
            raise NonFiniteError("expected finite values, got a NaN or an infinity")
        limit = max_nbytes(codec, flat)  # rejects a tensor that cannot be encoded before the memory changes
        stored, velocity = self._stored_residual(slot, flat), None
        residual = self.storage.load(stored, flat.device)
        decay, momentum = residual_decay(stages), _momentum(stages)
        if decay != 1.0:
            residual.mul_(decay)
        if momentum is not None:
            velocity = self._add_momentum(slot, flat, residual, momentum)
        try:
            if velocity is None:
                fused = codec.encode_feedback(flat, residual, seed=seed) if flat.numel() else None
                if fused is not None:
                    self.storage.store(residual, stored, slot, seed)
                    return write_packet(fused, self._buffer_for(limit, buffer, pinned=flat.is_cuda))
                residual.add_(flat)
            nbytes, packet = self._write(residual, codec, seed, buffer)
        except NonFiniteError:
            self._reset_overflowed(slot)
            raise
        codec.accumulate(packet.to(residual.device), residual, -1.0)
        self.storage.store(residual, stored, slot, seed)
        if velocity is not None:
            sent = codec.positions(packet)
            if sent is not None:  # momentum factor masking: the velocity of what was sent starts at zero
                velocity.view(-1).index_fill_(0, sent.to(velocity.device, torch.int64), 0.0)
            self.storage.store(velocity, self._stored_velocity(slot, flat), f"{slot}/velocity", seed)
        return nbytes

    def _stored_residual(self, slot: str, like: Tensor) -> Tensor:
        memory = self._fitting_memory(slot, like.shape, like.device)
        if memory.residual is None:
            memory.residual = self.storage.zeros(like.shape, like.device)
        return memory.residual

    def _stored_velocity(self, slot: str, like: Tensor) -> Tensor:
        memory = self._memory(slot)
        if memory.companion is None:
            memory.companion = self.storage.zeros(like.shape, like.device)
        return memory.companion

    def _add_momentum(self, slot: str, flat: Tensor, residual: Tensor, stage: MomentumCorrection) -> Tensor:
        """Add the momentum-corrected tensor to the residual; return the velocity."""
        velocity = self.storage.load(self._stored_velocity(slot, flat), flat.device)
        if stage.nesterov:
            velocity.mul_(stage.m).add_(flat)
            residual.add_(torch.add(flat, velocity, alpha=stage.m))
        else:
            kernels.backend_for(flat).add_momentum(flat.view(-1), stage.m, velocity.view(-1), residual.view(-1))
        return velocity

    def _write(self, x: Tensor, codec: Chain, seed: int, buffer: Tensor | None) -> tuple[int, Packet]:
        return write_frame(x, codec, self._buffer_for(max_nbytes(codec, x), buffer, pinned=x.is_cuda), seed=seed)

    def _buffer_for(self, nbytes: int, buffer: Tensor | None, *, pinned: bool = False) -> Tensor:
        """Return the caller's buffer, or the channel's own, pinned if a GPU writes it."""
        if buffer is not None:
            return buffer
        if self._own_buffer.numel() < nbytes:
            self._own_buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        return self._own_buffer

    def _note_exempt(self, slot: str, choice: Choice) -> None:
        if choice.reason and slot not in self.stats.exempt:
            self.stats.exempt[slot] = f"{choice.spec}: {choice.reason}"
            log.info("slot %r travels as %r instead of %r: it %s", slot, choice.spec, self.spec, choice.reason)

    # -------------------------------------------------------------------------------------------- many slots at once

    def _encode_joined(
        self, slots: Sequence[str], tensors: Sequence[Tensor], buffer: Tensor, seeds: Sequence[int]
    ) -> list[tuple[int, int] | None] | None:
        """Encode all slots in one launch; None, with no effect, if that is not possible."""
        choices = [
            self.policy.choose(slot, TensorSpec.of(x), self.spec) for slot, x in zip(slots, tensors, strict=True)
        ]
        if len({choice.spec for choice in choices}) != 1 or self.nonfinite != "raise":
            return None
        stages, codec = parse(choices[0].spec)
        if _momentum(stages) is not None or not multi_tensor.supports(codec, tensors):
            return None
        for slot, choice in zip(slots, choices, strict=True):
            self._note_exempt(slot, choice)
        finite, residuals = list(range(len(slots))), None
        if stages:  # an error must leave the memory unchanged, so it is detected beforehand
            finite = [i for i, bits in enumerate(multi_tensor.amax_bits(tensors)) if bits < NONFINITE]
            residuals = self._load_joined([slots[i] for i in finite], [tensors[i] for i in finite])
        spans: list[tuple[int, int] | None] = [None] * len(slots)
        if not finite:
            return spans
        decay = residual_decay(stages)
        if residuals is not None and decay != 1.0:
            torch._foreach_mul_(residuals, decay)
        written = multi_tensor.write_frames(
            [tensors[i] for i in finite], codec, buffer, seeds=[seeds[i] for i in finite], residuals=residuals
        )
        if residuals is not None and finite:
            self._store_joined([slots[i] for i in finite], residuals, [seeds[i] for i in finite])
        for i, span in zip(finite, written, strict=True):
            spans[i] = span
            if span is not None:
                self.stats.rounds += 1
                self.stats.bytes_in += tensors[i].numel() * tensors[i].element_size()
                self.stats.bytes_out += span[1] - span[0]
            elif stages:
                self._reset_overflowed(slots[i])
        return spans

    def _load_joined(self, slots: Sequence[str], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the residuals of slots as float32 tensors on a GPU, in two launches if they are kept otherwise."""
        stored = [self._stored_residual(slot, x) for slot, x in zip(slots, tensors, strict=True)]
        if not stored or self.storage.in_place(tensors[0].device):
            return stored
        residuals = [torch.empty_like(x) for x in tensors]
        self.storage.load_all(stored, residuals)
        return residuals

    def _store_joined(self, slots: Sequence[str], residuals: Sequence[Tensor], seeds: Sequence[int]) -> None:
        if self.storage.in_place(residuals[0].device):
            return
        stored = [x for x in map(self.stored, slots) if x is not None]
        seeds = [residual_seed(slot, seed) for slot, seed in zip(slots, seeds, strict=True)]
        keys = random.keys(seeds, random.RESIDUALS).to(residuals[0].device, non_blocking=True)
        self.storage.store_all(residuals, stored, keys)


def channel(
    spec: str, *, policy: Policy | Mapping[str, str] | None = None, nonfinite: str = "raise",
    residual_dtype: torch.dtype = torch.float32, residual_device: str | torch.device | None = None,
) -> Channel:  # fmt: skip
    """Return a channel for a spec such as ``ef|topk:0.01|qsgd:4``; see ``Channel`` for the arguments."""
    return Channel(
        spec, policy=policy, nonfinite=nonfinite, residual_dtype=residual_dtype, residual_device=residual_device
    )


def _unchanged(x: Tensor) -> tuple[memoryview, memoryview] | None:
    """Return the header of the frame of ``none``, and its payload: the tensor's own memory.

    None for a tensor that is not finite, or whose memory is no payload: ``encode`` copies, converts or rejects it.
    """
    if not x.is_cpu or x.dtype != torch.float32 or not x.is_contiguous() or x.is_neg() or not x.numel():
        return None
    flat = x.detach().view(-1)
    if not kernels.cpu.all_finite(flat):
        return None
    max_nbytes("none", x)  # checks that the shape can be on the wire
    payload = flat.view(torch.uint8)
    header = wire.header_of_section(Packet("none", TensorSpec.of(x), (payload,)))
    return memoryview(header), payload.numpy().data


def _momentum(stages: Stages) -> MomentumCorrection | None:
    """Return the stage that applies momentum. It includes error feedback, so ``ef`` beside it adds only its decay."""
    return next((stage for stage in stages if isinstance(stage, MomentumCorrection)), None)
