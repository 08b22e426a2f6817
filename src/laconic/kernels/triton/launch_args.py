"""Arguments and options of launches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from laconic.kernels.random import M32

__all__ = ["TILE", "exact_options", "packing_period", "split64", "whole_words", "word_aligned"]

TILE = 2048
"""Values per program, unless a bucket needs more: two warps with 32 values per thread."""


def exact_options(**options: Any) -> dict[str, Any]:
    """Return launch options under which a product and a sum round twice, as in the reference."""
    return {"enable_fp_fusion": False, **options}


def packing_period(bits: int) -> int:
    """Return the number of rows after which a symbol begins a word again."""
    return 32 // math.gcd(bits, 32)


def word_aligned(section: Tensor) -> Tensor:
    """Return the section, or a copy of it if it does not begin at a multiple of four bytes."""
    return section if section.data_ptr() % 4 == 0 else section.clone()


def whole_words(section: Tensor, nbytes: int = 4) -> Tensor:
    """Return the section, or a copy if it is not aligned or its last word is not all inside its storage.

    Args:
        nbytes: Of a word: kernels read words of so many bytes at multiples of it.
    """
    begin, numel = section.data_ptr(), section.numel()
    after = section.untyped_storage().nbytes() - section.storage_offset() - numel
    if begin % 4 == 0 and after >= -(begin + numel) % nbytes:
        return section
    words = torch.empty(-(-numel // nbytes) * nbytes // 4, dtype=torch.int32, device=section.device)
    return words.view(torch.uint8)[:numel].copy_(section)


def split64(number: int) -> tuple[int, int]:
    """Return a 64-bit number as two int32 arguments, low half first; Triton would change a larger one's type."""
    low, high = number & M32, number >> 32 & M32
    return (low ^ 0x80000000) - 0x80000000, (high ^ 0x80000000) - 0x80000000
