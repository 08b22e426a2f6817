"""The faults of the campaign: each happens in a scenario at a given step of the job."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import torch

from laconic import wire
from laconic.cluster import certificates, security
from laconic.cluster.protocol import GRPC_OPTIONS, RPC_PATHS, frame_messages, json_message
from laconic.frames import encode
from laconic.packet import Packet, TensorSpec
from laconic_lab.faults.flood_process import FloodProcess
from laconic_lab.faults.idle_calls import IDLE_KINDS, IdleCalls
from laconic_lab.faults.invariants import InvariantError
from laconic_lab.faults.scenario import Action, Scenario, WorkerDied, WorkerLife

__all__ = ["FAULTS", "Fault"]

SOON = 1
"""Early, because without rounds the worker behind the link may be slow and get little work."""
STEP = 6
"""The exchange before which most faults happen: a while after a checkpoint."""


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Args:
        what: What happens, in words.
        action: Runs right before a worker's push; None when the scenario itself is the fault.
        steps: The exchanges before which the action runs.
        worker: The worker that is hit.
        scenario: Keyword arguments of the scenario.
        seconds: About how long it takes.
    """

    what: str
    action: Action | None
    steps: tuple[int, ...] = (STEP,)
    worker: int = 1
    scenario: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 1.0

    def prepare(self, scenario: Scenario, rng: random.Random | None = None) -> None:
        """Add this fault to a scenario.

        Args:
            rng: Chooses other steps; without it the fault happens at ``steps``.
        """
        if self.action is None:
            return
        steps = self.steps
        if rng is not None:
            # Without rounds a worker may get little work, so that it has few pushes.
            last = scenario.exchanges - 2 if scenario.job.update_mode.in_rounds else max(SOON, self.steps[0])
            shift = rng.randint(1, max(1, last - (steps[-1] - steps[0]))) - steps[0]
            steps = tuple(step + shift for step in steps)
        for step in steps:
            scenario.at(self.worker, step, self.action)


def _die(life: WorkerLife) -> None:
    raise WorkerDied


def _die_unanswered(life: WorkerLife) -> None:
    """Die after the push has arrived and before its reply."""
    scenario = life.scenario
    before = len(scenario.events)
    frames = list(enumerate(scenario.frames(life.place)))
    threading.Thread(target=_push_quietly, args=(life, frames), daemon=True).start()
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if any(event["event"] == "push" and event["worker"] == life.worker for event in scenario.events.since(before)):
            break
        time.sleep(0.002)
    raise WorkerDied


def _push_quietly(life: WorkerLife, frames: list[tuple[int, bytes]]) -> None:
    try:
        life.client.exchange(life.sequence, frames, lambda: 0.0)
    except Exception as error:
        life.scenario.notes.append(f"push without a reply: {type(error).__name__}")


def _crash_server(life: WorkerLife) -> None:
    life.scenario.crash_server()


def _sleep(life: WorkerLife) -> None:
    time.sleep(0.4)


def _change_disk(life: WorkerLife) -> None:
    """Fill the disk the first time, free it the second time."""
    life.scenario.checkpoint_store.full = not life.scenario.checkpoint_store.full


def _stall(life: WorkerLife) -> None:
    life.scenario.link.stall(0.5)


def _cut(life: WorkerLife) -> None:
    life.scenario.link.stall(4.5)  # longer than the keepalive timeout


def _reset(life: WorkerLife) -> None:
    threading.Timer(0.01, life.scenario.link.reset).start()  # in the middle of the push


