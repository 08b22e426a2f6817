"""``bins:bits``: a few bins per bucket, and the mean of the values in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final

from torch import Tensor

from laconic.codecs import checks
from laconic.codecs.bucketed import BucketedQuantizer
from laconic.kernels.interface import BinCoding, Kernels
from laconic.kernels.multi_tensor_interface import Addresses, MultiTensorKernels, Tensors
from laconic.kernels.sections import packed_nbytes

__all__ = ["Bins"]

_SLOPE_AND_OFFSET: Final = {1: (0.0, 0.0), 2: (1.0, 0.5), 3: (0.9375, 1.3125), 4: (1.625, 2.125)}
"""By bits: ``BinCoding``'s; close to the least squared error on gaussian and Laplace values, whole and after top-k."""


@dataclass(frozen=True)
class Bins(BucketedQuantizer):
    """The mean of the values in the same bin. Biased: use it after ``ef``; made for the values that ``topk`` keeps.

    Half of the bins lie on each side of the bucket's mean. Within a side they have equal widths, a multiple of the
    standard deviation of the distances to the mean, and begin near the mean distance: values that ``topk`` has kept
    have none near zero, and bins there would be empty. As in SparseLoCo (arXiv:2508.15706) and INTELLECT-1
    (arXiv:2412.01152) a bin decodes to the mean of its values, the least squared error for given bins; their bins over
    ±3 or ±6 standard deviations have a larger error.

    Args:
        bits: Bits per value, 1 to 4.
        bucket: Values that share the means: a power of two, 128 to 65,536.

    Payload: ``float32 mean[2^bits]`` per bucket, then packed symbols: 2.03 bits a value for ``bins:2``.
    """

    bits: int = 2
    bucket: int = 4096

    name, example = "bins", "ef|topk:0.01|bins:2"
    summary = "the means of a few bins"
    biased = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer(self, "bits", 1, 4)

    @property
    def max_alphabet(self) -> int:
        return 1 << self.bits

    @property
    def floats_per_bucket(self) -> int:
        return 1 << self.bits

    @cached_property
    def coding(self) -> BinCoding:
        return BinCoding(self.bits, self.bucket, *_SLOPE_AND_OFFSET[self.bits])

    def symbols_nbytes(self, n: int) -> int:
        return packed_nbytes(n, self.bits)

    def quantize(self, x: Tensor, kernels: Kernels, seed: int, floats: Tensor, packed: Tensor) -> int:
        return kernels.bins_encode(x, self.coding, means=floats, packed=packed)

    def dequantize(self, floats: Tensor, packed: Tensor, kernels: Kernels, out: Tensor, weight: float | None) -> None:
        kernels.bins_decode(floats, packed, bits=self.bits, bucket=self.bucket, out=out, weight=weight)

    @property
    def has_multi_tensor_kernels(self) -> bool:
        return True

    def encode_all(
        self, tensors: Tensors, kernels: MultiTensorKernels, floats: Addresses, packed: Addresses, skip: Tensor | None
    ) -> Tensor:
        return kernels.bins_encode_all(tensors, self.coding, means=floats, packed=packed, skip=skip)

    def multi_tensor_decoder(self, kernels: MultiTensorKernels) -> Callable[..., Tensor]:
        return partial(kernels.bins_decode_all, bits=self.bits, bucket=self.bucket)
