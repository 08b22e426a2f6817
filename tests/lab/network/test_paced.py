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
from laconic_lab.network.paced_proxy import Cable

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


def test_it_paces_and_delays(settled):
    with Cable(rate="100mbit", delay="5ms") as cable:
        link = settled(lambda: cable.measure(seconds=0.5))
    assert 0.010 <= link.round_trip < 0.030
    assert link.rate == 100e6 and link.congestion


def test_all_connections_share_the_rate(echo):
    with Cable(rate="20mbit") as cable:
        address = cable.to(echo)
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


def test_it_counts_bytes_and_passes_them_unchanged(echo):
    data = bytes(range(256)) * 4096
    with Cable() as cable:
        with connect(cable.to(echo)) as peer:
            assert trip(peer, data) == data
            peer.shutdown(socket.SHUT_WR)
            assert peer.recv(1) == b""  # the end travels, too
        seen = cable.counters()
    assert (seen.up_bytes, seen.down_bytes, seen.connections) == (MIB, MIB, 1)


def test_while_cut_nothing_moves_and_nothing_closes(echo):
    with Cable(delay="1ms") as cable, connect(cable.to(echo)) as peer:
        assert trip(peer, b"before") == b"before"
        cable.cut()
        peer.sendall(b"during")
        peer.settimeout(0.3)
        with pytest.raises(TimeoutError):
            peer.recv(1)
        cable.mend()
        peer.settimeout(10)
        assert exactly(peer, 6) == b"during"


def test_a_stall_mends_itself(echo):
    with Cable() as cable, connect(cable.to(echo)) as peer:
        assert trip(peer, b"before") == b"before"
        cable.stall(0.3)
        start = time.monotonic()
        assert trip(peer, b"after") == b"after"
        assert 0.25 < time.monotonic() - start < 5


def test_a_reset_ends_connections_and_new_ones_are_welcome(echo):
    with Cable() as cable:
        address = cable.to(echo)
        with connect(address) as peer:
            assert trip(peer, b"before") == b"before"
            cable.reset()
            with pytest.raises(ConnectionResetError):
                peer.recv(1)
        with connect(address) as peer:
            assert trip(peer, b"after") == b"after"


def test_nobody_there_means_a_reset():
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = server.getsockname()
    # The reset may come before connecting has ended.
    with Cable() as cable, pytest.raises(ConnectionResetError), connect(cable.to(gone)) as peer:
        peer.recv(1)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_it_flips_one_bit(echo, direction):
    with Cable() as cable, connect(cable.to(echo)) as peer:
        cable.flip(direction, byte=70_000, bit=3)
        back = trip(peer, bytes(100_000))
        assert [(place, byte) for place, byte in enumerate(back) if byte] == [(70_000, 8)]
        assert not any(trip(peer, bytes(100_000)))
        with pytest.raises(ConfigError, match="has passed already"):
            cable.flip(direction, byte=70_000)


@pytest.mark.parametrize("order", [("sideways", 0, 0), ("up", -1, 0), ("up", 0, 8)])
def test_it_flips_nothing_else(order):
    with Cable() as cable, pytest.raises(ConfigError, match="flip wants"):
        cable.flip(*order)


def test_it_is_there_in_its_block_only(echo):
    cable = Cable(rate="1mbit")
    with pytest.raises(ConfigError, match="inside its `with` block"):
        cable.counters()
    with cable:
        address = cable.to(echo)
    with pytest.raises(ConnectionRefusedError):
        connect(address)
    with pytest.raises(ConfigError, match="a rate"):
        Cable(rate="quick")


def test_it_ends_with_its_owner(script, echo):
    code = """
import json
from laconic_lab.network.paced_proxy import Cable
with Cable() as cable:
    print(json.dumps(cable.to(tuple(json.loads(sys.argv[1])))), flush=True)
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
