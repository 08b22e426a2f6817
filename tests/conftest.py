from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

import laws

# Examples are derived from the test alone, so a red run is red for everybody; `HYPOTHESIS_PROFILE=wide` looks further.
settings.register_profile("same", derandomize=True, deadline=None, database=None, max_examples=400)
settings.register_profile("wide", deadline=None, database=None, max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# Triton decides when it is imported whether it interprets kernels: it does where no GPU could run them.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")


# Started in the background of a script, or by nohup, a process ignores interrupts, and so do all that it starts: those
# that tests interrupt would go on for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter):
    """What was not tested for want of a browser is said where nobody overlooks it."""
    skipped = [one for one in terminalreporter.stats.get("skipped", []) if "NO BROWSER" in str(one.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests of pages had NO BROWSER: install chromium", red=True)


@pytest.fixture(autouse=True)
def _threads_as_before():
    """A test may change how many threads torch (and so laconic) uses; the next one starts from the default again."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request):
    torch.set_num_threads(request.param)
    return request.param


def pytest_generate_tests(metafunc):
    """A file that says ``SPECS = [...]`` and has a test of ``law`` and ``spec`` gets every shared law over each."""
    if {"law", "spec"} <= set(metafunc.fixturenames):
        metafunc.parametrize("spec", metafunc.module.SPECS)
        metafunc.parametrize("law", laws.CODEC, ids=[law.__name__ for law in laws.CODEC])


NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """For tests that look at pages: one at a time is what a process bears. Where there is none, a skip is loud."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"NO BROWSER, the page is not tested: none of {', '.join(NAMES)} is installed")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("NO BROWSER, the page is not tested: pip install playwright")
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=found, args=list(ARGS))
        yield chromium
        chromium.close()
