"""Tensor <-> frame in one call, and bundles of many frames."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from laconic import wire
from laconic._core import bytes_at
from laconic.codecs import Chain, codec
from laconic.errors import ConfigError, FrameError, InputError, NonFiniteError
from laconic.packet import Packet, TensorSpec
from laconic.wire import MAX_NUMEL, Buffer, FrameArena, FramePlan

__all__ = [
    "decode", "decode_bundle", "encode", "encode_bundle", "encode_into", "max_nbytes", "open_packet", "write_frame",
    "write_packet",
]  # fmt: skip

_NONFINITE = ("raise", "skip")


class _Scratch(threading.local):
    """A buffer per thread that is reused: allocating memory costs more than encoding into it.

    Buffers of all threads together are bounded: a server has a hundred threads, each of which may encode a snapshot.
    """

    MAX_KEPT = 1 << 28
    MAX_KEPT_BY_ALL = 1 << 29
    kept_by_all = 0
    _lock = threading.RLock()  # a finalizer may run anywhere

    def __init__(self) -> None:
        self.buffers: dict[bool, Tensor] = {}

    def of(self, nbytes: int, *, pinned: bool = False) -> Tensor:
        """Return a buffer; pinned memory is copied from a GPU without an intermediate buffer."""
        buffer = self.buffers.get(pinned)
        if buffer is None or buffer.numel() < nbytes:
            buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
            if nbytes <= self.MAX_KEPT and self._keep(buffer):  # a rare large one must not stay for the thread's life
                self.buffers[pinned] = buffer
        return buffer

    @classmethod
    def _keep(cls, buffer: Tensor) -> bool:
        """Count a buffer until it is freed; return False if there are too many already."""
        nbytes = buffer.numel()
        with cls._lock:
            if cls.kept_by_all + nbytes > cls.MAX_KEPT_BY_ALL:
                return False
            cls.kept_by_all += nbytes
        weakref.finalize(buffer, cls._released, nbytes).atexit = False
        return True

    @classmethod
    def _released(cls, nbytes: int) -> None:
        with cls._lock:
            cls.kept_by_all -= nbytes


_scratch = _Scratch()


def _as_codec(spec: str | Chain) -> Chain:
    return spec if isinstance(spec, Chain) else codec(spec)


@lru_cache(maxsize=4096)
def _plan(codec_text: str, shape: tuple[int, ...], dtype: torch.dtype) -> FramePlan:
    spec = TensorSpec(tuple(shape), dtype)
    return FramePlan.of(codec_text, spec, codec(codec_text).max_section_nbytes(spec))


def max_nbytes(spec: str | Chain, like: Tensor | TensorSpec) -> int:
    """Return the most bytes that a frame of such a tensor can take, to allocate a buffer for ``encode_into``."""
    return _plan(_as_codec(spec).text, like.shape, like.dtype).limit


def write_frame(
    x: Tensor, chain: Chain, buffer: Tensor, *, seed: int = 0, exact: bool = False, gradient: Tensor | None = None
) -> tuple[int, Packet]:
    """Encode into a uint8 tensor on the host; return the bytes written and the packet, on the device of ``x``."""
    if not isinstance(x, Tensor):
        raise InputError(f"expected a tensor, got {type(x).__name__}")
    if not x.is_cpu:  # sections are made on the device; the frame is for the wire
        packet = chain.encode(x, seed=seed, exact=exact, gradient=gradient)
        return write_packet(packet, buffer), packet
    arena = FrameArena(buffer, _plan(chain.text, x.shape, x.dtype))
    packet = chain.encode(x, seed=seed, arena=arena, exact=exact, gradient=gradient)
    return wire.seal(packet, arena), packet


def write_packet(packet: Packet, buffer: Tensor) -> int:
    """Write a packet, which may be on a GPU, as a frame into a uint8 tensor on the host; return the bytes written."""
    arena = FrameArena(buffer, _plan(packet.codec, packet.spec.shape, packet.spec.dtype))
    sections = tuple(arena.take(section.numel()).copy_(section, non_blocking=True) for section in packet.sections)
    if any(section.is_cuda for section in packet.sections):
        torch.cuda.current_stream(packet.sections[0].device).synchronize()
    return wire.seal(Packet(packet.codec, packet.spec, sections), arena)


def encode_into(
    x: Tensor, spec: str | Chain, buffer: bytearray | memoryview | Tensor, *, seed: int = 0,
    gradient: Tensor | None = None,
) -> int:  # fmt: skip
    """Encode a tensor into a buffer of the caller; return the bytes written.

    Args:
        x: Any shape and stride; float32, float64, float16 or bfloat16. It is not changed.
        buffer: Writable memory; ``max_nbytes(spec, x)`` bytes always suffice.
        seed: Decides all randomness.
        gradient: The gradient of x, for ``adaptive:by=grad``.

    >>> import torch, laconic
    >>> x = torch.randn(1000)
    >>> buffer = bytearray(laconic.max_nbytes("qsgd:4", x))
    >>> laconic.decode(buffer[: laconic.encode_into(x, "qsgd:4", buffer)]).shape
    torch.Size([1000])
    """
    if isinstance(buffer, Tensor):
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous() or not buffer.is_cpu:
            raise InputError("a buffer tensor must be a contiguous uint8 vector on the CPU")
        target = buffer
    else:
        try:
            view = memoryview(buffer)
            if view.readonly:
                raise InputError(f"the buffer is read-only: pass a bytearray or a tensor, not {type(buffer).__name__}")
            target = torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0, dtype=torch.uint8)
        except (TypeError, ValueError) as error:
            raise InputError(f"expected a writable, contiguous buffer, got {type(buffer).__name__}: {error}") from error
    return write_frame(x, _as_codec(spec), target, seed=seed, gradient=gradient)[0]


def encode(
    x: Tensor, spec: str | Chain, *, seed: int = 0, nonfinite: str = "raise", gradient: Tensor | None = None
) -> bytes:
    """Encode a tensor into a frame: self-contained bytes for ``decode``.

    Args:
        x: Any shape and stride; float32, float64, float16 or bfloat16. It is not changed.
        spec: A codec spec such as ``topk:0.01|qsgd:4``, or a codec.
        seed: Decides all randomness: same input, seed and codec give the same bytes everywhere.
        nonfinite: What to do with a NaN or an infinity: ``raise``, or ``skip`` (send zeros).
        gradient: The gradient of x, for ``adaptive:by=grad``.

    >>> import torch, laconic
    >>> laconic.decode(laconic.encode(torch.tensor([1.0, -4.0, 0.5, 3.0]), "topk:0.5"))
    tensor([ 0., -4.,  0.,  3.])
    """
    if nonfinite not in _NONFINITE:
        raise ConfigError(f"nonfinite must be one of {', '.join(_NONFINITE)}, got {nonfinite!r}")
    if not isinstance(x, Tensor):
        raise InputError(f"expected a tensor, got {type(x).__name__}")
    chain = _as_codec(spec)
    buffer = _scratch.of(max_nbytes(chain, x), pinned=x.is_cuda)
    try:
        nbytes, _ = write_frame(x, chain, buffer, seed=seed, gradient=gradient)
    except NonFiniteError:
        if nonfinite == "raise":
            raise
        zero = Packet(chain.text, TensorSpec.of(x), ())
        return bytes(wire.pack(zero))
    return bytes_at(buffer.data_ptr(), nbytes)


def open_packet(blob: Buffer, *, max_numel: int = MAX_NUMEL) -> tuple[Packet, Chain]:
    """Return the packet of a frame and its codec; ``FrameError`` if either is invalid."""
    packet = wire.unpack(blob, max_numel=max_numel)
    try:
        chain = codec(packet.codec)
    except ConfigError as error:
        raise FrameError(f"the frame names a codec that this laconic cannot read: {error}") from None
    if chain.text != packet.codec:
        raise FrameError(f"the frame names its codec {packet.codec!r}, whose canonical spec is {chain.text!r}")
    if not packet.spec.dtype.is_floating_point and chain.text != "none":
        raise FrameError(f"codec {chain.text!r} does not carry {packet.spec.dtype}")
    return packet, chain


def decode(
    blob: Buffer, *, device: torch.device | str | None = None, out: Tensor | None = None, like: Tensor | None = None,
    max_numel: int = MAX_NUMEL,
) -> Tensor:  # fmt: skip
    """Return the tensor of a frame. Invalid bytes raise ``FrameError`` only.

    Args:
        blob: The frame; anything with the buffer protocol, or a uint8 tensor.
        device: The device of the tensor; the CPU by default.
        out: A tensor to fill, of the frame's shape; values are converted to its dtype and device.
        like: A tensor whose shape and dtype the frame must have.
        max_numel: Frames that declare more values raise ``FrameError``.
    """
    packet, chain = open_packet(blob, max_numel=max_numel)
    if like is not None and (tuple(like.shape) != packet.spec.shape or like.dtype != packet.spec.dtype):
        raise FrameError(
            f"expected {list(like.shape)} of {like.dtype}, the frame holds {list(packet.spec.shape)} of "
            f"{packet.spec.dtype}"
        )
    target = out.device if out is not None else torch.device("cpu" if device is None else device)
    if target.type == "cuda" and not chain.host_only:  # the packet is smaller than the tensor: decode on the GPU
        packet = packet.to(target)
    elif out is not None and target.type != "cpu":
        if tuple(out.shape) != packet.spec.shape:
            raise FrameError(f"expected a tensor of shape {list(out.shape)}, the frame holds {list(packet.spec.shape)}")
        return out.copy_(chain.decode(packet))
    tensor = chain.decode(packet, out=out)
    return tensor if device is None else tensor.to(device)


def encode_bundle(tensors: Mapping[str, Tensor], spec: str | Chain, *, seed: int = 0) -> bytes:
    """Encode many named tensors into a bundle, all with the same codec; a channel's policy chooses one per slot."""
    return bytes(wire.pack_bundle([(name, encode(x, spec, seed=seed)) for name, x in tensors.items()]))


def decode_bundle(blob: Buffer, *, max_numel: int = MAX_NUMEL) -> dict[str, Tensor]:
    """Return the tensors of a bundle by name; ``max_numel`` limits the values of all of them together."""
    tensors: dict[str, Tensor] = {}
    for name, frame in wire.unpack_bundle(blob):
        if name in tensors:
            raise FrameError(f"the bundle holds {name!r} twice")
        tensors[name] = decode(frame, max_numel=max_numel)
        max_numel -= tensors[name].numel()
    return tensors
