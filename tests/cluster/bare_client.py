"""A worker in gRPC and bytes alone, as another program would speak to a server: nothing of laconic is imported.

    python bare_client.py ADDRESS WORKER FINGERPRINT FRAMES STOP

FRAMES is a file of frames, each behind its length (8 bytes, little-endian). The client says hello, joins, and pushes
exchange 0: all of it, or with STOP ``half`` nothing after the first frame. It prints a line for each step, and stays in
the exchange until the server answers.
"""

import json
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc

SERVICE = "/laconic.ParameterServer/"
CHUNK = 2 << 20


def note(**values: object) -> bytes:
    return b"N" + json.dumps(values).encode()


def pieces(slot: int, frame: bytes) -> Iterator[bytes]:
    yield b"F" + struct.pack("<IQ", slot, len(frame)) + frame[:CHUNK]
    for at in range(CHUNK, len(frame), CHUNK):
        yield b"M" + frame[at : at + CHUNK]


def frames_of(path: str) -> list[bytes]:
    frames, at = [], 0
    data = Path(path).read_bytes()
    while at < len(data):
        (nbytes,) = struct.unpack_from("<Q", data, at)
        frames.append(data[at + 8 : at + 8 + nbytes])
        at += 8 + nbytes
    return frames


def main(address: str, worker: str, fingerprint: str, path: str, stop: str) -> None:
    channel = grpc.insecure_channel(address)
    who = {"worker": int(worker), "incarnation": 1}
    asked = note(**who, protocol=1, laconic="bare", fingerprint=fingerprint)
    standing = json.loads(channel.unary_unary(SERVICE + "Hello")(asked, timeout=10)[1:])
    asked = note(**who, attempt=1, versions=standing["versions"], lost=False)
    print("hello", flush=True)
    agreed = json.loads(channel.unary_unary(SERVICE + "Join")(asked, timeout=30)[1:])
    frames = frames_of(path)

    def push() -> Iterator[bytes]:
        yield note(**who, sequence=agreed["sequence"])
        for slot, frame in enumerate(frames):
            yield from pieces(slot, frame)
            if stop == "half":
                print("half", flush=True)
                threading.Event().wait()
        yield note(score=0.0)
        print("whole", flush=True)

    answer = list(channel.stream_stream(SERVICE + "Exchange")(push(), timeout=60))
    print("answer", json.loads(answer[0][1:])["sequence"], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
