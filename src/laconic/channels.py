"""Channel: a codec and its memory for one direction, keyed by slot name, checkpointable.

``ef`` keeps what a lossy codec failed to send and adds it to the next round; ``momentum`` does so with momentum
applied before compression (Deep Gradient Compression). Both keep their promise by arithmetic on the very bytes sent:
the residual is the input minus what the receiver will decode.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laconic import counters, kernels, multi_tensor, wire
from laconic._core import bytes_at, zero_bytes
from laconic.codecs import Chain, ChannelStage, parse
from laconic.codecs import spec as grammar
from laconic.codecs.memory import MomentumCorrection
from laconic.errors import ConfigError, InputError, NonFiniteError
from laconic.frames import max_nbytes, write_frame, write_packet
from laconic.kernels.interface import NONFINITE
from laconic.packet import FLOATS, Packet, TensorSpec
from laconic.policy import Choice, Policy

__all__ = ["Channel", "ChannelStats", "channel"]

log = logging.getLogger("laconic")


@dataclass
class ChannelStats:
    """What a channel has done so far; every count here was also logged once."""

    rounds: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    skipped_nonfinite: int = 0
    residual_resets: int = 0
    saturated: int = 0
    exempt: dict[str, str] = field(default_factory=dict)
    """Slots that do not get the channel's own spec, and why."""


@dataclass
class _Memory:
    """What one slot remembers."""

    residual: Tensor
    velocity: Tensor | None = None

    def on(self, device: torch.device) -> _Memory:
        """The same memory where the tensors now are: a state loaded on the CPU may serve a GPU."""
        if self.residual.device != device:
            self.residual = self.residual.to(device)
            self.velocity = None if self.velocity is None else self.velocity.to(device)
        return self


