from __future__ import annotations

import pytest
import torch

from laconic_lab.studies.kothari2021.stepper import Source


@pytest.fixture(autouse=True)
def _one_thread(_threads_as_before: None) -> None:
    """Networks are small: threads would only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def source() -> Source:
    """A tenth of the digits: an epoch is three iterations."""
    found = Source("digits", None, torch.device("cpu"))
    train, test = found.examples
    train.inputs, train.targets = train.inputs[:400], train.targets[:400]
    test.inputs, test.targets = test.inputs[:200], test.targets[:200]
    return found
