"""Messages between pipeline stages: a frame in a buffer whose size both ends know beforehand.

A stage posts its receives before the sender has encoded anything, so a message has the largest size of a frame of this
codec and tensor. A shorter frame (all values are zero) is followed by zero bytes; its length is in its header.

Both ends decide from codec, shape and dtype alone whether a tensor is compressed: integers and booleans, empty tensors,
and tensors that a frame would not make smaller travel as they are.

With differences a message ends with 8 more bytes: how often both ends have updated their copy of this sample.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from laconic import counters, wire
from laconic.codecs import Chain, without_memory
from laconic.counters import LogOnce
from laconic.errors import ConfigError, FrameError, NonFiniteError
from laconic.frames import max_nbytes, open_packet, write_frame
from laconic.kernels.random import M64, splitmix64
from laconic.packet import FLOATS, Packet, TensorSpec

__all__ = [
    "COUNT_NBYTES", "NONFINITE", "Copies", "Copy", "Direction", "Position", "Receiver", "Sample", "Sender",
    "WireStats", "copy_saturated", "count_bytes", "is_void", "message_nbytes", "open_expected",
    "require_zeros", "stage_codec",
]  # fmt: skip

Direction = Literal["forward", "backward"]
NONFINITE: Final = ("spread", "skip", "raise")
_VOID: Final = bytes(wire.pack(Packet("none", TensorSpec((0,), torch.float32), ())))
"""The frame of a tensor that is not finite. (Empty tensors have no frame.)"""
_SEED_MASK: Final = (1 << 63) - 1
COUNT_NBYTES: Final = 8


class Position(NamedTuple):
    """Which tensor of a step a message holds: the micro-batch, and the number of the tensor within it."""

    micro_batch: int
    tensor: int


@dataclass
class WireStats:
    """Counts of one direction of one stage. Bytes are those of the tensors handed to ``torch.distributed``."""

    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_uncompressed: int = 0
    """What the tensors sent would have taken without compression."""
    messages_sent: int = 0
    nonfinite: int = 0
    """Tensors sent that held a NaN or an infinity."""
    encode_s: float = 0.0
    decode_s: float = 0.0
    error: float | None = None
    """The relative squared error of the tensor that was measured last."""
    exempt: dict[str, int] = field(default_factory=dict)
    """How many tensors travelled as they are, by reason."""


def stage_codec(spec: str, direction: Direction) -> Chain:
    """Return the codec of a direction; ``ConfigError`` if the size of its frames depends on the values."""
    chain = without_memory(spec, ": a stage sends other samples in every step, so write {codec!r}")
    reason = ""
    if chain.coder is not None:
        reason = f"{chain.coder.name!r} writes as many bytes as the values need"
    elif chain.selector is not None and chain.selector.fixed_count(1 << 20) is None:
        reason = f"{chain.selector.name!r} keeps as many values as the tensor has"
    elif chain.values is not None and not chain.values.fixed_size:
        reason = f"{chain.values.name!r} computes its number of levels from the values"
    elif chain.values is not None and chain.values.needs_shape:
        reason = f"{chain.values.name!r} approximates the matrix of a parameter, not activations"
    if reason:
        raise ConfigError(
            f"{direction} cannot be {spec!r}: a stage receives messages of a fixed size, but {reason}. Use a codec of "
            "fixed size, such as 'thc:4', 'qsgd:4', 'shared:8' or 'bf16'"
        )
    return chain


@lru_cache(maxsize=1024)
def _limit(codec: str, spec: TensorSpec) -> int:
    return max(max_nbytes(codec, spec), len(_VOID))


def message_nbytes(chain: Chain, spec: TensorSpec, *, delta: bool = False) -> int | str:
    """Return the bytes of every message with such a tensor, or the reason why it travels as it is."""
    if chain.text == "none":
        return "is not compressed by 'none'"
    if spec.dtype not in FLOATS:
        return f"is {str(spec.dtype).removeprefix('torch.')}"
    nbytes = 0
    if spec.numel:
        framed = TensorSpec(spec.shape, torch.float32) if delta else spec
        nbytes = _limit(chain.text, framed) + (COUNT_NBYTES if delta else 0)
    return nbytes if 0 < nbytes < spec.nbytes else "is too small to be compressed"


Sample = int | str | Position
"""What a copy is kept for: examples that the caller names, or the place of a micro-batch in the step."""


@dataclass
class Copy:
    """The decoded values of a sample, which sender and receiver hold alike."""

    values: Tensor
    updates: int = 0


class Copies:
    """Copies by tensor of a stage and sample."""

    def __init__(self) -> None:
        self.by_sample: dict[tuple[int, Sample], Copy] = {}

    def of(self, position: Position, sample: int | str | None, like: Tensor) -> Copy:
        """Return the copy for a tensor; zeros if there is none of its shape."""
        key = (position.tensor, position if sample is None else sample)
        copy = self.by_sample.get(key)
        if copy is None or copy.values.shape != like.shape:
            copy = Copy(torch.zeros(like.shape, dtype=torch.float32, device=like.device))
            self.by_sample[key] = copy
        elif copy.values.device != like.device:  # a state loaded on the CPU may serve a GPU
            copy.values = copy.values.to(like.device)
        return copy

    @property
    def nbytes(self) -> int:
        return sum(copy.values.nbytes for copy in self.by_sample.values())


class Sender:
    """Encodes the tensors that one stage sends in one direction.

    Args:
        seed: Together with stage, direction, position and step it decides all rounding.
        delta: Send the difference to what the receiver holds of the same sample.
        error_every: Number of steps between measurements of the encoding error; 0: never.
    """

    def __init__(
        self, chain: Chain, direction: Direction, stage: int, *, seed: int = 0, delta: bool = False,
        error_every: int = 0, stats: WireStats | None = None,
    ) -> None:  # fmt: skip
        self.chain, self.direction, self.stage = chain, direction, stage
        self.text = chain.text
        self.error_every = error_every
        self.stats = WireStats() if stats is None else stats
        self.copies = Copies() if delta else None
        self._key = _hash(seed & M64, stage, int(direction == "backward"))
        self.sent: Counter[Position] = Counter()
        """Messages of each position so far, which make the rounding of every step differ."""
        self._warn_once = LogOnce("stats()")

    def message(
        self, x: Tensor, position: Position, *, sample: int | str | None = None, training: bool = True
    ) -> Tensor | None:
        """Return the message of a tensor, on its device; None if the tensor travels as it is.

        Args:
            sample: Names the examples of the tensor, for differences; its position by default.
            training: Evaluation neither uses nor changes any memory.
        """
        spec, stats = TensorSpec.of(x), self.stats
        nbytes = self._nbytes(spec, position, training)
        stats.messages_sent += 1
        stats.bytes_uncompressed += spec.nbytes
        if isinstance(nbytes, str):
            stats.bytes_sent += spec.nbytes
            stats.exempt[nbytes] = stats.exempt.get(nbytes, 0) + 1
            if self.text != "none":
                self._warn_exempt(nbytes, spec)
            return None
        began = time.perf_counter()
        message = torch.empty(nbytes, dtype=torch.uint8, pin_memory=x.is_cuda)
        with torch.autocast(x.device.type, enabled=False):  # a forward pass may be under autocast, a message never is
            self._write(x.detach(), message, position, sample, training)
        if training:
            self.sent[position] += 1
        stats.bytes_sent += nbytes
        stats.encode_s += time.perf_counter() - began
        return message.to(x.device)

    def _nbytes(self, spec: TensorSpec, position: Position, training: bool) -> int | str:
        return message_nbytes(self.chain, spec, delta=self.copies is not None)

    def _seed(self, position: Position) -> int:
        return _hash(self._key, *position, self.sent[position]) & _SEED_MASK

    def _write(self, x: Tensor, message: Tensor, position: Position, sample: int | str | None, training: bool) -> None:
        seed = self._seed(position)
        copy, values = None, x
        if self.copies is not None:
            values = x.to(torch.float32)
            if training:
                copy = self.copies.of(position, sample, x)
                values = values - copy.values
        try:
            used, packet = write_frame(values, self.chain, message, seed=seed)
        except NonFiniteError:
            self._write_nonfinite(message)
            return
        message[used:].zero_()
        if copy is not None:
            message[-COUNT_NBYTES:].copy_(count_bytes(copy.updates))
            copy.updates += 1
            self.chain.accumulate(packet, copy.values)
        if self.error_every and training and self.sent[position] % self.error_every == 0:
            self._measure(x, self.chain.decode(packet).to(torch.float32) if copy is None else copy.values)

    def _write_nonfinite(self, message: Tensor) -> None:
        self.stats.nonfinite += 1
        self._warn_once("nonfinite", f"stage {self.stage} sends {_what(self.direction)} that are not finite")
        message[: len(_VOID)].copy_(torch.frombuffer(bytearray(_VOID), dtype=torch.uint8))
        message[len(_VOID) :].zero_()

    def _measure(self, x: Tensor, decoded: Tensor) -> None:
        norm = float(x.float().square().sum())
        self.stats.error = float((x.float() - decoded).square().sum()) / norm if norm else 0.0

    def _warn_exempt(self, reason: str, spec: TensorSpec) -> None:
        self._warn_once(
            reason,
            f"stage {self.stage}: a tensor of shape {list(spec.shape)} travels {self.direction} as it is: it {reason}",
        )


class Receiver:
    """Decodes the messages that one stage receives in one direction.

    Args:
        nonfinite: What replaces a tensor that was not finite: NaN (``spread``), zeros (``skip``) or an error.
    """

    def __init__(
        self, chain: Chain, direction: Direction, stage: int, *, nonfinite: str = "spread", delta: bool = False,
        stats: WireStats | None = None,
    ) -> None:  # fmt: skip
        self.chain, self.direction, self.stage, self.nonfinite = chain, direction, stage, nonfinite
        self.stats = WireStats() if stats is None else stats
        self.copies = Copies() if delta else None

    def expected_nbytes(self, spec: TensorSpec, position: Position, *, training: bool = True) -> int | str:
        """Return the bytes of the next message with such a tensor, or why it travels as it is; called once for each."""
        return message_nbytes(self.chain, spec, delta=self.copies is not None)

    def read(
        self, message: Tensor, out: Tensor, position: Position, *, sample: int | str | None = None,
        training: bool = True,
    ) -> None:  # fmt: skip
        """Decode a message into a tensor; invalid bytes raise ``FrameError`` only."""
        began = time.perf_counter()
        try:
            with torch.autocast(out.device.type, enabled=False):
                self._read(message.cpu(), out.detach(), position, sample, training)
        except FrameError as error:
            raise FrameError(
                f"stage {self.stage}, micro-batch {position.micro_batch}, received {_what(self.direction)}: {error}"
            ) from None
        self.stats.decode_s += time.perf_counter() - began

    def _read(self, message: Tensor, out: Tensor, position: Position, sample: int | str | None, training: bool) -> None:
        count = 0
        if self.copies is not None:
            if message.numel() < COUNT_NBYTES:
                raise FrameError(f"a message has at least {COUNT_NBYTES} bytes, got {message.numel()}")
            message, count = message[:-COUNT_NBYTES], _count(message)
        used = wire.frame_nbytes(message)
        require_zeros(message[used:])
        if is_void(message[:used]):
            self._read_nonfinite(out)
            return
        dtype = out.dtype if self.copies is None else torch.float32
        chain = self.chain
        packet = open_expected(message[:used], chain, TensorSpec(tuple(out.shape), dtype)).to(out.device)
        if self.copies is None or not training:
            chain.decode(packet, out=out)
            return
        copy = self.copies.of(position, sample, out)
        if copy.updates != count:
            raise FrameError(
                f"the sender has updated its copy of this sample {count} times, the receiver {copy.updates} times: "
                "load the state of the same step on all stages, and call use_samples alike"
            )
        chain.accumulate(packet, copy.values)
        copy.updates += 1
        copy_saturated(copy.values, out)

    def _read_nonfinite(self, out: Tensor) -> None:
        if self.nonfinite == "raise":
            raise NonFiniteError(
                f"stage {self.stage} received {_what(self.direction)} that hold a NaN or an infinity. Find where it "
                "arises, or drop it with nonfinite='skip'"
            )
        out.fill_(float("nan") if self.nonfinite == "spread" else 0.0)


def is_void(frame: Tensor) -> bool:
    """Return whether a frame stands for a tensor that was not finite."""
    return frame.numel() == len(_VOID) and bytes(frame.tolist()) == _VOID


def require_zeros(rest: Tensor) -> None:
    """Raise ``FrameError`` unless all bytes behind the last frame are zero."""
    if bool(rest.any()):
        raise FrameError("the bytes after the frame must be zero")


def open_expected(frame: Tensor, chain: Chain, spec: TensorSpec) -> Packet:
    """Return the packet of a frame; ``FrameError`` unless it holds such a tensor by this codec."""
    packet, theirs = open_packet(frame, max_numel=spec.numel)
    if theirs.text != chain.text or packet.spec != spec:
        raise FrameError(
            f"expected {list(spec.shape)} of {spec.dtype} by {chain.text!r}, the frame holds "
            f"{list(packet.spec.shape)} of {packet.spec.dtype} by {theirs.text!r}"
        )
    return packet


def copy_saturated(values: Tensor, out: Tensor) -> None:
    """Copy decoded float32 values; those beyond the range of a narrower dtype become its largest, and are counted."""
    if out.dtype in (torch.float16, torch.bfloat16):
        largest = torch.finfo(out.dtype).max
        beyond = int((values.abs() > largest).sum())
        if beyond:
            name = str(out.dtype).removeprefix("torch.")
            counters.count("saturated", beyond, f"decoded values beyond the range of {name} saturate")
        values = values.clamp(-largest, largest)
    out.copy_(values)


def _what(direction: Direction) -> str:
    return "activations" if direction == "forward" else "gradients of activations"


def count_bytes(count: int) -> Tensor:
    """Return a count as it is written into messages."""
    return torch.frombuffer(bytearray(count.to_bytes(COUNT_NBYTES, "little")), dtype=torch.uint8)


def _count(message: Tensor) -> int:
    return int.from_bytes(bytes(message[-COUNT_NBYTES:].tolist()), "little")


def _hash(*words: int) -> int:
    """Return a hash of words in this order."""
    state = 0
    for word in words:
        state = splitmix64(state ^ word)
    return state
