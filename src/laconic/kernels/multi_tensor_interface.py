"""The kernels that take many tensors in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from laconic.kernels.interface import BinCoding, PackedIntSum, QsgdCoding

__all__ = ["Addresses", "MultiTensorKernels", "Tensors"]

Addresses = Sequence[int]
Tensors = Sequence[Tensor]


@runtime_checkable
class MultiTensorKernels(Protocol):
    """Optional kernels that take many tensors in one launch, for devices where launches dominate small tensors.

    None of them waits for the device: amax bits and flags stay there. A flag is not 0 if a section held bytes that no
    encoder writes. ``skip`` holds the amax bits of each tensor: one that is not finite is left alone, with its residual
    and its sections.
    """

    def amax_bits_all(self, tensors: Tensors, only: Tensor | None = None) -> Tensor:
        """Return the amax bits of each tensor; 0 for those whose bits in ``only`` are finite, which are not read."""
        ...

    def fill_all(self, tensors: Tensors, amax_bits: Tensor, value: float) -> None:
        """Fill the tensors whose amax bits are not finite with one value."""
        ...

    def copy_all(self, tensors: Tensors, targets: Tensors, skip: Tensor) -> None:
        """Copy each tensor to its target."""
        ...

    def scale_all(self, tensors: Tensors, factor: float, skip: Tensor) -> None:
        """Multiply each tensor by a factor."""
        ...

    def add_all(self, tensors: Tensors, totals: Tensors, skip: Tensor | None = None) -> None:
        """Add each tensor to its total."""
        ...

    def qsgd_encode_all(
        self, tensors: Tensors, residuals: Tensors | None, coding: QsgdCoding, *, seeds: Sequence[int] | Tensor,
        norms: Addresses, packed: Addresses, skip: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """``qsgd_encode`` (or ``qsgd_feedback``) to addresses: maximum norms of 2, 4 or 8 bits. Returns amax bits."""
        ...

    def qsgd_decode_all(
        self, norms: Addresses, packed: Addresses, *, bits: int, bucket: int, outs: Tensors, weight: float | None,
        skip: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """``qsgd_decode`` from addresses; returns a flag."""
        ...

    def sign_encode_all(
        self, tensors: Tensors, *, bucket: int, sides: int, means: Addresses, packed: Addresses,
        skip: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """``sign_encode``, or with two sides ``onebit_encode``, of buckets of 256 or more. Returns amax bits."""
        ...

    def sign_decode_all(
        self, means: Addresses, packed: Addresses, *, bucket: int, sides: int, outs: Tensors, weight: float | None,
        skip: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """``sign_decode``, or with two sides ``onebit_decode``; returns a flag."""
        ...

    def bins_encode_all(
        self, tensors: Tensors, coding: BinCoding, *, means: Addresses, packed: Addresses, skip: Tensor | None = None
    ) -> Tensor:
        """``bins_encode`` to addresses; returns amax bits."""
        ...

    def bins_decode_all(
        self, means: Addresses, packed: Addresses, *, bits: int, bucket: int, outs: Tensors, weight: float | None,
        skip: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """``bins_decode`` from addresses; returns a flag."""
        ...

    def gather_blocks(
        self, tensors: Tensors, residuals: Sequence[Tensor | None], decay: float, rotation_seed: int | None, out: Tensor
    ) -> None:
        """Write whole blocks to ``out``: each tensor, rotated if there is a seed, plus ``decay`` times its residual."""
        ...

    def packed_int_decode_all(self, packed: PackedIntSum, *, rotation_seed: int | None, outs: Tensors) -> Tensor:
        """``packed_int_decode`` of such blocks, each to its tensor; returns a flag."""
        ...

    def agreed_clips(
        self, agreed: Tensor, own: Tensor, heads: Tensor, factor: float, digest: int, nonfinite: Tensor,
        mismatch: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the clips of all blocks, and the flags of each tensor by the agreed and by the own scales.

        The clips of a tensor that is not usable are 0, and its flag is not finite.

        Args:
            agreed: The largest scales of all ranks, of the blocks of all tensors, and two numbers behind them.
            own: This rank's scales.
            heads: The first block of each tensor, and the end of the last, int32.
            digest: What the two numbers must add up to.
            nonfinite: Counts the tensors that are not usable, int32.
            mismatch: Counts sums that are not the digest, int32.
        """
        ...

    def cast_encode_all(
        self, tensors: Tensors, residuals: Tensors | None, *, kind: str, limit: float, sections: Addresses,
        saturated: Tensor, skip: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """``cast_encode`` to ``fp16`` or ``bf16``, or a copy (``none``), to addresses; returns amax bits.

        With residuals, residual + tensor is encoded and the error stays in the residual.

        Args:
            limit: The largest value, at which others saturate.
            saturated: Counts them, int32.
        """
        ...

    def cast_decode_all(
        self, sections: Addresses, *, kind: str, outs: Tensors, weight: float | None, skip: Tensor | None = None
    ) -> Tensor:
        """Decode such sections, or add ``weight`` times the values; returns a flag."""
        ...

    def stochastic_bf16_all(self, tensors: Tensors, keys: Tensor, outs: Addresses) -> None:
        """``stochastic_bf16`` of each tensor to addresses, multiples of 16.

        Args:
            keys: Pairs of int32, as ``random.keys`` returns them.
        """
        ...

    def topk_all(self, tensors: Tensors, sections: Addresses, values: Tensors) -> None:
        """Select the largest magnitudes of each tensor, as many as there is memory for their values, as ``topk`` does.

        Args:
            sections: Addresses of zeroed memory, ``fixed_positions_nbytes`` of each tensor, for the positions.
            values: The selected values of each tensor, ordered by position, in one storage.
        """
        ...

    def sparse_decode_all(
        self, sections: Addresses, values: Addresses, counts: Sequence[int], outs: Tensors, weight: float | None,
        skip: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Store float32 values at such positions and zeros elsewhere, or add ``weight`` times them; returns a flag."""
        ...

    def next_round_keys(self, rounds: Tensor, inner: Tensor, keys: Tensor, names: Tensor | None = None) -> None:
        """Count a round of each shard, and write the rounding key of the seed ``splitmix64(round ^ inner)``.

        Args:
            rounds, inner: A number for each shard, int64.
            keys: Pairs of int32, as ``random.keys`` returns them.
            names: The hash of each shard's name, int64: the key is then that of the residual which it keeps.
        """
        ...
