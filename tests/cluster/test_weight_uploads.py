"""With returns=sum: which worker uploads the weights, and what happens to other uploads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from grpc_peers import Peer, client_of, head_of, serving
from helpers import TIMEOUT, Events, train
from summing_jobs import SLOTS, SumJob, sum_job

from laconic import counters
from laconic.cluster import weight_uploads
from laconic.cluster.in_process import InProcessConnection
from laconic.cluster.protocol import json_message
from laconic.cluster.replies import RefusedError
from laconic.cluster.weight_uploads import digest_frames
from laconic.errors import FrameError
from laconic.frames import encode
from waiting import eventually


def uploaded(value: float) -> list[bytes]:
    """Return the frames of an upload: weights, then momentum."""
    return [encode(torch.full_like(x, y), "none") for y in (value, 0.5) for x in SLOTS.values()]


def upload(job: SumJob, worker: int, version: int, value: float) -> None:
    with job.core.receiving_upload(worker):
        job.core.upload_weights(worker, 0, version, uploaded(value))


def differing(events: Events) -> list[tuple[int, int]]:
    return [(e["worker"], e["version"]) for e in events if e["event"] == "deposit_differs"]


def after_one_round(**options: Any) -> SumJob:
    job = SumJob(sum_job(workers=3, **options))
    job.round(0, None if job.job.backup == 0 else [0, 1])
    return job


def test_only_the_first_worker_uploads() -> None:
    job = after_one_round()
    for worker in (1, 2):
        with pytest.raises(RefusedError, match=f"worker 0 uploads the weights of this job, not worker {worker}"):
            upload(job, worker, 1, 7.0)
    assert not job.core.holds_current_weights
    upload(job, 0, 1, 1.0)
    assert job.core.holds_current_weights and float(job.core.parameters["w"].max()) == 1.0


def test_upload_is_refused_before_its_weights_are_read(peers: Callable[..., Peer]) -> None:
    job = after_one_round()
    with serving(job.core) as server:
        began = time.monotonic()
        refusal = peers(server.port).call("Deposit", json_message(head_of(1) | {"version": 1}), timeout=TIMEOUT)
        assert refusal is not None and "worker 0 uploads" in (refusal.details() or "")
        assert time.monotonic() - began < TIMEOUT and job.core.queued_nbytes == 0
        client_of(server, 0).upload_weights(1, uploaded(2.0))
        client_of(server, 1).compare_weights(1, digest_frames(torch.full_like(x, 7.0) for x in SLOTS.values()))
    assert differing(job.events) == [(1, 1)]
    assert float(job.core.parameters["w"].max()) == 2.0


def test_next_worker_uploads_when_the_first_has_left() -> None:
    job = after_one_round()
    job.core.leave(0, 0)
    with pytest.raises(RefusedError, match="worker 1 uploads"):
        upload(job, 2, 1, 7.0)
    upload(job, 1, 1, 1.0)
    assert job.core.holds_current_weights


def test_next_worker_in_order_uploads_the_last_weights_when_the_first_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_uploads, "UPLOADER_TIMEOUT", 0.3)
    job = after_one_round()
    time.sleep(0.35)
    with pytest.raises(RefusedError):  # the job goes on
        upload(job, 1, 1, 7.0)
    job.core.exchanges = 1
    with pytest.raises(RefusedError):
        upload(job, 2, 1, 7.0)  # it is the turn of worker 1
    upload(job, 1, 1, 1.0)
    assert not job.core.holds_current_weights  # until another worker confirms it
    upload(job, 2, 1, 1.0)
    assert job.core.holds_current_weights and not differing(job.events)
    assert float(job.core.parameters["w"].max()) == 1.0


def test_upload_of_a_stand_in_that_differs_from_that_of_another_worker_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_uploads, "UPLOADER_TIMEOUT", 0.3)
    job = after_one_round()
    job.core.exchanges = 1
    time.sleep(0.35)
    upload(job, 1, 1, 7.0)
    upload(job, 1, 1, 7.0)  # its own second upload confirms nothing
    upload(job, 2, 1, 1.0)
    assert not job.core.holds_current_weights and differing(job.events) == [(2, 1)]
    upload(job, 0, 1, 1.0)
    assert float(job.core.parameters["w"].max()) == 1.0


def test_only_upload_of_a_stand_in_is_used_when_no_other_worker_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_uploads, "UPLOADER_TIMEOUT", 0.1)
    before = counters.counts().get("unconfirmed uploads", 0)
    job = after_one_round()
    job.core.exchanges = 1
    time.sleep(0.1 * (weight_uploads.FINAL_CONFIRM_TIMEOUTS + 1))
    upload(job, 1, 1, 1.0)
    assert job.core.holds_current_weights and counters.counts()["unconfirmed uploads"] == before + 1


def waits_for_weights(job: SumJob, worker: int) -> threading.Thread:
    """Let a worker ask for the weights, as one that has lost its own; it waits in another thread."""

    def ask() -> None:
        with contextlib.suppress(RefusedError):  # of a test that ends before
            job.core.snapshot(worker, 0, deadline=time.monotonic() + 5.0)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    uploads = job.core._sum_rounds().uploads
    assert eventually(lambda: worker in uploads._waiting)
    return thread


def refusal_of_push(job: SumJob, worker: int, sequence: int, frames: list[Any]) -> str:
    try:
        job.core.exchange(worker, 0, sequence, frames, deadline=time.monotonic() + 0.7)
    except RefusedError as error:
        return error.reason
    return "answered"


def two_rounds_behind() -> SumJob:
    """Return a job of three workers of which one may be late, after two rounds without uploads."""
    job = after_one_round(backup=1)
    job.round(1, [0, 1])
    return job


def test_worker_that_waits_for_the_weights_cannot_upload_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_uploads, "UPLOADER_TIMEOUT", 0.1)
    job = two_rounds_behind()
    thread = waits_for_weights(job, 1)
    time.sleep(0.3)
    assert refusal_of_push(job, 1, 2, job.frames(1, 2)) == "waiting"  # not "deposit"
    with pytest.raises(RefusedError, match="worker 0 uploads the weights of this job, not worker 1"):
        upload(job, 1, 2, 7.0)
    job.core.leave(2, 0)
    with pytest.raises(RefusedError, match="not worker 1"):
        upload(job, 1, 2, 7.0)
    assert not job.core.holds_current_weights
    upload(job, 0, 2, 1.0)
    thread.join(TIMEOUT)
    assert not thread.is_alive() and float(job.core.parameters["w"].max()) == 1.0


def test_stand_in_and_the_job_s_uploader_are_asked_for_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 1 is forging while worker 2 needs the weights and worker 0 is late."""
    monkeypatch.setattr(weight_uploads, "UPLOADER_TIMEOUT", 0.1)
    job = two_rounds_behind()
    thread = waits_for_weights(job, 2)
    time.sleep(0.2)
    frames = [job.frames(worker, 2) for worker in (0, 1)]
    assert refusal_of_push(job, 1, 2, frames[1]) == "deposit"
    upload(job, 1, 2, 7.0)
    assert not job.core.holds_current_weights and thread.is_alive()
    assert refusal_of_push(job, 1, 2, frames[1]) == "waiting"  # it is not asked for the same weights again
    assert refusal_of_push(job, 0, 2, frames[0]) == "deposit"  # although its push would end the round
    upload(job, 0, 2, 1.0)
    thread.join(TIMEOUT)
    assert float(job.core.parameters["w"].max()) == 1.0


