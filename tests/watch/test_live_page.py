"""The page of a training run in a real browser, with its metrics and event files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_folders import Folder, server, worker
from test_metrics import parse
from test_tensorboard import read_scalars

from laconic.watch.view import Watcher
from laconic.watch.web import WatchServer

PATIENCE = 60.0


def wait_until(what: str, condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if result := condition():
            return result
        time.sleep(0.05)
    return pytest.fail(f"waited {seconds:.0f} s for {what}")


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page on which any console error or policy violation fails the test."""
    context = browser.new_context()
    page = context.new_page()
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    context.close()
    assert [error for error in errors if "net::ERR_CONNECTION" not in error] == []  # after the server has ended


def start(*words: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "laconic", *map(str, words)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def worker_pids(run: Path, number: int) -> list[int]:
    """Return the process ids of a worker of a run."""
    pids = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                words = (process / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if "worker" in words and str(run) in words and words[words.index("--worker") + 1] == str(number):
                pids.append(int(process.name))
    return pids


@pytest.mark.slow
def test_page_follows_a_run_in_which_a_worker_is_killed(page: Any, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    pytest.importorskip("tensorboardX")
    run, boards = tmp_path / "run", tmp_path / "boards"
    watching = start("watch", run, "--wait", "--web", "--json")
    training = None
    try:
        assert watching.stdout is not None
        url = json.loads("".join(watching.stdout.readline() for _ in range(4)))["url"]
        page.goto(url)
        page.wait_for_selector("text=no run in this folder yet")
        flags = ("--workers", 2, "--iterations", 1_000_000, "--method", "5", "--metrics", "127.0.0.1:0")
        training = start("train", *flags, "--run-dir", run, "--tensorboard", boards)
        assert training.stderr is not None
        own_metrics = training.stderr.readline().removeprefix("metrics at ").strip()
        page.wait_for_selector("#phase.running", timeout=1000 * PATIENCE)

        def iteration() -> int:
            return int(page.inner_text("#iteration").split(" of ")[0])

        def starts(number: int) -> str:
            return str(page.locator("#workers tr").nth(number).locator("td").nth(7).inner_text())

        wait_until("iterations", lambda: iteration() > 3)
        wait_until("a curve", lambda: page.locator("#loss-chart path").count())
        curve, before = page.get_attribute("#loss-chart path", "d"), iteration()
        wait_until("more iterations", lambda: iteration() > before)
        wait_until("a longer curve", lambda: page.get_attribute("#loss-chart path", "d") != curve)
        assert re.fullmatch(r"[0-9.]+", page.inner_text("#loss")) and "/s" in page.inner_text("#bytes")
        assert page.locator("#workers tr").count() == 2 and starts(0) == starts(1) == "1"
        assert page.inner_text("#faults") == "0"

        (pid,) = worker_pids(run, 1)
        os.kill(pid, signal.SIGKILL)
        wait_until("the worker's restart", lambda: starts(1) == "2")
        assert int(page.inner_text("#faults")) > 0 and "restarted 1" in page.inner_text("#kinds")
        assert "worker 1 was restarted" in page.inner_text("#recent") and starts(0) == "1"
        after = iteration()
        wait_until("iterations after that", lambda: iteration() > after)
        assert page.get_attribute("body", "data-connected") == "yes"

        for where in (own_metrics, f"{url}metrics"):
            with urllib.request.urlopen(where) as response:
                values = parse(response.read().decode())
            assert set(values["laconic_worker_starts_total"].values()) == {1, 2}
            assert set(values["laconic_up"].values()) == {1}
            assert sum(values["laconic_worker_seconds_total"].values()) > 0

        training.send_signal(signal.SIGTERM)
        page.wait_for_selector("#phase.stopped", timeout=20_000)
        training.communicate(timeout=20)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 0, "Ctrl-C ends the server"
        wait_until("the alert that the server is gone", lambda: "does not answer" in page.inner_text("#alert"), 10)
    finally:
        for process in (training, watching):
            if process is not None:
                process.kill()
                process.communicate()
    (event_file,) = boards.iterdir()
    losses = [scalars["loss"] for _, _, scalars in read_scalars(event_file) if "loss" in scalars]
    assert len(losses) > 3 and losses[-1] < losses[0]
    view = Watcher(run).view()
    assert view.phase == "stopped" and view.workers[1].lives == 2 and view.saved > 0


MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'&"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_of_the_folder_are_never_markup(browser: Any, tmp_path: Path, scheme: str) -> None:
    folder = Folder(tmp_path / "<b>run")
    folder.config(model=MARKUP, method=MARKUP, data=MARKUP)
    fault = {"at": 1.0, "what": MARKUP}
    workers = [worker(7, 0.25, state="lost"), worker(9, None)]
    folder.status(server(at=1.0, phase="failed", failure=MARKUP, workers=workers, faults={MARKUP: 3}, recent=[fault]))
    (folder.path / "progress.jsonl").write_text(
        "".join(json.dumps(folder.point(at=float(i), iteration=i)) + "\n" for i in range(5))
    )
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    alerts: list[str] = []
    page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
    with WatchServer(folder.watcher().view) as site:
        page.goto(site.url)
        page.wait_for_selector("#phase.failed")
        for where in ("#about", "#alert", "#kinds", "#recent"):
            assert MARKUP in page.inner_text(where)
        assert page.locator("img").count() == 0 and page.locator("script").count() == 1 and alerts == []
        assert page.inner_text("#run").endswith("<b>run") and page.inner_text("#faults") == "3"
        assert page.locator("#workers td.lost").count() == 1
        ink = page.evaluate("getComputedStyle(document.body).color")
        assert ink == {"light": "rgb(28, 30, 33)", "dark": "rgb(230, 232, 235)"}[scheme]
    context.close()


@pytest.mark.parametrize("width", [1400, 390])
def test_page_fits_the_screen(page: Any, tmp_path: Path, width: int) -> None:
    folder = Folder(tmp_path / "run")
    folder.config()
    folder.status(server(at=9.0, phase="ended", workers=[worker(9, 0.25), worker(9, 0.5)]))
    points = [folder.point(at=float(i), iteration=i, received=1000 * i, sent=2000 * i) for i in range(10)]
    (folder.path / "progress.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    tests = [{"at": at, "iteration": int(at), "accuracy": 80 + at, "examples": 10} for at in (1.0, 4.0)]
    (folder.path / "accuracy.jsonl").write_text("".join(json.dumps(point) + "\n" for point in tests))
    page.set_viewport_size({"width": width, "height": 800})
    with WatchServer(folder.watcher().view) as site:
        page.goto(site.url)
        page.wait_for_selector("#accuracy-chart path")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.is_visible(".hint") == (width == 390)
        drawn = page.evaluate("""[...document.querySelectorAll("svg")].map((svg) => {
          const box = svg.getBoundingClientRect();
          const texts = [...svg.querySelectorAll("text")].map((e) => e.getBoundingClientRect());
          const inside = texts.every((t) => t.left >= box.left && t.right <= box.right + 1 && t.bottom <= box.bottom);
          return [texts.length, inside, Math.min(...texts.map((t) => t.height)) > 9];
        })""")
        assert drawn == [[5, True, True]] * 3
        ends = page.locator("svg text:last-of-type").all_text_contents()
        assert ends == ["0:09"] * 3  # all charts have the same time axis
