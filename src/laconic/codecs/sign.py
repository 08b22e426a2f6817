"""``sign`` and ``onebit``: one bit a value, and one or two means per bucket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from laconic.codecs.bucketed import BucketedQuantizer
from laconic.kernels.interface import Kernels
from laconic.kernels.multi_tensor_interface import Addresses, MultiTensorKernels, Tensors
from laconic.kernels.sections import GROUP, packed_nbytes

__all__ = ["OneBit", "Sign"]


class _SignBits(BucketedQuantizer):
    """Writes the sign bit of each value, and one or two means per bucket."""

    @property
    def max_alphabet(self) -> int:
        return 2

    def symbols_nbytes(self, n: int) -> int:
        return packed_nbytes(n, 1)

    @property
    def has_multi_tensor_kernels(self) -> bool:
        return self.bucket >= GROUP

    def encode_all(
        self, tensors: Tensors, kernels: MultiTensorKernels, floats: Addresses, packed: Addresses, skip: Tensor | None
    ) -> Tensor:
        return kernels.sign_encode_all(
            tensors, bucket=self.bucket, sides=self.floats_per_bucket, means=floats, packed=packed, skip=skip
        )

    def multi_tensor_decoder(self, kernels: MultiTensorKernels) -> Callable[..., Tensor]:
        return partial(kernels.sign_decode_all, bucket=self.bucket, sides=self.floats_per_bucket)


@dataclass(frozen=True)
class Sign(_SignBits):
    """±mean|x|, with the sign bit of the value (zero is positive). Biased: use it after ``ef``.

    The scaled sign of Karimireddy et al. 2019 (arXiv:1901.09847), with a scale per bucket.

    Args:
        bucket: Values that share a scale: a power of two, 128 to 65,536.

    Payload: ``float32 scale[ceil(n / bucket)]``, then one bit a value: 1.008 bits.
    """

    bucket: int = 4096

    name, example = "sign", "ef|sign"
    summary = "sign bit and mean magnitude"
    biased = True

    def quantize(self, x: Tensor, kernels: Kernels, seed: int, floats: Tensor, packed: Tensor) -> int:
        return kernels.sign_encode(x, bucket=self.bucket, scales=floats, packed=packed)

    def dequantize(self, floats: Tensor, packed: Tensor, kernels: Kernels, out: Tensor, weight: float | None) -> None:
        kernels.sign_decode(floats, packed, bucket=self.bucket, out=out, weight=weight)


@dataclass(frozen=True)
class OneBit(_SignBits):
    """The mean of the bucket's non-negative or negative values, by the sign bit. Biased: use it after ``ef``.

    Seide et al. 2014, with buckets instead of columns: the least squared error that one bit and two means can give.

    Args:
        bucket: Values that share the two means: a power of two, 128 to 65,536.

    Payload: ``float32 plus, minus`` per bucket, then one bit a value: 1.008 bits.
    """

    bucket: int = 8192

    name, example = "onebit", "ef|onebit"
    summary = "sign bit and the mean of each side"
    biased = True

    @property
    def floats_per_bucket(self) -> int:
        return 2

    def quantize(self, x: Tensor, kernels: Kernels, seed: int, floats: Tensor, packed: Tensor) -> int:
        return kernels.onebit_encode(x, bucket=self.bucket, means=floats, packed=packed)

    def dequantize(self, floats: Tensor, packed: Tensor, kernels: Kernels, out: Tensor, weight: float | None) -> None:
        kernels.onebit_decode(floats, packed, bucket=self.bucket, out=out, weight=weight)
