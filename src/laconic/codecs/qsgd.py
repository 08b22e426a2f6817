"""``qsgd:bits``: stochastic rounding to a few levels, a norm per bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from torch import Tensor

from laconic.codecs import checks
from laconic.codecs.base import require_finite
from laconic.codecs.bucketed import BucketedQuantizer
from laconic.kernels.interface import Kernels, QsgdCoding
from laconic.kernels.multi_tensor_interface import Addresses, MultiTensorKernels, Tensors
from laconic.kernels.sections import packed_nbytes
from laconic.packet import Arena

__all__ = ["QSGD"]


@dataclass(frozen=True)
class QSGD(BucketedQuantizer):
    """A sign and s = 2^(bits-1) - 1 levels of |x| / norm, rounded up or down at random so that the mean is x.

    Alistarh et al. 2017 (arXiv:1610.02132); level l + 1 has probability s |x| / norm - l, exact to the precision of
    float32.

    Args:
        bits: Bits per value, 2 to 12.
        bucket: Values that share a norm: a power of two, 128 to 65,536; 0, or ``layer`` in a spec: all values of the
            tensor, as in the papers. Then most values are below one level unless there are many.
        norm: ``max`` (less variance, faster) or ``l2`` (the paper's).
        round: ``stochastic``; or ``nearest``, deterministic and biased, which is better with error feedback.

    Payload: ``float32 norm[ceil(n / bucket)]`` (one for bucket 0), then packed symbols. 4.0625 bits a value for
    ``qsgd:4``.
    """

    bits: int = 4
    bucket: int = field(default=512, metadata={"word_for_zero": "layer"})
    norm: str = "max"
    round: str = "stochastic"

    name, example = "qsgd", "qsgd:4"
    summary = "stochastic rounding, a norm per bucket"
    biased = "only with round=nearest"

    def __post_init__(self) -> None:
        checks.bucket(self, whole=True)
        checks.integer(self, "bits", 2, 12)
        checks.one_of(self, "norm", ("max", "l2"))
        checks.one_of(self, "round", ("stochastic", "nearest"))

    @property
    def is_biased(self) -> bool:
        return self.round == "nearest"

    @property
    def randomized(self) -> bool:
        return self.round == "stochastic"

    @property
    def contractive(self) -> bool:
        # One level (two bits) decodes to 0 or to the norm: the error may exceed the input.
        return self.round == "nearest" or (self.bits > 2 and self.norm == "max")

    @property
    def max_alphabet(self) -> int:
        return 1 << self.bits

    @cached_property
    def coding(self) -> QsgdCoding:
        return QsgdCoding(self.bits, self.bucket, self.norm == "l2", self.round == "stochastic")

    @property
    def has_multi_tensor_kernels(self) -> bool:
        return self.bits in (2, 4, 8) and self.norm == "max" and self.bucket > 0

    def quantize_all(
        self, tensors: Tensors, residuals: Tensors | None, kernels: MultiTensorKernels, seeds: Sequence[int] | Tensor,
        floats: Addresses, packed: Addresses, skip: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return kernels.qsgd_encode_all(
            tensors, residuals, self.coding, seeds=seeds, norms=floats, packed=packed, skip=skip
        )

    def multi_tensor_decoder(self, kernels: MultiTensorKernels) -> Callable[..., Tensor]:
        return partial(kernels.qsgd_decode_all, bits=self.bits, bucket=self.bucket)

    def symbols_nbytes(self, n: int) -> int:
        return packed_nbytes(n, self.bits)

    def quantize(self, x: Tensor, kernels: Kernels, seed: int, floats: Tensor, packed: Tensor) -> int:
        return kernels.qsgd_encode(x, self.coding, seed=seed, norms=floats, packed=packed)

    def encode_feedback(
        self, x: Tensor, residual: Tensor, kernels: Kernels, arena: Arena, seed: int
    ) -> tuple[Tensor, ...]:
        norms, packed = (arena.take(nbytes) for nbytes in self.section_nbytes(x.numel(), 4))
        amax_bits = kernels.qsgd_feedback(x, residual, self.coding, seed=seed, norms=norms, packed=packed)
        require_finite(amax_bits, x.numel())
        return (norms, packed) if amax_bits else ()

    def dequantize(self, floats: Tensor, packed: Tensor, kernels: Kernels, out: Tensor, weight: float | None) -> None:
        kernels.qsgd_decode(floats, packed, bits=self.bits, bucket=self.bucket, out=out, weight=weight)
