"""The loopback twin, which every machine can run."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from laconic.errors import ConfigError
from laconic_lab.network.paced_proxy import PacedProxy

MIB = 1 << 20


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """A server that sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve(peer: socket.socket) -> None:
            with peer:
                try:
                    while data := peer.recv(1 << 16):
                        peer.sendall(data)
                except ConnectionError:
                    pass

        def accept() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(peer,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()
        server.shutdown(socket.SHUT_RDWR)


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=10)


def exactly(peer: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = peer.recv(nbytes - len(data))
        assert part, f"closed after {len(data)} of {nbytes} bytes"
        data += part
    return data


def trip(peer: socket.socket, data: bytes) -> bytes:
    sender = threading.Thread(target=peer.sendall, args=(data,))
    sender.start()
    try:
        return exactly(peer, len(data))
    finally:
        sender.join()


def test_proxy_paces_and_delays(settled):
    with PacedProxy(rate="100mbit", delay="5ms") as proxy:
        link = settled(lambda: proxy.measure(seconds=0.5))
    assert 0.010 <= link.round_trip < 0.030
    assert link.rate == 100e6 and link.congestion


def test_connections_share_the_rate(echo):
    with PacedProxy(rate="20mbit") as proxy:
        address = proxy.address_of(echo)
        start = time.monotonic()
        with connect(address) as one, connect(address) as other:
            threads = [threading.Thread(target=trip, args=(peer, bytes(MIB // 2))) for peer in (one, other)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        took = time.monotonic() - start
    ideal = MIB * 8 / 0.956 / 20e6  # 0.44 s, less what a shaper lets pass at once
    assert 0.9 * ideal < took < 2 * ideal


def test_proxy_counts_bytes_and_forwards_them_unchanged(echo):
    data = bytes(range(256)) * 4096
    with PacedProxy() as proxy:
        with connect(proxy.address_of(echo)) as peer:
            assert trip(peer, data) == data
            peer.shutdown(socket.SHUT_WR)
            assert peer.recv(1) == b""  # the end travels, too
        seen = proxy.counters()
    assert (seen.up_bytes, seen.down_bytes, seen.connections) == (MIB, MIB, 1)


def test_cut_proxy_moves_and_closes_nothing(echo):
    with PacedProxy(delay="1ms") as proxy, connect(proxy.address_of(echo)) as peer:
        assert trip(peer, b"before") == b"before"
        proxy.cut()
        peer.sendall(b"during")
        peer.settimeout(0.3)
        with pytest.raises(TimeoutError):
            peer.recv(1)
        proxy.mend()
        peer.settimeout(10)
        assert exactly(peer, 6) == b"during"


def test_stall_ends_by_itself(echo):
    with PacedProxy() as proxy, connect(proxy.address_of(echo)) as peer:
        assert trip(peer, b"before") == b"before"
        proxy.stall(0.3)
        start = time.monotonic()
        assert trip(peer, b"after") == b"after"
        assert 0.25 < time.monotonic() - start < 5


def test_reset_ends_connections_and_new_ones_work(echo):
    with PacedProxy() as proxy:
        address = proxy.address_of(echo)
        with connect(address) as peer:
            assert trip(peer, b"before") == b"before"
            proxy.reset()
            with pytest.raises(ConnectionResetError):
                peer.recv(1)
        with connect(address) as peer:
            assert trip(peer, b"after") == b"after"


def test_unreachable_target_resets_the_connection():
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = server.getsockname()
    # The reset may come before connecting has ended.
    with PacedProxy() as proxy, pytest.raises(ConnectionResetError), connect(proxy.address_of(gone)) as peer:
        peer.recv(1)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_flip_changes_one_bit(echo, direction):
    with PacedProxy() as proxy, connect(proxy.address_of(echo)) as peer:
        proxy.flip(direction, byte=70_000, bit=3)
        back = trip(peer, bytes(100_000))
        assert [(place, byte) for place, byte in enumerate(back) if byte] == [(70_000, 8)]
        assert not any(trip(peer, bytes(100_000)))
        with pytest.raises(ConfigError, match="has already passed"):
            proxy.flip(direction, byte=70_000)


@pytest.mark.parametrize("order", [("sideways", 0, 0), ("up", -1, 0), ("up", 0, 8)])
def test_invalid_flip_raises_config_error(order):
    with PacedProxy() as proxy, pytest.raises(ConfigError, match="flip needs"):
        proxy.flip(*order)


def test_proxy_outside_its_block_raises_config_error(echo):
    proxy = PacedProxy(rate="1mbit")
    with pytest.raises(ConfigError, match="inside its `with` block"):
        proxy.counters()
    with proxy:
        address = proxy.address_of(echo)
    with pytest.raises(ConnectionRefusedError):
        connect(address)
    with pytest.raises(ConfigError, match="a rate"):
        PacedProxy(rate="quick")


def test_proxy_process_ends_with_its_owner(script, echo):
    code = """
import json
from laconic_lab.network.paced_proxy import PacedProxy
with PacedProxy() as proxy:
    print(json.dumps(proxy.address_of(tuple(json.loads(sys.argv[1])))), flush=True)
    sys.stdin.read()
"""
    owner = script(code, json.dumps(echo))
    address = tuple(json.loads(owner.stdout.readline()))
    with connect(address) as peer:
        assert trip(peer, b"here") == b"here"
        owner.kill()
        owner.wait()
        peer.settimeout(5)
        with suppress(ConnectionResetError):
            assert peer.recv(1) == b""
