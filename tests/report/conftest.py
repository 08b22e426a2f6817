"""Pages opened in a browser, and a few runs to report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Opened:
    """A page in a browser, with its errors and requests."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **context})
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.resolve().as_uri())

    def js(self, code: str, argument: Any = None) -> Any:
        return self.page.evaluate(code, argument)


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """Return a function that opens pages; all of them are closed after the test."""
    pages: list[Opened] = []

    def open_page(path: Path, **context: Any) -> Opened:
        pages.append(Opened(browser, path, **context))
        return pages[-1]

    yield open_page
    for page in pages:
        page.context.close()


@pytest.fixture(scope="module")
def demo_runs(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train three short runs by real servers and workers: dense, compressed, and asynchronous.

    The browser is only requested so that nothing is trained without one.
    """
    pytest.importorskip("grpc")
    from laconic.cluster.job import Job
    from laconic.train.launch import launch
    from laconic.train.methods import method_options
    from laconic.train.run import Config

    folder = tmp_path_factory.mktemp("runs")
    runs = {}
    for name, method, mode in (("one", "1", "sync"), ("five", "5", "sync"), ("free", "2", "async")):
        job = Job(**{"workers": 2, "mode": mode, "lr": 0.05} | method_options(method, mode))
        runs[folder / name] = Config(iterations=20, method=method, job=job)
    launch(runs)
    return folder
