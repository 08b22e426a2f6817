"""Peers who are no workers, by the thousand: a program of its own, so that what it costs is not the server's.

    python storm.py HOST PORT

Needs nothing but Python: another program would speak like this. It takes orders, a JSON object per line, and answers
each with one when it is done:

- ``{"garbage": n, "rate": r, "seed": s}``: n connections, r of them a second, each with some of what a server gets to
  hear on an open port, and then closed.
- ``{"hold": n, "seed": s}``: n connections that stay. They say nothing, or a byte now and then; half of them have said
  all that opens HTTP/2 before. Who is hung up on comes again.
- ``{"release": true}``: let go of them.
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
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: storm\r\n\r\n"
AT_ONCE = 64
DRIBBLE = 0.5
"""Seconds between two bytes of a slow peer."""
AGAIN = 1.0
"""Seconds after which one who was hung up on comes again."""
HEARD = 0.05
"""Seconds that a peer waits for an answer."""


@functools.cache
def client_hello() -> bytes:
    """How a TLS client begins."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    out = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    return out.read()


def words(rng: random.Random) -> bytes:
    """What one of them says."""
    noise, hello = rng.randbytes(rng.randrange(1, 2000)), client_hello()
    return rng.choice(
        [
            b"",
            noise,
            hello,
            hello[: rng.randrange(1, len(hello))],
            hello + noise,
            b"\x16\x03\x01\xff\xff" + noise,
            REQUEST,
            REQUEST[: rng.randrange(1, len(REQUEST))],
            PREFACE + SETTINGS,
            PREFACE + noise,
        ]
    )


class Storm:
    """All of them."""

    def __init__(self, host: str, port: int) -> None:
        self._at = host, port
        self._held: list[asyncio.Task[None]] = []
        self.dropped = 0
        """How often one of those who stay was hung up on."""

    async def garbage(self, count: int, rate: float, seed: int) -> dict[str, int]:
        rng, room = random.Random(seed), asyncio.Semaphore(AT_ONCE)
        loop = asyncio.get_running_loop()
        began = loop.time()
        running = []
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / rate - loop.time()))
            await room.acquire()
            running.append(asyncio.create_task(self._speak(words(rng), room)))
        served = await asyncio.gather(*running)
        return {"connections": count, "connected": sum(served)}

    async def _speak(self, said: bytes, room: asyncio.Semaphore) -> bool:
        try:
            reader, writer = await asyncio.open_connection(*self._at)
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                if said:
                    writer.write(said)
                    await asyncio.wait_for(reader.read(64), HEARD)
            writer.transport.abort()
        except OSError:
            return False
        finally:
            room.release()
        return True

    async def hold(self, count: int, seed: int) -> dict[str, int]:
        rng = random.Random(seed)
        connected = asyncio.Semaphore(0)
        for number in range(count):
            first, rest = rng.choice([(b"", b""), (b"", client_hello()), (b"", PREFACE + SETTINGS), (b"", REQUEST)])
            if number % 2:
                first, rest = PREFACE + SETTINGS, rng.choice([b"", SETTINGS])
            self._held.append(asyncio.create_task(self._stay(first, rest, rng.random(), connected)))
        for _ in range(count):
            await connected.acquire()
        return {"held": count, "dropped": self.dropped}

    async def _stay(self, first: bytes, rest: bytes, wait: float, connected: asyncio.Semaphore) -> None:
        while True:
            writer = None
            try:
                reader, writer = await asyncio.open_connection(*self._at)
                connected.release()
                writer.write(first)
                hung_up = asyncio.create_task(reader.read(-1))
                for byte in rest:
                    await asyncio.sleep(DRIBBLE * (0.5 + wait))
                    if hung_up.done():
                        break
                    writer.write(bytes([byte]))
                with contextlib.suppress(OSError):
                    await hung_up
                self.dropped += 1
            except OSError:
                pass  # the server has enough of us
            finally:
                if writer is not None:
                    writer.transport.abort()
            await asyncio.sleep(AGAIN * (0.5 + wait))

    async def release(self) -> dict[str, int]:
        for task in self._held:
            task.cancel()
        await asyncio.gather(*self._held, return_exceptions=True)
        self._held.clear()
        return {"held": 0, "dropped": self.dropped}

    async def obey(self, order: dict[str, int]) -> dict[str, int]:
        if "garbage" in order:
            return await self.garbage(order["garbage"], order["rate"], order["seed"])
        if "hold" in order:
            return await self.hold(order["hold"], order["seed"])
        return await self.release()


async def main(host: str, port: str) -> None:
    storm = Storm(host, int(port))
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await storm.obey(json.loads(line))), flush=True)


if __name__ == "__main__":
    # On another machine they would not take the server's processor at all. More of it, and they starve on a busy one.
    os.nice(10)
    asyncio.run(main(*sys.argv[1:]))
