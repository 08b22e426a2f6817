"""The command ``laconic calibrate``."""

from __future__ import annotations

import queue
import shlex
import socket
import threading
from pathlib import Path

import pytest

from cli_runner import Run
from laconic.cli import calibrate
from laconic.plan.profile import Transport, load, shipped
from laconic.train import calibrate as calibration


def test_calibrate_writes_a_profile_that_plan_reads(run: Run, work_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transport and ranks are measured by real processes in tests/plan/test_calibration.py."""
    transport = Transport(0.01, 0.001, 1e-9)
    monkeypatch.setattr(calibration, "measure_transport", lambda profile, exchanges: transport)
    monkeypatch.setattr(calibration, "measure_ranks", lambda device, turns: {"twoshot": transport})
    monkeypatch.setattr(calibration, "busy", lambda load_average, others: True)
    first, _ = calibrate.EXAMPLES
    result = run(*shlex.split(first)[1:], "--processes", "1")
    assert result.exit_code == 0, result.output
    assert "qsgd:4" in result.stdout and "machine.json written" in result.stderr
    assert "transport: 10 ms an exchange, 1 ms each further slot, 1 ns a byte" in result.stdout
    assert "ranks, twoshot: 10 ms an exchange, 1 ms each further slot, 1 ns a byte" in result.stdout
    profile = load("machine.json")
    assert profile.collective == {"twoshot": transport}
    assert list(profile.codecs) == ["none", "bf16", "qsgd:4"] and profile.transport == transport
    assert profile.load is not None and profile.load.busy and "the machine was busy" in result.stderr
    model = profile.models["mlp"]
    assert model.numel == 327_880 and 0 < model.ready[0][0] < 1
    assert model.messages["qsgd:4"]["push"] == pytest.approx(327_880 / 2, rel=0.06)
    planned = run("plan", "--model", "mlp", "--profile", "machine.json", "--workers", "2", "--bandwidth", "10mbit")
    assert planned.exit_code == 0 and "left out, although trained" in " ".join(planned.stderr.split())
    assert "qsgd:4 would be" in " ".join(planned.stdout.split())  # lines end where the times of this machine make them


@pytest.mark.parametrize("profile", shipped())
def test_models_that_plan_names_can_be_calibrated(profile: str) -> None:
    for name in load(profile).models:
        calibration.check_model(name)


def test_calibrate_without_transport_makes_plan_warn(run: Run, work_dir: Path) -> None:
    words = ("--codec", "none", "--quick", "--processes", "1", "--no-transport", "--no-ranks")
    assert run("calibrate", "-o", "bare.json", *words).exit_code == 0
    planned = run("plan", "--params", "1000000", "--step-time", "1", "--profile", "bare.json")
    assert planned.exit_code == 0 and "profile bare has no transport" in planned.stderr
    ring = run("plan", "--params", "1000000", "--step-time", "1", "--profile", "bare.json", "--topology", "ring")
    assert ring.exit_code == 0 and "profile bare has no times of ranks" in " ".join(ring.stderr.split())


@pytest.mark.parametrize("words, message", [
    (("--device", "tpu"), "device must be cpu or cuda"), (("--codec", "qsdg:4"), "unknown stage 'qsdg'"),
    (("--codec", "none", "--model", "nix"), "model must be one of mlp, "),
    (("--processes", "a,b"), "--processes must be whole numbers of at least 1"),
    (("--codec", "none", "--quick", "--processes", "1", "--peer", "nowhere"), "--peer must be HOST:PORT"),
])  # fmt: skip
def test_invalid_input_prints_an_error_and_writes_nothing(
    run: Run, work_dir: Path, words: tuple[str, ...], message: str
) -> None:
    result = run("calibrate", "-o", "x.json", *words)
    assert result.exit_code in (1, 2) and message in result.stderr
    assert not (work_dir / "x.json").exists()


def test_both_ends_of_a_link_measure_the_same_goodput(monkeypatch: pytest.MonkeyPatch) -> None:
    from laconic import link_probe
    from laconic.plan.link import measure_link

    received: dict[str, float] = {}
    ports: queue.SimpleQueue[int] = queue.SimpleQueue()
    create_server = socket.create_server

    def reporting_port(address: tuple[str, int]) -> socket.socket:
        server = create_server(address)
        ports.put(server.getsockname()[1])
        return server

    monkeypatch.setattr(link_probe.socket, "create_server", reporting_port)
    listener = threading.Thread(target=lambda: received.update(link_probe.serve("127.0.0.1")))
    listener.start()
    link = measure_link(f"127.0.0.1:{ports.get(timeout=10)}", seconds=0.5)
    listener.join(20)
    assert link["goodput"] == pytest.approx(received["goodput"], rel=0.5) and 0 < link["round_trip"] < 0.1