class Channel:
    """Encodes slots by one spec, remembering per slot what was not sent.

    Args:
        spec: ``ef|topk:0.01|qsgd:4``, ``momentum:0.9|topk:0.001``, or a codec without memory.
        policy: Codecs for slots by name pattern; by default small and one-dimensional tensors go uncompressed.
        nonfinite: ``raise`` on a NaN or an infinity, or ``skip``: send zeros, keep the memory, count it.

    >>> import torch, laconic
    >>> channel = laconic.channel("ef|topk:0.5", policy=laconic.Policy(min_numel=0, exempt_1d=False))
    >>> laconic.decode(channel.encode("w", torch.tensor([1.0, 3.0]), seed=0))
    tensor([0., 3.])
    >>> laconic.decode(channel.encode("w", torch.tensor([1.0, 1.0]), seed=1))
    tensor([2., 0.])
    """

    def __init__(
        self, spec: str, *, policy: Policy | Mapping[str, str] | None = None, nonfinite: str = "raise"
    ) -> None:
        if nonfinite not in ("raise", "skip"):
            raise ConfigError(f"nonfinite must be 'raise' or 'skip', got {nonfinite!r}")
        self.spec = spec
        self.policy = Policy.of(policy)
        self.nonfinite = nonfinite
        self.stats = ChannelStats()
        self._memories: dict[str, _Memory] = {}
        self._warn_once = counters.LogOnce("channel.stats")
        self._room = torch.empty(0, dtype=torch.uint8)
        for each in (spec, self.policy.small, *self.policy.rules.values()):
            stages, codec = parse(each)
            if stages and not codec.contractive:
                log.warning("%s: an encoding may add more error than it removes, so the residual can grow", each)

    def __str__(self) -> str:
        stages, codec = parse(self.spec)
        return grammar.text([*stages, *codec.stages])

    def encode(self, slot: str, x: Tensor, *, seed: int = 0) -> bytes:
        """The frame of this round's tensor for a slot. ``x`` is left alone; the slot's memory moves on.

        An error leaves the memory as it was, except where a residual itself overflowed: that one is reset and logged.
        """
        nbytes = self._encode_slot(slot, x, None, seed)
        return bytes_at(self._room.data_ptr(), nbytes)

    def encode_into(self, slot: str, x: Tensor, buffer: Tensor, *, seed: int = 0) -> int:
        """The same into a uint8 tensor that the caller keeps (``max_nbytes`` bytes suffice); returns the bytes."""
        return self._encode_slot(slot, x, buffer, seed)

    def encode_all_into(
        self, slots: Sequence[str], tensors: Sequence[Tensor], room: Tensor, *, seeds: Sequence[int]
    ) -> list[tuple[int, int] | None]:
        """Frames of several slots, one behind the other from multiples of 16 on: where each begins and ends.

        None stands for a slot that is not finite, where that is not skipped; the others go on. On a GPU they are
        encoded together where the codec has kernels for it, which saves launches and waits and changes no byte.
        """
        found = self._encode_together(slots, tensors, room, seeds)
        if found is not None:
            return found
        found, at = [], 0
        for slot, x, seed in zip(slots, tensors, seeds, strict=True):
            try:
                end = at + self.encode_into(slot, x, room[at:], seed=seed)
            except NonFiniteError:
                found.append(None)
                continue
            found.append((at, end))
            at = wire.align(end)
            zero_bytes(room.data_ptr() + end, min(at, room.numel()) - end)
        return found

    def max_nbytes(self, slot: str, x: Tensor) -> int:
        """The most bytes that a frame of such a tensor can take."""
        stages, codec = parse(self.policy.choose(slot, TensorSpec.of(x), self.spec).spec)
        return max_nbytes(codec, TensorSpec(tuple(x.shape), torch.float32) if stages else x)

    def _encode_slot(self, slot: str, x: Tensor, room: Tensor | None, seed: int) -> int:
        if not isinstance(x, Tensor) or x.dtype not in FLOATS:
            what = str(x.dtype).removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"slot {slot!r}: expected a float tensor, got {what}")
        choice = self.policy.choose(slot, TensorSpec.of(x), self.spec)
        stages, codec = parse(choice.spec)
        self._say_exempt(slot, choice)
        bytes_in, saturated = x.numel() * x.element_size(), counters.counts().get("saturated", 0)
        memory_stage = _memory_stage(stages)
        if memory_stage is not None:  # the sum with a residual is float32, and rounding it away would lose it
            x = x.detach().to(torch.float32)
        try:
            nbytes = self._encode(slot, x, codec, memory_stage, seed, room)
        except NonFiniteError as error:
            if self.nonfinite == "raise":
                raise NonFiniteError(f"slot {slot!r}: {error}") from None
            self.stats.skipped_nonfinite += 1
            self._warn_once(f"nonfinite {slot}", f"slot {slot!r} is not finite: its contribution is dropped")
            nothing = Packet(codec.text, TensorSpec.of(x), ())
            frame = wire.as_bytes(wire.pack(nothing))
            nbytes = frame.numel()
            self._room_of(nbytes, room)[:nbytes].copy_(frame)
        except InputError as error:
            raise type(error)(f"slot {slot!r}: {error}") from None
        self.stats.rounds += 1
        self.stats.bytes_in += bytes_in
        self.stats.bytes_out += nbytes
        self.stats.saturated += counters.counts().get("saturated", 0) - saturated
        return nbytes

    def _encode_together(
        self, slots: Sequence[str], tensors: Sequence[Tensor], room: Tensor, seeds: Sequence[int]
    ) -> list[tuple[int, int] | None] | None:
        """The same at once; None, and nothing has happened, where they cannot go together."""
        choices = [
            self.policy.choose(slot, TensorSpec.of(x), self.spec) for slot, x in zip(slots, tensors, strict=True)
        ]
        if len({choice.spec for choice in choices}) != 1 or self.nonfinite != "raise":
            return None
        stages, codec = parse(choices[0].spec)
        memory_stage = _memory_stage(stages)
        if isinstance(memory_stage, MomentumCorrection) or not multi_tensor.fits(codec, tensors):
            return None
        for slot, choice in zip(slots, choices, strict=True):
            self._say_exempt(slot, choice)
        good, residuals = list(range(len(slots))), None
        if memory_stage is not None:  # an error leaves the memory as it was, so it must be known beforehand
            good = [i for i, amax_bits in enumerate(multi_tensor.amax_bits_all(tensors)) if amax_bits < NONFINITE]
            residuals = [self._memory(slots[i], tensors[i]).residual for i in good]
        found: list[tuple[int, int] | None] = [None] * len(slots)
        if not good:
            return found
        spans = multi_tensor.write_frames(
            [tensors[i] for i in good], codec, room, seeds=[seeds[i] for i in good], residuals=residuals
        )
        for i, span in zip(good, spans, strict=True):
            found[i] = span
            if span is not None:
                self.stats.rounds += 1
                self.stats.bytes_in += tensors[i].numel() * tensors[i].element_size()
                self.stats.bytes_out += span[1] - span[0]
            elif memory_stage is not None:
                self._reset_overflowed(slots[i])
        return found

    def _reset_overflowed(self, slot: str) -> None:
        self._memories.pop(slot)
        self.stats.residual_resets += 1
        log.warning("slot %r: its residual overflowed float32 and is reset", slot)

    def _say_exempt(self, slot: str, choice: Choice) -> None:
        if choice.reason and slot not in self.stats.exempt:
            self.stats.exempt[slot] = f"{choice.spec}: {choice.reason}"
            log.info("slot %r travels as %r instead of %r: it %s", slot, choice.spec, self.spec, choice.reason)

    def _room_of(self, nbytes: int, room: Tensor | None, *, pinned: bool = False) -> Tensor:
        """The caller's, or one that is kept; pinned where a GPU writes it."""
        if room is None and self._room.numel() < nbytes:
            self._room = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        return self._room if room is None else room

    def _write(self, x: Tensor, codec: Chain, seed: int, room: Tensor | None) -> tuple[int, Packet]:
        return write_frame(x, codec, self._room_of(max_nbytes(codec, x), room, pinned=x.is_cuda), seed=seed)

    def _encode(
        self, slot: str, x: Tensor, codec: Chain, stage: ChannelStage | None, seed: int, room: Tensor | None
    ) -> int:
        if stage is None:
            return self._write(x, codec, seed, room)[0]
        flat = x.resolve_neg().contiguous()
        if not kernels.backend_for(flat).all_finite(flat.view(-1)):
            raise NonFiniteError("expected finite values, got a NaN or an infinity")
        max_nbytes(codec, flat)  # refuses what cannot travel before the memory changes
        memory = self._memory(slot, flat)
        velocity = None
        if isinstance(stage, MomentumCorrection):
            if memory.velocity is None:
                memory.velocity = torch.zeros_like(flat)
            velocity = memory.velocity
            if stage.nesterov:
                velocity.mul_(stage.m).add_(flat)
                memory.residual.add_(torch.add(flat, velocity, alpha=stage.m))
            else:
                kernels.backend_for(flat).add_momentum(
                    flat.view(-1), stage.m, velocity.view(-1), memory.residual.view(-1)
                )
        try:
            if velocity is None:
                fused = codec.encode_feedback(flat, memory.residual, seed=seed) if flat.numel() else None
                if fused is not None:
                    return write_packet(fused, self._room_of(max_nbytes(codec, flat), room, pinned=flat.is_cuda))[0]
                memory.residual.add_(flat)
            nbytes, packet = self._write(memory.residual, codec, seed, room)
        except NonFiniteError:
            self._reset_overflowed(slot)
            raise
        codec.accumulate(packet.to(memory.residual.device), memory.residual, -1.0)
        if velocity is not None:
            sent = codec.positions(packet)
            if sent is not None:  # momentum factor masking: what was sent starts afresh
                velocity.view(-1).index_fill_(0, sent.to(velocity.device, torch.int64), 0.0)
        return nbytes

    def _memory(self, slot: str, like: Tensor) -> _Memory:
        memory = self._memories.get(slot)
        if memory is not None and memory.residual.shape == like.shape:
            return memory.on(like.device)
        if memory is not None:
            self.stats.residual_resets += 1
            before, now = list(memory.residual.shape), list(like.shape)
            log.warning("slot %r changed its shape from %s to %s: its residual is reset", slot, before, now)
        memory = self._memories[slot] = _Memory(torch.zeros_like(like))
        return memory

    def forget(self, slots: Iterable[str], why: str) -> None:
        """Begin these slots' memory anew, because it would mean something else from now on: counted, and said once.

        Args:
            slots: Those that remember nothing are passed over.
            why: Completes "what was not sent is dropped: ".
        """
        for slot in slots:
            if self._memories.pop(slot, None) is not None:
                self.stats.residual_resets += 1
                self._warn_once(why, f"residuals are reset: {why}")

    def residual(self, slot: str) -> Tensor | None:
        """What a slot has yet to send; None when it remembers nothing."""
        memory = self._memories.get(slot)
        return None if memory is None else memory.residual

    def state_dict(self) -> dict[str, Tensor]:
        """Everything remembered, as ``slot/residual`` and ``slot/velocity``: save it with the model."""
        state = {}
        for slot, memory in self._memories.items():
            state[f"{slot}/residual"] = memory.residual.clone()
            if memory.velocity is not None:
                state[f"{slot}/velocity"] = memory.velocity.clone()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the memory by a saved one. Nothing changes unless all of it makes sense."""
        memories: dict[str, _Memory] = {}
        for key, tensor in state.items():
            slot, _, part = key.rpartition("/")
            if part not in ("residual", "velocity") or not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                raise InputError(f"expected float tensors named 'slot/residual' or 'slot/velocity', got {key!r}")
            if not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(f"{key!r} in the saved state is not finite")
            if part == "residual":
                memories[slot] = _Memory(tensor.detach().to(torch.float32).clone().contiguous())
        for key, tensor in state.items():
            slot, _, part = key.rpartition("/")
            if part == "velocity":
                if slot not in memories or memories[slot].residual.shape != tensor.shape:
                    raise InputError(f"{key!r} has no residual of the same shape beside it")
                memories[slot].velocity = tensor.detach().to(torch.float32).clone().contiguous()
        self._memories = memories


def channel(spec: str, *, policy: Policy | Mapping[str, str] | None = None, nonfinite: str = "raise") -> Channel:
    """A channel for a spec such as ``ef|topk:0.01|qsgd:4``; see ``Channel`` for the arguments."""
    return Channel(spec, policy=policy, nonfinite=nonfinite)


def _memory_stage(stages: tuple[ChannelStage, ...]) -> ChannelStage | None:
    """The stage that decides the arithmetic: ``momentum`` has error feedback built in, ``ef`` adds nothing to it."""
    return next((stage for stage in stages if isinstance(stage, MomentumCorrection)), stages[0] if stages else None)
