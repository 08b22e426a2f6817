"""The faults: each sets up a scene in which it happens at a step of the job."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import torch

from laconic import wire
from laconic.cluster import security
from laconic.cluster.protocol import GRPC_OPTIONS, RPC_PATHS, frame_messages, json_message
from laconic.frames import encode
from laconic.packet import Packet, TensorSpec
from laconic_lab.faults.flood_process import Besiegers
from laconic_lab.faults.invariants import InvariantError
from laconic_lab.faults.scenario import Action, Died, Life, Scene

__all__ = ["CLASSES", "FaultClass"]

SOON = 1
"""Early, because a worker on a cable may be the slower one and get little work where there are no rounds."""
STEP = 6
"""The exchange before which most faults happen: after a checkpoint, and not right after it."""


@dataclass(frozen=True)
class FaultClass:
    """A kind of fault.

    Args:
        what: What happens, in words.
        action: What a worker does, or suffers, right before a push; None when the whole scene is the fault.
        steps: Before which pushes.
        worker: Which one.
        scene: How the scene must be made.
        seconds: About how long it takes.
    """

    what: str
    action: Action | None
    steps: tuple[int, ...] = (STEP,)
    worker: int = 1
    scene: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 1.0

    def prepare(self, scene: Scene) -> None:
        """Put it into a scene."""
        for step in self.steps if self.action is not None else ():
            assert self.action is not None
            scene.at(self.worker, step, self.action)


# ------------------------------------------------------------------------------------------------------ lost processes


def _die(life: Life) -> None:
    raise Died


def _die_unanswered(life: Life) -> None:
    """The push arrives and its answer does not."""
    scene = life.scene
    before = len(scene.events)
    frames = list(enumerate(scene.frames(life.place)))
    threading.Thread(target=_push_quietly, args=(life, frames), daemon=True).start()
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if any(event["event"] == "push" and event["worker"] == life.worker for event in scene.events[before:]):
            break
        time.sleep(0.002)
    raise Died


def _push_quietly(life: Life, frames: list[tuple[int, bytes]]) -> None:
    try:
        life.client.exchange(life.sequence, frames, lambda: 0.0)
    except Exception as error:
        life.scene.told.append(f"nobody heard: {type(error).__name__}")


def _crash_server(life: Life) -> None:
    life.scene.crash_server()


def _sleep(life: Life) -> None:
    time.sleep(0.4)


def _change_disk(life: Life) -> None:
    """Full from the first time on, empty again from the second."""
    life.scene.checkpoint_store.full = not life.scene.checkpoint_store.full


# -------------------------------------------------------------------------------------------------------------- cables


def _stall(life: Life) -> None:
    life.scene.cable.stall(0.5)


def _cut(life: Life) -> None:
    life.scene.cable.stall(4.5)  # longer than keepalive waits


def _reset(life: Life) -> None:
    threading.Timer(0.01, life.scene.cable.reset).start()  # in the middle of the push


def _flip(life: Life) -> None:
    cable = life.scene.cable
    cable.flip("up", cable.counters().up_bytes + 60_000, bit=3)


# -------------------------------------------------------------------------------------------------- what makes no sense


def _refusal(life: Life, messages: Iterator[bytes] | list[bytes], *, timeout: float = 10.0) -> str:
    """How the server refuses a stream of messages from this worker."""
    channel = grpc.insecure_channel(life.scene.address(0), options=GRPC_OPTIONS)
    try:
        list(channel.stream_stream(RPC_PATHS["Exchange"])(iter(messages), timeout=timeout))
    except grpc.RpcError as error:
        details = error.details() or ""
        if error.code() not in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
            raise InvariantError(f"P5: a bad push was not refused but met {error.code().name}: {details}") from None
        if "\n" in details or not details:
            raise InvariantError(f"a refusal should be one line, got {details!r}") from None
        return details
    finally:
        channel.close()
    raise InvariantError("P5: a bad push was taken")


def _push_of(life: Life, frames: list[bytes], **head: Any) -> list[bytes]:
    messages = [json_message(life.identity | head)]
    for slot, frame in enumerate(frames):
        messages += frame_messages(slot, frame)
    return [*messages, json_message({"score": 0.0})]


def _bad_frames(make: Callable[[Life], list[bytes]]) -> Callable[[Life], None]:
    def action(life: Life) -> None:
        life.scene.told.append(_refusal(life, _push_of(life, make(life))))

    return action


def _wrong_shape(life: Life) -> list[bytes]:
    good = life.scene.frames(life.place)
    return [encode(torch.ones(3, 5), "none"), good[1]]


def _wrong_dtype(life: Life) -> list[bytes]:
    good = life.scene.frames(life.place)
    return [encode(torch.ones(life.scene.core.parameters["ledger"].shape, dtype=torch.float64), "none"), good[1]]


def _corrupt(life: Life) -> list[bytes]:
    good = life.scene.frames(life.place)
    bad = bytearray(good[1])
    bad[len(bad) // 2] ^= 16
    return [good[0], bytes(bad)]


def _truncated(life: Life) -> list[bytes]:
    good = life.scene.frames(life.place)
    return [good[0], good[1][:-9]]


def _not_finite(life: Life) -> list[bytes]:
    """A NaN with a checksum that is right."""
    good = life.scene.frames(life.place)
    like = life.scene.core.parameters["ledger"]
    values = torch.full(like.shape, float("nan"))
    packet = Packet("none", TensorSpec.of(like), (values.view(-1).view(torch.uint8),))
    return [bytes(wire.pack(packet)), good[1]]


def _bomb(life: Life) -> list[bytes]:
    """A header that stands for four billion zeros."""
    good = life.scene.frames(life.place)
    zeros = Packet("none", TensorSpec((1 << 16, 1 << 16), torch.float32), ())
    return [bytes(wire.pack(zeros)), good[1]]


def _cut_off(life: Life) -> None:
    """The stream ends in the middle of a frame."""
    messages = _push_of(life, life.scene.frames(life.place))
    life.scene.told.append(_refusal(life, [*messages[:2], messages[2][: len(messages[2]) // 2]]))


def _other_version(life: Life) -> None:
    """A worker of another protocol says hello."""
    channel = grpc.insecure_channel(life.scene.address(0), options=GRPC_OPTIONS)
    asked = life.identity | {"protocol": 99, "laconic": "99.0", "fingerprint": life.scene.core.slots.fingerprint}
    try:
        channel.unary_unary(RPC_PATHS["Hello"])(json_message(asked), timeout=10)
    except grpc.RpcError as error:
        if "99" not in (error.details() or ""):
            raise InvariantError(f"a refusal should name both versions, got {error.details()!r}") from None
    else:
        raise InvariantError("P5: a worker of another protocol was welcome")
    finally:
        channel.close()


def _sent_again(life: Life) -> None:
    """What was pushed before, over and over; none of it may count."""
    for sequence in range(max(0, life.sequence - 8), life.sequence + 1):
        frames = life.scene.frames(0)  # forged: it would show in the ledger
        channel = grpc.insecure_channel(life.scene.address(0), options=GRPC_OPTIONS)
        try:
            if sequence < life.sequence:
                list(
                    channel.stream_stream(RPC_PATHS["Exchange"])(
                        iter(_push_of(life, frames, sequence=sequence)), timeout=10
                    )
                )
        except grpc.RpcError as error:
            life.scene.told.append(error.code().name)
        finally:
            channel.close()


def _older_life(life: Life) -> None:
    for incarnation in range(max(0, life.incarnation - 3), life.incarnation):
        told = _refusal(life, _push_of(life, life.scene.frames(0), incarnation=incarnation))
        if "replaced" not in told:
            raise InvariantError(f"an older life should be told so, got {told!r}")


def _garbage(life: Life) -> None:
    host, _, port = life.scene.address(0).rpartition(":")
    for i in range(50):
        with socket.create_connection((host, int(port)), timeout=5) as peer:
            peer.sendall(bytes((i * 37 + j * 101) % 256 for j in range(257)))


def _storm(life: Life) -> None:
    """Connections that speak garbage while others stay and say next to nothing."""
    besiegers = Besiegers(f"127.0.0.1:{life.scene.server.port}")
    try:
        for order in ({"hold": 200}, {"garbage": 1000, "rate": 1000}):
            besiegers.order(**order, seed=life.sequence)
            life.scene.told.append(str(besiegers.report()))
    finally:
        besiegers.close()


def _stranger(life: Life) -> None:
    """No certificate, one of another job, one of another worker."""
    scene = life.scene
    other = scene.folder / f"other-{life.worker}-{life.sequence}"
    security.new_job(other, name="other", hosts=["localhost"], workers=2)
    ca = (scene.folder / "certs" / "ca.pem").read_bytes()
    peers = {
        "none": grpc.ssl_channel_credentials(ca),
        "of another job": security.channel_credentials(security.load_worker(other, life.worker)),
        "of another worker": security.channel_credentials(security.load_worker(scene.folder / "certs", 0)),
        "plaintext": None,
    }
    asked = json_message(life.identity | {"protocol": 1, "laconic": "0", "fingerprint": scene.core.slots.fingerprint})
    for kind, credentials in peers.items():
        address = f"localhost:{scene.server.port}"
        channel = (
            grpc.insecure_channel(address, options=GRPC_OPTIONS)
            if credentials is None
            else grpc.secure_channel(address, credentials, options=GRPC_OPTIONS)
        )
        try:
            channel.unary_unary(RPC_PATHS["Hello"])(asked, timeout=3)
        except grpc.RpcError as error:
            scene.told.append(f"{kind}: {error.code().name}")
        else:
            raise InvariantError(f"P5: a peer with a certificate {kind} was welcome")
        finally:
            channel.close()


_CABLE = {"cable": True}

CLASSES: Mapping[str, FaultClass] = {
    "worker-dies": FaultClass("a worker dies before its push", _die),
    "answer-lost": FaultClass("a worker dies after its push, before the answer", _die_unanswered),
    "workers-die": FaultClass("a worker dies again and again", _die, (1, 3, 5, 7)),
    "server-dies": FaultClass("the server dies and is started again", _crash_server, worker=0),
    "straggler": FaultClass("a worker pauses", _sleep),
    "disk-full": FaultClass("the disk is full for a while", _change_disk, (2, 10), worker=0),
    "slow-cable": FaultClass("a worker's cable carries 20 Mbit/s", None, scene={"rate": "20mbit"}, seconds=3.0),
    "stalled-cable": FaultClass("a worker's cable is silent for 0.5 s", _stall, (SOON,), scene=_CABLE, seconds=2.0),
    "cut-cable": FaultClass("a worker's cable is cut for 4.5 s", _cut, (SOON,), scene=_CABLE, seconds=8.0),
    "reset": FaultClass("a worker's connection is reset in the middle", _reset, (SOON,), scene=_CABLE),
    "flipped-bit": FaultClass("a bit flips on the way, past TCP's checksum", _flip, (SOON,), scene=_CABLE),
    "wrong-shape": FaultClass("a push of another shape", _bad_frames(_wrong_shape)),
    "wrong-dtype": FaultClass("a push of another dtype", _bad_frames(_wrong_dtype)),
    "corrupt": FaultClass("a push with a wrong byte", _bad_frames(_corrupt)),
    "truncated": FaultClass("a push whose frame is too short", _bad_frames(_truncated)),
    "cut-off": FaultClass("a push that ends in the middle", _cut_off),
    "not-finite": FaultClass("a push with a NaN and a right checksum", _bad_frames(_not_finite)),
    "bomb": FaultClass("a few bytes that stand for 16 GiB", _bad_frames(_bomb)),
    "other-version": FaultClass("a worker of another protocol", _other_version),
    "sent-again": FaultClass("old pushes sent again, with other content", _sent_again),
    "older-life": FaultClass("pushes of earlier lives of a worker", _older_life),
    "garbage": FaultClass("50 connections that speak garbage", _garbage),
    "storm": FaultClass("1,000 connections with garbage, 200 that stay", _storm, (SOON,), seconds=3.0),
    "storm-tls": FaultClass("the same to a server with TLS", _storm, (SOON,), scene={"tls": True}, seconds=4.0),
    "stranger": FaultClass("peers without the right certificate", _stranger, scene={"tls": True}, seconds=3.0),
}
"""By name. All of them in all modes are the campaign."""
