"""Correctness checks of a codec on the tensor it is timed on.

The bounds follow from each method's definition and are computed in plain torch, independently of the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs import Chain, Selector, ValueStage
from laconic.codecs.adaptive import Adaptive
from laconic.codecs.cast import BF16, FP16, Raw
from laconic.codecs.mean import Mean
from laconic.codecs.packed_ints import Shared
from laconic.codecs.qsgd import QSGD
from laconic.codecs.randk import RandK
from laconic.codecs.sign import OneBit, Sign
from laconic.codecs.terngrad import TernGrad
from laconic.codecs.threshold import Threshold
from laconic.codecs.topk import TopK, num_kept
from laconic.codecs.uniform import Uniform
from laconic.errors import WrongResultError
from laconic.frames import decode, encode, open_packet
from laconic.kernels.sections import MAX_ALPHABET, SUM_BLOCK
from laconic_lab.bench.coders import uncoded

__all__ = ["PARITY_NUMEL", "check", "relative_error"]

PARITY_NUMEL = 100_003
"""Values on which C++ and reference are compared byte by byte; a prime, so that buckets have tails."""


def relative_error(x: Tensor, y: Tensor) -> float:
    """Return the squared error over the squared norm."""
    x, y = x.double(), y.double()
    norm = float(x.square().sum())
    return float((x - y).square().sum()) / norm if norm else float((x - y).abs().max() > 0)


def check(chain: Chain, x: Tensor, *, seed: int = 0) -> float:
    """Return the relative error of one round trip of a flat float32 tensor; ``WrongResultError`` if it is wrong."""
    _same_as_reference(chain, x[:PARITY_NUMEL], seed)
    frame = encode(x, chain, seed=seed)
    packet, _ = open_packet(frame)
    y = decode(frame)
    if not bool(torch.isfinite(y).all()):
        raise WrongResultError(f"{chain}: decoded values are not finite")
    total = torch.zeros_like(x)
    chain.accumulate(packet, total, 2.0)
    if not torch.allclose(total, 2 * y, rtol=1e-6, atol=0.0):
        raise WrongResultError(f"{chain}: accumulating differs from decoding and adding")
    if chain.coder is not None and not torch.equal(y, decode(encode(x, uncoded(chain), seed=seed))):
        raise WrongResultError(f"{chain}: a coder must be lossless, but {uncoded(chain)} decodes to other values")
    if chain.selector is None:
        _check_values(chain, chain.values, x, y)
    else:
        positions = chain.positions(packet)
        if positions is None:  # nothing was sent, because all selected values were zero
            _check_nothing(chain, chain.selector, x, y)
            return relative_error(x, y)
        where = positions.to(torch.int64)
        _check_selection(chain, chain.selector, x, y, where)
        _check_values(chain, chain.values, x[where], y[where] / chain.selector.gain(x.numel()))
    return relative_error(x, y)


def _same_as_reference(chain: Chain, x: Tensor, seed: int) -> None:
    frame = encode(x, chain, seed=seed)
    with kernels.use_backend("reference"):
        wanted_frame, wanted = encode(x, chain, seed=seed), decode(frame)
    if frame != wanted_frame:
        raise WrongResultError(f"{chain}: the C++ bytes differ from the reference's for {x.numel()} values")
    if not torch.equal(decode(frame), wanted):
        raise WrongResultError(f"{chain}: C++ and reference decode {x.numel()} values differently")


def _check_nothing(chain: Chain, selector: Selector, x: Tensor, y: Tensor) -> None:
    limit = selector.t if isinstance(selector, Threshold) else math.inf if isinstance(selector, RandK) else 0.0
    if bool(y.any()) or float(x.abs().max()) > limit:
        raise WrongResultError(f"{chain}: nothing was sent of a tensor with amax {float(x.abs().max()):g}")


def _check_selection(chain: Chain, selector: Selector, x: Tensor, y: Tensor, where: Tensor) -> None:
    rest, dropped = y.clone(), x.abs()
    rest[where], dropped[where] = 0.0, 0.0
    if bool(rest.any()):
        raise WrongResultError(f"{chain}: values appear where none were sent")
    n, k = x.numel(), where.numel()
    largest, smallest = float(dropped.max()), float(x[where].abs().min()) if k else float("inf")
    if isinstance(selector, TopK) and selector.chunk:
        kept = torch.full_like(x, math.inf)
        kept[where] = x[where].abs()
        least, most = _by_chunk(kept, selector.chunk, math.inf).amin(1), _by_chunk(dropped, selector.chunk, 0.0).amax(1)
        right = k == selector.fixed_count(n) and bool((least >= most).all())
    elif isinstance(selector, TopK) and not selector.approx:
        right = k == num_kept(selector.keep, n) and smallest >= largest
    elif isinstance(selector, Threshold):
        right = smallest >= selector.t * (1 - 1e-6) and largest < selector.t * (1 + 1e-6)
    elif isinstance(selector, RandK):
        right = k == num_kept(selector.keep, n)
    else:
        right = k <= selector.max_kept(n)
    if not right:
        raise WrongResultError(f"{chain}: kept {k} of {n}, the smallest {smallest:g}, and dropped {largest:g}")


def _by_chunk(x: Tensor, chunk: int, fill: float) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % chunk), value=fill).view(-1, chunk)


def _check_values(chain: Chain, stage: ValueStage | None, x: Tensor, y: Tensor) -> None:
    """Raise ``WrongResultError`` unless y is within the stage's error bound of x."""
    if not x.numel():
        return
    bound = _BOUNDS.get(type(stage)) if stage is not None else _raw
    if bound is None:  # a plug-in stage: only parity with the reference can be checked
        return
    wanted, slack = bound(stage, x)
    # Decoded values are rounded to float32, some of them after a multiplication.
    excess = (y - wanted).abs() - slack - 1e-6 * wanted.abs()
    worst = int(excess.argmax())
    if float(excess[worst]) > 0:
        raise WrongResultError(
            f"{chain}: value {worst} is {float(x[worst]):g} and decoded to {float(y[worst]):g}, more than "
            f"{float(slack[worst]):g} away from {float(wanted[worst]):g}"
        )


