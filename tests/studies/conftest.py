from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(_threads_as_before: None) -> None:
    """Networks are small: threads would only wait for each other."""
    torch.set_num_threads(1)
