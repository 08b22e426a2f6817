"""Threads and conditions that a test waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


def in_threads(*calls: Callable[[], Any], timeout: float = 60.0) -> list[Any]:
    """Call all functions at once; return their results, or raise the first error."""
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return [results[number] for number in range(len(calls))]


def eventually(condition: Callable[[], object], seconds: float = 5.0) -> bool:
    """Wait for a condition; return whether it became true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False
