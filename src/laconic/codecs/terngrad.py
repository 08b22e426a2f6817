"""``terngrad``: minus, zero or plus the largest magnitude of the bucket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.codecs.bucketed import BucketedQuantizer
from laconic.kernels.interface import Kernels
from laconic.kernels.sections import trits_nbytes

__all__ = ["TernGrad"]


@dataclass(frozen=True)
class TernGrad(BucketedQuantizer):
    """Ternary gradients: ±max|x| with probability |x| / max|x|, else 0. Unbiased, with high variance.

    Wen et al. 2017 (arXiv:1705.07878), with a scale per bucket instead of per layer. Five symbols share a byte.

    Args:
        bucket: Values that share a scale: a power of two, 128 to 65,536.

    Payload: ``float32 scale[ceil(n / bucket)]``, then five symbols a byte: 1.66 bits a value.
    """

    bucket: int = 512

    name, example = "terngrad", "terngrad"
    summary = "ternary, stochastic, a scale per bucket"
    ternary: ClassVar[bool] = True

    @property
    def randomized(self) -> bool:
        return True

    @property
    def contractive(self) -> bool:
        return False

    @property
    def max_alphabet(self) -> int:
        return 3

    def symbols_nbytes(self, n: int) -> int:
        return trits_nbytes(n)

    def quantize(self, x: Tensor, kernels: Kernels, seed: int, floats: Tensor, packed: Tensor) -> int:
        return kernels.ternary_encode(x, bucket=self.bucket, seed=seed, norms=floats, packed=packed)

    def dequantize(self, floats: Tensor, packed: Tensor, kernels: Kernels, out: Tensor, weight: float | None) -> None:
        kernels.ternary_decode(floats, packed, bucket=self.bucket, out=out, weight=weight)
