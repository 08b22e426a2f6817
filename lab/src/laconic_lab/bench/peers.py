"""The alternatives to our codecs: the same methods as usually written in torch, and stock tools.

The torch code is straightforward and vectorised: it allocates its results and keeps symbols in int8 and indices in
int64, as the usual implementations do. A tool with an ``out`` argument gets one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from laconic.codecs import Chain, Selector, ValueStage
from laconic.codecs.cast import BF16, FP16, Raw
from laconic.codecs.packed_ints import PackedIntStage
from laconic.codecs.qsgd import QSGD
from laconic.codecs.randk import RandK
from laconic.codecs.sign import OneBit, Sign
from laconic.codecs.terngrad import TernGrad
from laconic.codecs.threshold import Threshold
from laconic.codecs.topk import TopK, num_kept
from laconic.codecs.uniform import Uniform

__all__ = ["PLAIN", "Peer", "general", "peers_of", "quiet"]

PLAIN = "plain torch"

ZLIB_NUMEL = 1_000_000
"""Number of values for zlib, which is a thousand times slower than the rest."""


@dataclass(frozen=True)
class Peer:
    """One alternative.

    Args:
        encode: Tensor to message.
        decode: Message to tensor; None for selection only.
        max_error: Largest allowed relative squared error on gaussian data, checked before timing.
        numel: Number of values it is timed on, if not all.
        dtype: Dtype of its input; the conversion is not timed.
    """

    name: str
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any], Tensor] | None = None
    max_error: float = 0.0
    note: str = ""
    numel: int | None = None
    dtype: torch.dtype | None = None


def message_nbytes(message: Any) -> int:
    """Return the bytes of a message on the wire."""
    if isinstance(message, Tensor):
        return message.numel() * message.element_size()
    if isinstance(message, np.ndarray):
        return int(message.nbytes)
    if isinstance(message, (bytes, bytearray)):
        return len(message)
    return sum(message_nbytes(part) for part in message)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's deprecation warnings of quantized tensors, which are timed here for comparison."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Method(Protocol):
    """A method written in torch: tensor -> tensors -> tensor."""

    @property
    def max_error(self) -> float: ...
    def encode(self, x: Tensor) -> tuple[Tensor, ...]: ...
    def decode(self, message: tuple[Tensor, ...]) -> Tensor: ...


@dataclass(frozen=True)
class _TorchRaw:
    max_error: float = 0.0

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.clone(),)

    def decode(self, message: tuple[Tensor, ...]) -> Tensor:
        return message[0].clone()


@dataclass(frozen=True)
class _TorchQSGD:
    bits: int
    bucket: int
    l2: bool
    nearest: bool
    max_error: float

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        rows = torch.nn.functional.pad(x, (0, -x.numel() % self.bucket)).view(-1, self.bucket)
        norm = (rows.norm(dim=1, keepdim=True) if self.l2 else rows.abs().amax(1, keepdim=True)).clamp_min(1e-38)
        levels = 2 ** (self.bits - 1) - 1
        scaled = rows.abs() / norm * levels
        if self.nearest:
            symbol = scaled.round()
        else:
            floor = scaled.floor()
            symbol = floor + (torch.rand_like(scaled) < scaled - floor)
        width = torch.int8 if self.bits <= 8 else torch.int16
        return (symbol * rows.sign()).to(width).view(-1)[: x.numel()], norm.view(-1)

    def decode(self, message: tuple[Tensor, ...]) -> Tensor:
        symbols, norm = message
        n = symbols.numel()
        rows = torch.nn.functional.pad(symbols, (0, -n % self.bucket)).view(-1, self.bucket)
        levels = 2 ** (self.bits - 1) - 1
        values: Tensor = rows.float() * (norm / levels).unsqueeze(1)
        return values.view(-1)[:n]


@dataclass(frozen=True)
class _TorchTernGrad:
    """TernGrad with one scale per tensor, as in the paper and in most implementations."""

    max_error: float = 8.0

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        scale = x.abs().max().clamp_min(1e-38)
        return (x.sign() * torch.bernoulli(x.abs() / scale)).to(torch.int8), scale

    def decode(self, message: tuple[Tensor, ...]) -> Tensor:
        symbols, scale = message
        return symbols.float() * scale


@dataclass(frozen=True)
class _TorchPackedInts:
    """Levels on a clip per 1,024 values, in one or two bytes; the rotation is two products with a 32 x 32 matrix."""

    levels: int
    clip: float | None
    """Clip in units of the root mean square after rotation; None: clip at amax, without rotation."""
    max_error: float

    def _rotate(self, rows: Tensor) -> Tensor:
        matrix = torch.ones(1, 1)
        while matrix.shape[0] < 32:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
        matrix = matrix / 32**0.5
        rotated: Tensor = matrix @ rows.view(-1, 32, 32) @ matrix
        return rotated.view(-1, 1024)

    def _signs(self, n: int) -> Tensor:
        return torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(0)).mul_(2).sub_(1).view(-1, 1024)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        rows = torch.nn.functional.pad(x, (0, -x.numel() % 1024)).view(-1, 1024)
        if self.clip is None:
            clips = rows.abs().amax(1, keepdim=True)
        else:
            rows = self._rotate(rows * self._signs(rows.numel()))
            clips = rows.norm(dim=1, keepdim=True) * (self.clip / 32)
        clips = clips.clamp_min(1e-38)
        symbols = ((rows / clips + 1) * (self.levels / 2)).round_().clamp_(0, self.levels)
        width = torch.uint8 if self.levels < 256 else torch.int32
        return symbols.to(width), clips, torch.tensor(x.numel())

    def decode(self, message: tuple[Tensor, ...]) -> Tensor:
        symbols, clips, n = message
        rows = (symbols.float() * (2 / self.levels) - 1) * clips
        if self.clip is not None:
            rows = self._rotate(rows) * self._signs(rows.numel())
        return rows.view(-1)[: int(n)]


@dataclass(frozen=True)
class _TorchSign:
    max_error: float = 0.4

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.sign().to(torch.int8), x.abs().mean()

    def decode(self, message: tuple[Tensor, ...]) -> Tensor:
        symbols, scale = message
        return symbols.float() * scale


@dataclass(frozen=True)
class _TorchOneBit:
    max_error: float = 0.4

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        plus = x >= 0
        return plus, x[plus].mean(), x[~plus].mean()

    def decode(self, message: tuple[Tensor, ...]) -> Tensor:
        plus, above, below = message
        return torch.where(plus, above, below)


@dataclass(frozen=True)
class _TorchUniform:
    bits: int
    max_error: float

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        low, high = x.min(), x.max()
        levels = 2**self.bits
        width = (high - low) / levels
        symbols = ((x - low) / width).floor().clamp(0, levels - 1)
        return symbols.to(torch.uint8 if self.bits <= 8 else torch.int32), low, width

    def decode(self, message: tuple[Tensor, ...]) -> Tensor:
        symbols, low, width = message
        return low + (symbols.float() + 0.5) * width


@dataclass(frozen=True)
class _TorchCast:
    dtype: torch.dtype
    max_error: float = 1e-4

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.to(self.dtype),)

    def decode(self, message: tuple[Tensor, ...]) -> Tensor:
        return message[0].float()


def _value_method(stage: ValueStage | None) -> _Method | None:
    if stage is None or isinstance(stage, Raw):
        return _TorchRaw()
    if isinstance(stage, QSGD):
        error = 40.0 if stage.norm == "l2" else 12.0
        limit = error / (2 ** (stage.bits - 1) - 1) ** (1 if stage.bits == 2 else 2) + 1e-6
        return _TorchQSGD(stage.bits, stage.bucket, stage.norm == "l2", stage.round == "nearest", limit)
    if isinstance(stage, PackedIntStage):
        levels = (1 << stage.bits) - 1
        clip = None if stage.rotation_seed is None else stage.clip_factor(levels, 1)
        return _TorchPackedInts(levels, clip, 0.5 if clip is not None else 8.0 / levels**2)
    if isinstance(stage, TernGrad):
        return _TorchTernGrad()
    if isinstance(stage, Sign):
        return _TorchSign()
    if isinstance(stage, OneBit):
        return _TorchOneBit()
    if isinstance(stage, Uniform):
        return _TorchUniform(stage.bits, 20.0 / 4**stage.bits)
    if isinstance(stage, FP16):
        return _TorchCast(torch.float16)
    if isinstance(stage, BF16):
        return _TorchCast(torch.bfloat16)
    return None


def _select(selector: Selector, x: Tensor) -> Tensor | None:
    n = x.numel()
    if isinstance(selector, TopK) and not selector.chunk:
        return x.abs().topk(num_kept(selector.keep, n), sorted=False).indices
    if isinstance(selector, RandK):
        return torch.randperm(n)[: num_kept(selector.keep, n)]
    if isinstance(selector, Threshold):
        return (x.abs() >= selector.t).nonzero().view(-1)
    return None


def _plain(chain: Chain, n: int) -> Peer | None:
    """Return the chain written in torch, or None for a plug-in stage or a selector by chunks."""
    method, selector = _value_method(chain.values), chain.selector
    if method is None:
        return None
    if selector is None:
        return Peer(PLAIN, method.encode, method.decode, method.max_error)
    if _select(selector, torch.ones(1)) is None:
        return None
    gain = selector.gain(n)

    def encode(x: Tensor) -> tuple[Tensor, ...]:
        where = _select(selector, x)
        assert where is not None
        return where, *(method.encode(x[where]) if chain.values is not None else (x[where],))

    def decode(message: tuple[Tensor, ...]) -> Tensor:
        where, *values = message
        y = torch.zeros(n)
        decoded = method.decode(tuple(values)) if chain.values is not None else values[0]
        y[where] = decoded * gain if gain != 1.0 else decoded
        return y

    # Dropping entries costs at most the norm; scaling up the rest can cost n / k times the norm.
    return Peer(PLAIN, encode, decode, 1.0 + 2 * gain * (gain > 1) + method.max_error)


def _cast_into(dtype: torch.dtype, n: int) -> Peer:
    half, y = torch.empty(n, dtype=dtype), torch.empty(n)
    return Peer(f"torch copy_ to {str(dtype).removeprefix('torch.')}", half.copy_, y.copy_, 1e-4, "into kept buffers")


def _quantize_per_tensor() -> Peer:
    def encode(x: Tensor) -> Tensor:
        low, high = (float(end) for end in x.aminmax())
        scale = max((high - low) / 255, 1e-38)
        return torch.quantize_per_tensor(x, scale, min(255, max(0, round(-low / scale))), torch.quint8)

    return Peer("torch.quantize_per_tensor", encode, lambda q: q.dequantize(), 20.0 / 4**8, "deterministic, one scale")


def _argpartition(keep: float) -> Peer:
    def encode(x: Tensor) -> Any:
        k = num_kept(keep, x.numel())
        return np.argpartition(np.abs(x.numpy()), x.numel() - k)[-k:]

    return Peer("np.argpartition", encode, note="selects only; int64 positions")


def _torch_topk(keep: float) -> Peer:
    def encode(x: Tensor) -> Tensor:
        return torch.topk(x, num_kept(keep, x.numel())).indices

    return Peer("torch.topk", encode, note="selects only, the largest rather than the largest in magnitude")


def peers_of(chain: Chain, n: int) -> list[Peer]:
    """Return the alternatives to a codec without an entropy coder, for n values."""
    if chain.coder is not None:
        return []
    plain = _plain(chain, n)
    peers = [plain] if plain is not None else []
    if chain.selector is None and isinstance(chain.values, (FP16, BF16)):
        peers.append(_cast_into(torch.float16 if isinstance(chain.values, FP16) else torch.bfloat16, n))
    if chain.selector is None and isinstance(chain.values, Uniform) and chain.values.bits == 8:
        peers.append(_quantize_per_tensor())
    if isinstance(chain.selector, TopK) and not chain.selector.chunk and chain.values is None:
        peers += [_torch_topk(chain.selector.keep), _argpartition(chain.selector.keep)]
    return peers


def general(n: int) -> list[Peer]:
    """Return lossless general-purpose compressors."""
    part = min(n, ZLIB_NUMEL)

    def view(x: Tensor) -> memoryview:
        return x.numpy().data.cast("B")

    def back(raw: bytes) -> Tensor:
        return torch.frombuffer(bytearray(raw), dtype=torch.float32)

    sliced = f"on the first {part:,} values, scaled" if part < n else ""
    peers = [
        Peer("zlib level 1", lambda x: zlib.compress(view(x), 1), lambda m: back(zlib.decompress(m)), 0.0, sliced, part)
    ]
    if importlib.util.find_spec("zstandard") is not None:
        import zstandard

        press, unpress = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
        peers.append(Peer("zstd level 1", lambda x: press.compress(view(x)), lambda m: back(unpress.decompress(m))))
    return peers
