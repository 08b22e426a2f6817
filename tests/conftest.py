from __future__ import annotations

import logging
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

import laws
from laconic import counters

# Examples depend on the test alone, so that a failure is reproducible; `HYPOTHESIS_PROFILE=wide` tries more of them.
settings.register_profile("same", derandomize=True, deadline=None, database=None, max_examples=400)
settings.register_profile("wide", deadline=None, database=None, max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# xdist sets it in its processes, but commands are tested as in a pipe.
os.environ.pop("COLUMNS", None)

# Triton reads this when it is imported: without a GPU it interprets the kernels.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")


# A process started in the background of a script, or by nohup, ignores interrupts, and its children inherit that:
# processes that tests interrupt would not end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter):
    """Count the skipped tests by reason, in one line."""
    reasons = Counter(_skip_reason(report) for report in terminalreporter.stats.get("skipped", []))
    if reasons:
        by_reason = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"{reasons.total()} skipped: {by_reason}", yellow=True)


def _skip_reason(report) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    missing = re.match(r"could not import '([^']+)'", reason)
    return f"no {missing[1]}" if missing else reason


@pytest.fixture(autouse=True)
def _log_again(monkeypatch):
    """Let each test see the warnings that the process logs once, whatever ran before it in the same process.

    A page's example may also have raised the level of the log.
    """
    monkeypatch.setattr(counters, "_warn", counters.LogOnce("laconic.counters.counts()"))
    yield
    counters.log.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _restore_num_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request):
    torch.set_num_threads(request.param)
    return request.param


def pytest_generate_tests(metafunc):
    """Run every law for each of a module's ``SPECS``, in a test with the arguments ``law`` and ``spec``."""
    if {"law", "spec"} <= set(metafunc.fixturenames):
        metafunc.parametrize("spec", metafunc.module.SPECS)
        metafunc.parametrize("law", laws.CODEC, ids=[law.__name__ for law in laws.CODEC])


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER_ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start a browser; playwright allows one at a time in a process."""
    path = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if path is None:
        pytest.skip("no browser (install chromium)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("no playwright")
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=path, args=list(BROWSER_ARGUMENTS))
        yield chromium
        chromium.close()
