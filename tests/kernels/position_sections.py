"""Sections of positions: the backends that read them, and tests of sections that no encoder writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType

import pytest
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
