"""Labs of network namespaces: what was asked for is what there is, and nothing is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from laconic.errors import ConfigError
from laconic_lab.network import Host, Lab, labs, remove, stale, unique_name

# Both ends of a few bytes, as scripts: `ip netns exec` starts processes.
SINK = """
import hashlib, socket, sys
with socket.create_server((sys.argv[1], 5001)) as server:
    print("here", flush=True)
    peer, _ = server.accept()
    data = b""
    while part := peer.recv(1 << 16):
        data += part
print(len(data), sum(byte != 0 for byte in data), flush=True)
"""
SOURCE = """
import socket, sys
with socket.create_connection((sys.argv[1], 5001), timeout=20) as peer:
    peer.sendall(bytes(int(sys.argv[2])))
"""
ECHO = """
import socket, sys
with socket.socket(type=socket.SOCK_DGRAM) as here:
    here.bind((sys.argv[1], 5002))
    print("here", flush=True)
    while True:
        here.sendto(*here.recvfrom(100))
"""
CALL = """
import socket, sys
came = []
with socket.socket(type=socket.SOCK_DGRAM) as here:
    here.settimeout(0.4)
    for number in range(int(sys.argv[2])):
        here.sendto(b"%d" % number, (sys.argv[1], 5002))
    try:
        while len(came) < int(sys.argv[2]):
            came.append(int(here.recv(100)))
    except OSError:
        pass