def _bucketed(x: Tensor, bucket: int) -> Tensor:
    """Return the buckets as rows; the last row is padded with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % bucket)).view(-1, bucket)


def _spread(per_bucket: Tensor, bucket: int, n: int) -> Tensor:
    return per_bucket.float().repeat_interleave(bucket)[:n]


def _raw(stage: object, x: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.zeros_like(x)


def _fp16(stage: FP16, x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.abs() * 2.0**-11 + 2.0**-25


def _bf16(stage: BF16, x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.abs() * 2.0**-8


def _uniform(stage: Uniform, x: Tensor) -> tuple[Tensor, Tensor]:
    low, high = x.aminmax()
    half_bin = float(high - low) / 2 ** (stage.bits + 1)
    return x, torch.full_like(x, half_bin * 1.001 + 1e-6 * float(x.abs().max()))


def _adaptive(stage: Adaptive, x: Tensor) -> tuple[Tensor, Tensor]:
    low, high = (float(end) for end in x.aminmax())
    if stage.zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        return x, torch.zeros_like(x)
    share = torch.histc(x, 2**stage.m, low, high).double() / x.numel()
    entropy = -float(share.xlogy(share).sum()) / math.log(2)
    levels = max(2.0, min(2 ** (entropy + stage.c), MAX_ALPHABET))
    # The codec estimates the entropy from a sample; a quarter more allows a third of a bit.
    return x, torch.full_like(x, (high - low) / levels / 2 * 1.25 + 1e-6 * float(x.abs().max()))


def _qsgd(stage: QSGD, x: Tensor) -> tuple[Tensor, Tensor]:
    rows = _bucketed(x, stage.bucket)
    norm = rows.double().norm(dim=1) if stage.norm == "l2" else rows.abs().amax(1)
    level = norm / (2 ** (stage.bits - 1) - 1)
    return x, _spread(level * (0.501 if stage.round == "nearest" else 1.001), stage.bucket, x.numel())


def _shared(stage: Shared, x: Tensor) -> tuple[Tensor, Tensor]:
    level = _bucketed(x, SUM_BLOCK).abs().amax(1) * 2 / (2**stage.bits - 1)
    return x, _spread(level * (0.501 if stage.round == "nearest" else 1.001), SUM_BLOCK, x.numel())


def _terngrad(stage: TernGrad, x: Tensor) -> tuple[Tensor, Tensor]:
    return x, _spread(_bucketed(x, stage.bucket).abs().amax(1) * 1.001, stage.bucket, x.numel())


def _sign(stage: Sign, x: Tensor) -> tuple[Tensor, Tensor]:
    count = _bucketed(torch.ones_like(x), stage.bucket).sum(1)
    mean = _spread(_bucketed(x, stage.bucket).abs().double().sum(1) / count, stage.bucket, x.numel())
    return torch.where(torch.signbit(x), -mean, mean), mean * 1e-5


def _onebit(stage: OneBit, x: Tensor) -> tuple[Tensor, Tensor]:
    negative = torch.signbit(x)

    def mean(side: Tensor) -> Tensor:
        count = _bucketed(side.double(), stage.bucket).sum(1).clamp_min(1)
        return _spread(_bucketed(x * side, stage.bucket).double().sum(1) / count, stage.bucket, x.numel())

    wanted = torch.where(negative, mean(negative), mean(~negative))
    return wanted, wanted.abs() * 1e-5


_BOUNDS: dict[type, Callable[..., tuple[Tensor, Tensor]]] = {
    Raw: _raw, FP16: _fp16, BF16: _bf16, Uniform: _uniform, Adaptive: _adaptive, QSGD: _qsgd, Shared: _shared,
    Mean: _raw, TernGrad: _terngrad, Sign: _sign, OneBit: _onebit,
}  # fmt: skip
"""For each stage, the expected decoded values and the allowed error of each."""