def test_second_upload_of_other_weights_is_recorded_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    job = after_one_round()
    upload(job, 0, 1, 1.0)
    job.core.leave(0, 0)
    upload(job, 1, 1, 1.0)
    assert not differing(job.events)
    upload(job, 1, 1, 7.0)
    assert differing(job.events) == [(1, 1)] and "worker 1 holds other weights of exchange 1" in caplog.text
    assert float(job.core.parameters["w"].max()) == 1.0


def test_weights_that_other_workers_hold_are_compared_at_every_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    job = after_one_round()
    same, other = (digest_frames(torch.full_like(x, y) for x in SLOTS.values()) for y in (1.0, 7.0))
    job.core.compare_weights(1, 0, 1, other)  # before the upload
    assert not differing(job.events)
    upload(job, 0, 1, 1.0)
    job.core.compare_weights(2, 0, 1, same)
    assert differing(job.events) == [(1, 1)] and "worker 1 holds other weights of exchange 1" in caplog.text
    for frames in (same[:1], [encode(torch.ones(32), "none")] * len(SLOTS)):
        with pytest.raises(FrameError, match="expected"):
            job.core.compare_weights(2, 0, 1, frames)


@pytest.mark.parametrize("drifts", [False, True])
def test_worker_whose_weights_drift_is_recorded(drifts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    events, uploads = Events(), InProcessConnection.compare_weights
    compared: list[int] = []

    def compare(self: InProcessConnection, version: int, digests: Any) -> None:
        compared.append(version)
        uploads(self, version, digest_frames(torch.zeros(3) for _ in digests) if drifts else digests)

    monkeypatch.setattr(InProcessConnection, "compare_weights", compare)
    train(sum_job(checkpoint_every=2), 5, events=events)
    assert sorted(compared) == [2, 4, 5]  # two checkpoints and the end
    assert differing(events) == ([(1, version) for version in (2, 4, 5)] if drifts else [])


def test_announcement_of_one_worker_does_not_hide_that_of_another() -> None:
    job = after_one_round()
    other = digest_frames(torch.full_like(x, 7.0) for x in SLOTS.values())
    job.core.compare_weights(2, 0, 1, other)
    job.core.compare_weights(1, 0, 999, other)  # of an exchange that has not been
    upload(job, 0, 1, 1.0)
    assert differing(job.events) == [(2, 1)]


def test_weights_are_hashed_once_however_often_a_worker_announces_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    job = after_one_round()
    same, other = (digest_frames(torch.full_like(x, y) for x in SLOTS.values()) for y in (1.0, 7.0))
    hashed: list[int] = []
    digests = weight_uploads.weight_digests
    monkeypatch.setattr(weight_uploads, "weight_digests", lambda like: hashed.append(1) or digests(like))
    upload(job, 0, 1, 1.0)
    for _ in range(5):
        job.core.compare_weights(1, 0, 1, same)
        job.core.compare_weights(2, 0, 1, other)
    assert len(hashed) == 1 and differing(job.events) == [(2, 1)] * 5
    job.round(1)
    upload(job, 0, 2, 7.0)
    job.core.compare_weights(2, 0, 2, other)  # other weights: hashed again
    job.core.compare_weights(1, 0, 2, same)
    assert len(hashed) == 2 and differing(job.events)[5:] == [(1, 2)]