print(len(came), came == sorted(came))
"""


@pytest.fixture(scope="module")
def pair(privileged: None) -> Iterator[Lab]:
    with Lab(unique_name("test"), [Host(rate="100mbit")] * 2) as lab:
        yield lab


def python(code: str, *args: object) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code, *map(str, args)]


def serve(lab: Lab, host: int, code: str) -> subprocess.Popen[str]:
    process = lab.popen(host, python(code, lab.address(host)), stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "here\n"
    return process


def send(lab: Lab, nbytes: int) -> list[int]:
    """TCP from host 1 to host 2; how many bytes came, and how many of them are not 0 as they were."""
    with serve(lab, 2, SINK) as sink:
        assert lab.run(1, python(SOURCE, lab.address(2), nbytes), timeout=30).returncode == 0
        return [int(word) for word in sink.communicate(timeout=30)[0].split()]


def call(lab: Lab, times: int) -> tuple[int, bool]:
    """UDP from host 1 to the echo of host 2: how many came back, and whether in order."""
    said = lab.run(1, python(CALL, lab.address(2), times), capture_output=True, text=True, timeout=30, check=True)
    count, ordered = said.stdout.split()
    return int(count), ordered == "True"


def test_goodput_matches_the_rate(pair, settled):
    link = settled(lambda: pair.measure(1, 2, seconds=0.7))
    assert link.goodput == pytest.approx(0.956 * 100e6, rel=0.06)
    assert 0 < link.round_trip < 0.02
    assert link.congestion in ("bbr", "cubic", "reno")


def test_counters_match_the_bytes_sent(pair):
    before = pair.counters(1), pair.counters(2)
    assert send(pair, 2_000_000) == [2_000_000, 0]
    after = pair.counters(1), pair.counters(2)
    out, into = after[0].tx_bytes - before[0].tx_bytes, after[1].rx_bytes - before[1].rx_bytes
    assert out == into
    assert 2_000_000 < out < 2_000_000 * 1514 / 1448 + 10_000
    assert after[0].tx_packets - before[0].tx_packets == after[1].rx_packets - before[1].rx_packets > 0


def test_idle_host_sends_nothing(name):
    with Lab(name, [Host(), Host()]) as lab:
        time.sleep(0.5)
        assert lab.counters(1).tx_packets == lab.counters(2).tx_packets == 0


def test_cut_link_stops_traffic_until_mended(pair):
    with serve(pair, 2, ECHO) as echo:
        assert call(pair, 3)[0] == 3
        pair.cut(2)
        assert call(pair, 3)[0] == 0
        pair.mend(2)
        assert call(pair, 3)[0] == 3
        echo.kill()


def test_delay_lengthens_round_trips_and_keeps_the_rate(name, tun, settled):
    with Lab(name, [Host(rate="100mbit", delay="5ms")] * 2, congestion="reno") as lab:  # bbr minds a busy machine more
        link = settled(lambda: lab.measure(1, 2, seconds=0.5))
        assert 0.020 <= link.round_trip < 0.035
        with serve(lab, 2, ECHO) as echo:
            lab.cut(2)
            assert call(lab, 2)[0] == 0
            lab.mend(2)
            assert call(lab, 2)[0] == 2
            echo.kill()


def test_jitter_keeps_packet_order(name, tun):
    with Lab(name, [Host(jitter="10ms"), Host()]) as lab, serve(lab, 2, ECHO) as echo:
        assert call(lab, 100) == (100, True)
        echo.kill()


def test_loss_drops_the_requested_share(name, nft):
    with Lab(name, [Host(), Host(loss=20.0)]) as lab, serve(lab, 2, ECHO) as echo:
        came = [call(lab, 200)[0] for _ in range(5)]
        seen = lab.counters(2)
        echo.kill()
    assert 0.15 < seen.rx_lost / seen.rx_packets < 0.25  # 5 sigma at 1000 packets is 0.063
    assert 1000 - seen.rx_lost == sum(came)


def test_loss_applies_to_single_tcp_packets(name, nft):
    with Lab(name, [Host(rate="100mbit"), Host(rate="100mbit", loss=1.0)]) as lab:
        assert send(lab, 2_000_000) == [2_000_000, 0]
        seen = lab.counters(2)
    assert seen.rx_bytes / seen.rx_packets < 1514 and seen.rx_packets > 1381
    assert 0 < seen.rx_lost < 60


def test_corruption_is_not_noticed_by_tcp(name, tun):
    with Lab(name, [Host(corrupt=20.0), Host()]) as lab:
        total, damaged = send(lab, 4_000_000)
    assert total == 4_000_000 and damaged > 0


def test_hosts_and_labs_are_isolated(pair, name):
    with Lab(name, [Host()] * 2) as other:
        assert other.address(2) == pair.address(2) == "10.77.0.2"
        with serve(pair, 2, ECHO) as echo:  # in the other lab nobody listens there
            assert call(other, 2)[0] == 0
            echo.kill()
        assert {name, pair.name} <= set(labs())
        with pytest.raises(ConfigError, match=f"lab '{name}' exists already"):
            Lab(name, [Host()]).up()
        assert name in labs()  # of the one that was there


@pytest.mark.parametrize("host", [0, 3])
def test_unknown_host_raises_config_error(pair, host):
    for use in (pair.address, pair.counters, pair.cut, pair.mend, lambda host: pair.run(host, ["true"])):
        with pytest.raises(ConfigError, match=f"hosts 1 to 2, got {host}"):
            use(host)
    with pytest.raises(ConfigError, match="two different hosts"):
        pair.measure(1, 1)


def test_congestion_control_is_set_or_refused(name):
    with pytest.raises(ConfigError, match="congestion control 'no' is not allowed"):
        Lab(name, [Host()], congestion="no").up()
    with Lab(name, [Host()] * 2, congestion="reno") as lab:
        assert lab.measure(1, 2, seconds=0.1).congestion == "reno"


def test_exception_leaves_nothing_behind(name, left):
    started = []

    def fail() -> None:
        with Lab(name, [Host(delay="1ms"), Host()]) as lab:
            started.append(lab.popen(1, ["sleep", "1000"]))
            started.append(lab.popen(2, ["sleep", "1000"]))  # which may not have arrived on its host yet
            while lab.pids(1) != [started[0].pid]:
                time.sleep(0.01)
            assert left(name)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2 and left(name) == []


def test_failed_build_leaves_nothing_behind(name, left, monkeypatch):
    monkeypatch.setattr("laconic_lab.network.namespaces.shaper_burst", lambda rate: -1)
    with pytest.raises(Exception, match="tc"):
        Lab(name, [Host(rate="1mbit")]).up()
    assert left(name) == []


OWNER = """
from laconic_lab.network import Host, Lab
with Lab(sys.argv[1], [Host(delay="1ms"), Host()]) as lab:
    lab.popen(2, ["sleep", "1000"])
    print("up", flush=True)
    sys.stdin.read()
"""


def test_interrupt_leaves_nothing_behind(name, left, script):
    owner = script(OWNER, name)
    assert owner.stdout.readline() == "up\n" and name not in stale()
    owner.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in owner.communicate(timeout=20)[1]
    assert left(name) == []


def test_lab_of_a_killed_owner_can_be_removed(name, left, script):
    owner = script(OWNER, name)
    assert owner.stdout.readline() == "up\n"
    owner.kill()
    owner.wait()  # and no more: what it started has its stdout, and lives
    assert name in labs() and name in stale() and left(name)
    assert Lab.attach(name).run(1, ["true"]).returncode == 0
    assert remove(name) and left(name) == []
    assert not remove(name)
