"""Fixtures of the cluster tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers import Peer


@pytest.fixture
def peers() -> Iterator[Callable[..., Peer]]:
    """Return a factory of peers that are closed after the test."""
    made: list[Peer] = []

    def make(port: int, credentials: Any = None) -> Peer:
        made.append(Peer(port, credentials))
        return made[-1]

    yield make
    for peer in made:
        peer.close()
