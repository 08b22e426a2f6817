from __future__ import annotations

import pytest
import torch

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
