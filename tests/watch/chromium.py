"""A headless Chromium for the pages of this room; skipped loudly where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip


@contextmanager
def chromium() -> Iterator[Any]:
    where = os.environ.get("LACONIC_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if find_spec("playwright") is None or where is None:
        missing = "playwright is not installed" if find_spec("playwright") is None else "there is no chromium"
        pytest.skip(f"NOT TESTED: pages in a browser, because {missing}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=where, args=list(FLAGS))
        try:
            yield made
        finally:
            made.close()
