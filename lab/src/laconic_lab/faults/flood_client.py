"""Opens thousands of foreign connections to a server; a stand-alone program, so that its cost is not the server's.

    python flood_client.py HOST PORT

It needs the standard library only. Requests are JSON objects, one per line; each is answered when it is done:

- ``{"garbage": n, "rate": r, "seed": s}``: open n connections, r per second; each sends bytes as a server on an open
  port receives them and is closed.
- ``{"hold": n, "seed": s}``: hold n connections open. They send nothing, or a byte now and then; half of them have sent
  a complete HTTP/2 preface. A connection that the server closes is opened again.
- ``{"release": true}``: close the held connections.
"""

import asyncio
import contextlib
import functools
import json
import os
import random
import ssl
import sys

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: flood\r\n\r\n"
MAX_CONCURRENT = 64
BYTE_INTERVAL_S = 0.5
"""Seconds between two bytes of a held connection."""
RECONNECT_S = 1.0
"""Seconds after which a closed connection is opened again."""
REPLY_WAIT_S = 0.05
"""Seconds that a garbage connection waits for a reply."""


@functools.cache
def client_hello() -> bytes:
    """Return the first message of a TLS client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    out = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    return out.read()


def payload(rng: random.Random) -> bytes:
    """Return the bytes that one connection sends."""
    noise, hello = rng.randbytes(rng.randrange(1, 2000)), client_hello()
    return rng.choice(
        [
            b"", noise, hello, hello[: rng.randrange(1, len(hello))], hello + noise, b"\x16\x03\x01\xff\xff" + noise,
            REQUEST, REQUEST[: rng.randrange(1, len(REQUEST))], PREFACE + SETTINGS, PREFACE + noise,
        ]
    )  # fmt: skip


class Flood:
    """All connections to one server."""

    def __init__(self, host: str, port: int) -> None:
        self._at = host, port
        self._held: list[asyncio.Task[None]] = []
        self.dropped = 0
        """How often the server closed a held connection."""

    async def garbage(self, count: int, rate: float, seed: int) -> dict[str, int]:
        rng, slots = random.Random(seed), asyncio.Semaphore(MAX_CONCURRENT)
        loop = asyncio.get_running_loop()
        began = loop.time()
        running = []
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / rate - loop.time()))
            await slots.acquire()
            running.append(asyncio.create_task(self._send_and_close(payload(rng), slots)))
        served = await asyncio.gather(*running)
        return {"connections": count, "connected": sum(served)}

    async def _send_and_close(self, data: bytes, slots: asyncio.Semaphore) -> bool:
        try:
            reader, writer = await asyncio.open_connection(*self._at)
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                if data:
                    writer.write(data)
                    await asyncio.wait_for(reader.read(64), REPLY_WAIT_S)
            writer.transport.abort()
        except OSError:
            return False
        finally:
            slots.release()
        return True

    async def hold(self, count: int, seed: int) -> dict[str, int]:
        rng = random.Random(seed)
        connected = asyncio.Semaphore(0)
        for number in range(count):
            first, rest = rng.choice([(b"", b""), (b"", client_hello()), (b"", PREFACE + SETTINGS), (b"", REQUEST)])
            if number % 2:
                first, rest = PREFACE + SETTINGS, rng.choice([b"", SETTINGS])
            self._held.append(asyncio.create_task(self._hold_open(first, rest, rng.random(), connected)))
        for _ in range(count):
            await connected.acquire()
        return {"held": count, "dropped": self.dropped}

    async def _hold_open(self, first: bytes, rest: bytes, wait: float, connected: asyncio.Semaphore) -> None:
        while True:
            writer = None
            try:
                reader, writer = await asyncio.open_connection(*self._at)
                connected.release()
                writer.write(first)
                closed = asyncio.create_task(reader.read(-1))
                for byte in rest:
                    await asyncio.sleep(BYTE_INTERVAL_S * (0.5 + wait))
                    if closed.done():
                        break
                    writer.write(bytes([byte]))
                with contextlib.suppress(OSError):
                    await closed
                self.dropped += 1
            except OSError:
                pass  # the server refuses more connections
            finally:
                if writer is not None:
                    writer.transport.abort()
            await asyncio.sleep(RECONNECT_S * (0.5 + wait))

    async def release(self) -> dict[str, int]:
        for task in self._held:
            task.cancel()
        await asyncio.gather(*self._held, return_exceptions=True)
        self._held.clear()
        return {"held": 0, "dropped": self.dropped}

    async def handle(self, request: dict[str, int]) -> dict[str, int]:
        if "garbage" in request:
            return await self.garbage(request["garbage"], request["rate"], request["seed"])
        if "hold" in request:
            return await self.hold(request["hold"], request["seed"])
        return await self.release()


async def main(host: str, port: str) -> None:
    flood = Flood(host, int(port))
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await flood.handle(json.loads(line))), flush=True)


if __name__ == "__main__":
    # Remote clients would not use the server's processor; with a lower priority they starve on a busy machine.
    os.nice(10)
    asyncio.run(main(*sys.argv[1:]))
