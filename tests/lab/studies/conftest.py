from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from laconic_lab.bench.corpus import Corpus
from laconic_lab.studies.stepper import Source


@pytest.fixture(autouse=True)
def _one_thread(_restore_num_threads: None) -> None:
    """Use one thread: the networks are so small that threads would only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def source() -> Source:
    """A tenth of the digits: an epoch is three iterations."""
    digits = Source("digits", None, torch.device("cpu"))
    train, test = digits.examples
    train.inputs, train.targets = train.inputs[:400], train.targets[:400]
    test.inputs, test.targets = test.inputs[:200], test.targets[:200]
    return digits


@pytest.fixture
def tiny_text(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, ModuleType, Any], None]:
    """Return a function that gives a study of text a size ``tiny`` and short evaluations."""

    def add_tiny(model: ModuleType, training: ModuleType, shape: Any) -> None:
        monkeypatch.setitem(model.SIZES, "tiny", shape)
        monkeypatch.setattr(training, "VALIDATION_WINDOWS", 8)
        monkeypatch.setattr(training, "EVALUATIONS", 2)

    return add_tiny


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    """Random letters."""
    text = torch.randint(97, 123, (1 << 17,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Corpus(text[: 1 << 16], text[1 << 16 :], 2, "0" * 64)
