"""Sections of positions: the backends that read them, and tests of sections that no encoder writes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import ModuleType

import pytest
import torch
from torch import Tensor

from laconic import FrameError
from laconic.kernels import cpu, reference, torch_fallback
from laconic.kernels.sections import read_positions_header

BACKENDS = pytest.mark.parametrize(
    "backend", [cpu, reference, torch_fallback], ids=["cpu", "reference", "torch_fallback"]
)


def read(backend: ModuleType, section: Tensor, n: int) -> Tensor:
    return backend.positions_decode(section, n, read_positions_header(section, n))


def raises_frame_error(sections: Mapping[str, Tensor], n: int) -> Callable[..., None]:
    """Return a test that reads each section as positions of n values, on every backend."""

    @BACKENDS
    @pytest.mark.parametrize("kind", sections)
    def test(backend: ModuleType, kind: str) -> None:
        with pytest.raises(FrameError):
            read(backend, sections[kind], n)

    return test


def read_or_refuse(backend: ModuleType, section: Tensor, n: int) -> list[int] | None:
    """Return the positions, or None if the section is refused."""
    try:
        return read(backend, section, n).tolist()
    except FrameError:
        return None


def refused_of_damaged(section: Tensor, n: int, *, header: int, times: int) -> int:
    """Damage a section many times, require that all backends read or refuse it alike, and return how many they refuse.

    Args:
        header: Bytes of its header, which are damaged more often than others.
    """
    rng, refused = random.Random(5), 0
    for _ in range(times):
        bad = bytearray(section.tolist())
        move = rng.randrange(4)
        if move == 0:
            del bad[rng.randrange(len(bad)) :]
        elif move == 1:
            bad += bytes(rng.choice((1, 2, 40)))
        else:
            at = rng.randrange(min(rng.choice((header, 60, len(bad))), len(bad)))
            bad[at] ^= 1 << rng.randrange(8)
        damaged = torch.tensor(list(bad), dtype=torch.uint8)
        positions = read_or_refuse(cpu, damaged, n)
        assert read_or_refuse(reference, damaged, n) == read_or_refuse(torch_fallback, damaged, n) == positions
        refused += positions is None
        if positions is not None:
            assert positions == sorted(set(positions)) and positions[0] >= 0 and positions[-1] < n
    return refused