def _flip(life: WorkerLife) -> None:
    link, nbytes = life.scenario.link, sum(map(len, life.scenario.frames(life.place)))
    link.flip("up", link.counters().up_bytes + nbytes // 2, bit=3)  # in the middle of the push


def _refusal(life: WorkerLife, messages: Iterator[bytes] | list[bytes], *, timeout: float = 10.0) -> str:
    """Return the message with which the server refuses a stream of this worker."""
    channel = grpc.insecure_channel(life.scenario.address(0), options=GRPC_OPTIONS)
    try:
        list(channel.stream_stream(RPC_PATHS["Exchange"])(iter(messages), timeout=timeout))
    except grpc.RpcError as error:
        details = error.details() or ""
        if error.code() not in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
            raise InvariantError(
                f"P5: a bad push was not refused but ended with {error.code().name}: {details}"
            ) from None
        if "\n" in details or not details:
            raise InvariantError(f"a refusal should be one line, got {details!r}") from None
        return details
    finally:
        channel.close()
    raise InvariantError("P5: a bad push was accepted")


def _push_of(life: WorkerLife, frames: list[bytes], **head: Any) -> list[bytes]:
    messages = [json_message(life.identity | head)]
    for slot, frame in enumerate(frames):
        messages += frame_messages(slot, frame)
    return [*messages, json_message({"score": 0.0})]


def _bad_frames(make: Callable[[WorkerLife], list[bytes]]) -> Callable[[WorkerLife], None]:
    def action(life: WorkerLife) -> None:
        life.scenario.notes.append(_refusal(life, _push_of(life, make(life))))

    return action


def _wrong_shape(life: WorkerLife) -> list[bytes]:
    good = life.scenario.frames(life.place)
    return [encode(torch.ones(3, 5), "none"), good[1]]


def _wrong_dtype(life: WorkerLife) -> list[bytes]:
    good = life.scenario.frames(life.place)
    return [encode(torch.ones(life.scenario.core.parameters["ledger"].shape, dtype=torch.float64), "none"), good[1]]


def _corrupt(life: WorkerLife) -> list[bytes]:
    good = life.scenario.frames(life.place)
    bad = bytearray(good[1])
    bad[len(bad) // 2] ^= 16
    return [good[0], bytes(bad)]


def _truncated(life: WorkerLife) -> list[bytes]:
    good = life.scenario.frames(life.place)
    return [good[0], good[1][:-9]]


def _not_finite(life: WorkerLife) -> list[bytes]:
    """A NaN in a frame with a correct checksum."""
    good = life.scenario.frames(life.place)
    like = life.scenario.core.parameters["ledger"]
    values = torch.full(like.shape, float("nan"))
    packet = Packet("none", TensorSpec.of(like), (values.view(-1).view(torch.uint8),))
    return [bytes(wire.pack(packet)), good[1]]


def _bomb(life: WorkerLife) -> list[bytes]:
    """A header that declares four billion zeros."""
    good = life.scenario.frames(life.place)
    zeros = Packet("none", TensorSpec((1 << 16, 1 << 16), torch.float32), ())
    return [bytes(wire.pack(zeros)), good[1]]


def _cut_off(life: WorkerLife) -> None:
    """The stream ends in the middle of a frame."""
    messages = _push_of(life, life.scenario.frames(life.place))
    life.scenario.notes.append(_refusal(life, [*messages[:2], messages[2][: len(messages[2]) // 2]]))


def _require_refusal(life: WorkerLife, changes: Mapping[str, Any], what: str, words: str) -> None:
    """Connect as this worker with other values; the server must refuse it, and name the reason in these words."""
    asked = life.identity | {"protocol": 1, "laconic": "0", "fingerprint": life.scenario.core.slots.fingerprint}
    channel = grpc.insecure_channel(life.scenario.address(0), options=GRPC_OPTIONS)
    try:
        channel.unary_unary(RPC_PATHS["Hello"])(json_message(asked | dict(changes)), timeout=10)
    except grpc.RpcError as error:
        if words not in (error.details() or ""):
            raise InvariantError(f"the refusal of {what} should say {words!r}, got {error.details()!r}") from None
    else:
        raise InvariantError(f"P5: a worker with {what} was accepted")
    finally:
        channel.close()


def _other_version(life: WorkerLife) -> None:
    """A worker with another protocol version connects."""
    _require_refusal(life, {"protocol": 99, "laconic": "99.0"}, "another protocol", "99")


def _sent_again(life: WorkerLife) -> None:
    """Repeat earlier pushes with other content; none of them may count."""
    for sequence in range(max(0, life.sequence - 8), life.sequence + 1):
        frames = life.scenario.frames(0)  # forged: it would change the ledger
        channel = grpc.insecure_channel(life.scenario.address(0), options=GRPC_OPTIONS)
        try:
            if sequence < life.sequence:
                list(
                    channel.stream_stream(RPC_PATHS["Exchange"])(
                        iter(_push_of(life, frames, sequence=sequence)), timeout=10
                    )
                )
        except grpc.RpcError as error:
            life.scenario.notes.append(error.code().name)
        finally:
            channel.close()


def _older_life(life: WorkerLife) -> None:
    for incarnation in range(max(0, life.incarnation - 3), life.incarnation):
        notes = _refusal(life, _push_of(life, life.scenario.frames(0), incarnation=incarnation))
        if "replaced" not in notes:
            raise InvariantError(f"an older incarnation should be called replaced, got {notes!r}")


def _garbage(life: WorkerLife) -> None:
    host, _, port = life.scenario.address(0).rpartition(":")
    for i in range(50):
        with socket.create_connection((host, int(port)), timeout=5) as peer:
            peer.sendall(bytes((i * 37 + j * 101) % 256 for j in range(257)))


def _storm(life: WorkerLife) -> None:
    """Open connections that send garbage while others stay open and send almost nothing."""
    process = FloodProcess(f"127.0.0.1:{life.scenario.server.port}")
    try:
        for order in ({"hold": 200}, {"garbage": 1000, "rate": 1000}):
            process.request(**order, seed=life.sequence)
            life.scenario.notes.append(str(process.report()))
    finally:
        process.close()


def _stranger(life: WorkerLife) -> None:
    """Connect without a certificate, with one of another job, and with one of another worker."""
    scenario = life.scenario
    other = scenario.folder / f"other-{life.worker}-{life.sequence}"
    certificates.new_job(other, name="other", hosts=["localhost"], workers=2)
    ca = (scenario.folder / "certs" / "ca.pem").read_bytes()
    peers = {
        "none": grpc.ssl_channel_credentials(ca),
        "of another job": security.channel_credentials(security.load_worker(other, life.worker)),
        "of another worker": security.channel_credentials(security.load_worker(scenario.folder / "certs", 0)),
        "plaintext": None,
    }
    asked = json_message(
        life.identity | {"protocol": 1, "laconic": "0", "fingerprint": scenario.core.slots.fingerprint}
    )
    for kind, credentials in peers.items():
        address = f"localhost:{scenario.server.port}"
        channel = (
            grpc.insecure_channel(address, options=GRPC_OPTIONS)
            if credentials is None
            else grpc.secure_channel(address, credentials, options=GRPC_OPTIONS)
        )
        try:
            channel.unary_unary(RPC_PATHS["Hello"])(asked, timeout=3)
        except grpc.RpcError as error:
            scenario.notes.append(f"{kind}: {error.code().name}")
        else:
            raise InvariantError(f"P5: a peer with certificate {kind!r} was accepted")
        finally:
            channel.close()


def _idle(kind: str) -> Callable[[WorkerLife], None]:
    """Leave calls open until the end of the scenario."""

    def action(life: WorkerLife) -> None:
        idle = IdleCalls()
        life.scenario.at_end(idle.release)
        IDLE_KINDS[kind](life, idle)
        time.sleep(0.3)  # until the calls have arrived

    return action


def _future(life: WorkerLife) -> None:
    """Connect with the largest incarnation, as a clock that runs ahead would."""
    _require_refusal(
        life, {"incarnation": (1 << 62) - 1}, "an incarnation of the future", "ahead of the server's clock"
    )
    _die(life)  # the next incarnation must be accepted


_WITH_LINK = {"link": True}

FAULTS: Mapping[str, Fault] = {
    "worker-dies": Fault("a worker dies before its push", _die),
    "answer-lost": Fault("a worker dies after its push, before the answer", _die_unanswered),
    "workers-die": Fault("a worker dies again and again", _die, (1, 3, 5, 7)),
    "server-dies": Fault("the server dies and is started again", _crash_server, worker=0),
    "straggler": Fault("a worker pauses", _sleep),
    "disk-full": Fault("the disk is full for a while", _change_disk, (2, 10), worker=0),
    "slow-cable": Fault("a worker's link has 20 Mbit/s", None, scenario={"rate": "20mbit"}, seconds=3.0),
    "stalled-cable": Fault("a worker's link stalls for 0.5 s", _stall, (SOON,), scenario=_WITH_LINK, seconds=2.0),
    "cut-cable": Fault("a worker's link is cut for 4.5 s", _cut, (SOON,), scenario=_WITH_LINK, seconds=8.0),
    "reset": Fault("a worker's connection is reset in the middle", _reset, (SOON,), scenario=_WITH_LINK),
    "flipped-bit": Fault("a bit flips on the way, past TCP's checksum", _flip, (SOON,), scenario=_WITH_LINK),
    "wrong-shape": Fault("a push with a wrong shape", _bad_frames(_wrong_shape)),
    "wrong-dtype": Fault("a push with a wrong dtype", _bad_frames(_wrong_dtype)),
    "corrupt": Fault("a push with a wrong byte", _bad_frames(_corrupt)),
    "truncated": Fault("a push whose frame is too short", _bad_frames(_truncated)),
    "cut-off": Fault("a push that ends in the middle", _cut_off),
    "not-finite": Fault("a push with a NaN and a correct checksum", _bad_frames(_not_finite)),
    "bomb": Fault("a few bytes that declare 16 GiB", _bad_frames(_bomb)),
    "other-version": Fault("a worker with another protocol version", _other_version),
    "sent-again": Fault("old pushes sent again, with other content", _sent_again),
    "older-life": Fault("pushes of earlier incarnations of a worker", _older_life),
    "future-life": Fault("an incarnation of the far future, then a restart of the worker", _future),
    "idle-calls": Fault("14 unfinished calls that repeat an applied push", _idle("unfinished"), seconds=2.0),
    "unread-answers": Fault("14 repeated pushes whose answers are not read", _idle("unread"), seconds=2.0),
    "unread-weights": Fault("14 requests for the weights that are not read", _idle("snapshots"), seconds=2.0),
    "silent-streams": Fault("320 silent streams on 20 connections", _idle("silent"), seconds=3.0),
    "garbage": Fault("50 connections that send garbage", _garbage),
    "storm": Fault("1,000 connections with garbage, 200 held open", _storm, (SOON,), seconds=3.0),
    "storm-tls": Fault("the same with TLS", _storm, (SOON,), scenario={"tls": True}, seconds=4.0),
    "stranger": Fault("peers without the right certificate", _stranger, scenario={"tls": True}, seconds=3.0),
}
"""All faults by name; the campaign runs each of them in every mode."""
