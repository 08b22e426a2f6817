"""Slow sockets, which need no root: what they send, all of it, and how fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from alone import ALONE

from laconic.errors import ConfigError
from laconic_lab.network import Link, paced_sockets
from laconic_lab.network.paced_sockets import PacedSockets, paced_bytes

# Sends a megabyte and a half by every call there is, and says what arrived, and when.
SENDER = """
import hashlib, json, os, selectors, socket, sys, threading, time
from laconic_lab.network.paced_sockets import paced_bytes

how, data = sys.argv[1], os.urandom(1_500_000)
server = socket.create_server(("127.0.0.1", 0))
near = socket.create_connection(server.getsockname())
far, _ = server.accept()
got = bytearray()

def receive():
    while part := far.recv(1 << 16):
        got.extend(part)

receiver = threading.Thread(target=receive)
receiver.start()
view, sent, again, began = memoryview(data), 0, 0, time.monotonic()
pieces = [view[i : i + 1000] for i in range(0, len(view), 1000)]
if how == "sendall":
    near.sendall(view)
elif how == "sendmsg":
    while sent < len(data):
        sent += near.sendmsg([view[sent : sent + 5000], view[sent + 5000 :]])
elif how == "writev":
    assert os.writev(near.fileno(), pieces[:900]) == 900_000  # a blocking socket takes all of it
    sent = os.writev(near.fileno(), pieces[900:])
    assert sent == 600_000
elif how == "write":
    assert os.write(near.fileno(), data) == len(data)
else:  # a loop that never blocks, and reads in between
    near.setblocking(False)
    loop = selectors.DefaultSelector()
    loop.register(near, selectors.EVENT_WRITE)
    while sent < len(data):
        loop.select()
        try:
            sent += os.writev(near.fileno(), [view[sent : sent + 70_000], view[sent + 70_000 : sent + 300_000]])
        except BlockingIOError:
            again += 1
took = time.monotonic() - began
near.shutdown(socket.SHUT_WR)
receiver.join()
print(json.dumps({"took": took, "same": bytes(got) == data, "paced": paced_bytes(), "again": again}))
"""


def sent_by(how: str, rate: str | None, delay: str = "0") -> dict[str, Any]:
    process = PacedSockets(rate, delay).popen(
        [sys.executable, "-c", ALONE + SENDER, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    said, wrong = process.communicate(timeout=60)
    assert process.returncode == 0, wrong
    report: dict[str, Any] = json.loads(said)
    return report


@pytest.mark.parametrize("how", ["sendall", "sendmsg", "writev", "write", "loop"])
def test_paced_bytes_arrive_complete_and_not_too_early(how: str) -> None:
    report = sent_by(how, "50mbit")
    least = (1_500_000 - 64 * 1024) * 8 / 50e6 / 0.956
    assert report["same"] and report["paced"] == 1_500_000
    assert 0.98 * least < report["took"] < 20 * least  # the machine may have other things to do
    assert (0 < report["again"] < 3_000) == (how == "loop")  # and it does not spin


@pytest.mark.parametrize("how", ["writev", "loop"])
def test_delayed_bytes_arrive_complete_before_the_end_of_the_connection(how: str) -> None:
    report = sent_by(how, "50mbit", "40ms")
    assert report["same"] and report["paced"] == 1_500_000


def test_delay_is_that_of_one_direction() -> None:
    link = PacedSockets("20mbit", "30ms").measure(0.3)
    assert 0.06 <= link.round_trip < 0.6  # the machine may have other things to do


def test_sockets_without_a_rate_are_not_paced() -> None:
    report = sent_by("sendall", None)
    assert report["same"] and report["paced"] is None and paced_bytes() is None


def test_paced_link_is_measured(settled: Callable[[Callable[[], Link]], Link]) -> None:
    link = settled(lambda: PacedSockets("20mbit").measure(0.5))
    assert link.rate == 20e6 and link.valid


def test_invalid_preload_settings_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="a rate is a number"):
        PacedSockets("fast")
    with pytest.raises(ConfigError, match="delay needs a rate"):
        PacedSockets(None, "5ms")
    env = PacedSockets("1mbit").environment({"LD_PRELOAD": "/lib/other.so", "A": "b"})
    assert env["LD_PRELOAD"].endswith("_pace.so:/lib/other.so") and env["A"] == "b"
    done = subprocess.run(
        [sys.executable, "-c", ""], env=os.environ | env | {"LD_PRELOAD": env["LD_PRELOAD"].split(":")[0],
        "LACONIC_PACE": "fast"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "LACONIC_PACE must be" in done.stderr
    monkeypatch.setattr(paced_sockets.laconic_lab, "__path__", [str(tmp_path)])
    with pytest.raises(ConfigError, match="slow sockets need laconic_lab"):
        PacedSockets("1mbit")
