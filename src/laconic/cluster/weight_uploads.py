"""Weight uploads of jobs with ``returns=sum``: who needs the weights, which worker uploads them, and what is kept."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from laconic import wire
from laconic.cluster.membership import Membership
from laconic.cluster.protocol import Frame
from laconic.cluster.replies import RefusedError, Reply
from laconic.cluster.shared_state import SharedState
from laconic.cluster.weights import Weights
from laconic.counters import LogOnce
from laconic.errors import FrameError
from laconic.frames import decode, encode
from laconic.packet import Packet, TensorSpec

__all__ = ["DIGEST_NBYTES", "WeightUploads", "digest_frames", "weight_digests"]

DIGEST_NBYTES = 32
"""Bytes of a SHA-256."""
UPLOADER_TIMEOUT = 5.0
"""Seconds after which another worker may upload weights that are needed, if the job's uploader has not."""


def weight_digests(tensors: Iterable[Tensor]) -> list[bytes]:
    """Return the SHA-256 of each slot's weights; zeros have no sign, because a frame of zeros alone keeps none."""
    return [hashlib.sha256((x.detach().cpu() + 0.0).numpy().tobytes()).digest() for x in tensors]


def digest_frames(tensors: Iterable[Tensor]) -> list[bytes]:
    """Return one frame for each slot with the SHA-256 of its weights."""
    spec = TensorSpec((DIGEST_NBYTES,), torch.uint8)
    sections = (torch.tensor(list(digest), dtype=torch.uint8) for digest in weight_digests(tensors))
    return [bytes(wire.pack(Packet("none", spec, (section,)))) for section in sections]


class WeightUploads:
    """Uploads of the weights that workers hold. Callers hold the lock unless a method says otherwise.

    The job's uploader is the first of its workers that has not left: worker 0. Another worker may upload only if the
    server has asked it to, or if the weights at the end of the job have not arrived for some seconds.

    Args:
        weights: Where an upload goes.
    """

    def __init__(self, shared: SharedState, weights: Weights, members: Membership) -> None:
        self._shared, self._weights, self._members, self._job = shared, weights, members, weights.job
        self._waiting: list[int] = []
        """Workers that wait for weights that are new enough."""
        self._waiting_since = 0.0
        self._incoming = 0
        """Uploads that are arriving."""
        self._warn_once = LogOnce("the events deposit_differs")
        self._announced: dict[int, tuple[int, list[bytes]]] = {}
        """Version and digests of the weights that workers announced and that are not yet compared."""
        self._uploader: int | None = None
        """The worker that was asked to upload."""

    @property
    def status(self) -> str:
        """Whether the server has the weights of its version: ``here``, ``coming`` or ``missing``."""
        if self._weights.uploaded_version == self._weights.version:
            return "here"
        return "coming" if self._incoming else "missing"

    def asks(self, worker: int) -> bool:
        """Whether this worker must upload, because others need the weights."""
        if self._waiting and self._uploader is None:
            overdue = time.monotonic() > self._waiting_since + UPLOADER_TIMEOUT
            if overdue or worker == self._expected_uploader():
                self._uploader = worker
        return self._uploader == worker

    def _expected_uploader(self) -> int | None:
        """Return the first worker that has not left and does not wait for the weights itself."""
        present = (session.worker for session in self._members.sessions if session.present)
        return next((worker for worker in present if worker not in self._waiting), None)

    def _check_uploader(self, worker: int, *, final: bool) -> None:
        expected = self._expected_uploader()
        overdue = final and time.monotonic() > self._weights.updated_at + UPLOADER_TIMEOUT
        if worker not in (expected, self._uploader) and not overdue:
            raise RefusedError("uploader", f"worker {expected} uploads the weights of this job, not worker {worker}")

    def stop_asking(self, worker: int) -> None:
        """The worker has uploaded, or it is gone."""
        if self._uploader == worker:
            self._uploader = None

    @contextmanager
    def incoming(self, worker: int, *, final: bool) -> Iterator[None]:
        """Count an upload that is arriving. Takes the lock itself.

        Args:
            final: Whether all exchanges of the job are done.
        """
        with self._shared.changed:
            self._check_uploader(worker, final=final)
            self._incoming += 1
        try:
            yield
        finally:
            with self._shared.changed:
                self._incoming -= 1

    def read(self, worker: int, frames: Sequence[Frame]) -> list[Tensor]:
        """Decode an upload: one, two or three frames per slot, as in ``Weights.upload_layouts``. Needs no lock."""
        layout = next((layout for layout in self._weights.upload_layouts if len(layout) == len(frames)), None)
        if layout is None:
            raise FrameError(
                f"expected an upload of one to three frames for each of {len(self._weights.slots)} slots, got "
                f"{len(frames)} frames"
            )
        tensors = [decode(frame, like=x) for frame, x in zip(frames, layout, strict=True)]
        if not all(bool(torch.isfinite(x).all()) for x in tensors):
            raise FrameError(f"worker {worker} uploads weights that are not finite")
        return tensors

    def compare(self, worker: int, version: int, frames: Sequence[Frame]) -> None:
        """Compare a worker's weights of a version with those that are uploaded, by the SHA-256 of each slot."""
        if len(frames) != len(self._weights.slots):
            raise FrameError(f"expected the SHA-256 of {len(self._weights.slots)} slots, got {len(frames)} frames")
        like = torch.empty(DIGEST_NBYTES, dtype=torch.uint8)
        digests = [bytes(decode(frame, like=like).tolist()) for frame in frames]
        self._announced = {other: announced for other, announced in self._announced.items() if announced[0] == version}
        self._announced[worker] = version, digests
        self._report_differences()

    def _report_differences(self) -> None:
        """Log and record which workers announced other weights than those uploaded."""
        version = self._weights.uploaded_version
        compared = {worker: digests for worker, (at, digests) in self._announced.items() if at == version}
        if not compared:
            return
        mine = weight_digests(self._weights.like)
        for worker, digests in compared.items():
            del self._announced[worker]
            if digests != mine:
                self._differs(worker, version)

    def _differs(self, worker: int, version: int) -> None:
        self._shared.event("deposit_differs", worker=worker, version=version)
        self._warn_once(
            f"worker {worker}",
            f"worker {worker} holds other weights of exchange {version} than the server, which keeps its own",
        )

    def store(self, worker: int, version: int, tensors: Sequence[Tensor]) -> None:
        """Keep the weights of a version, unless they are too old or already here."""
        self.stop_asking(worker)
        if version == self._weights.uploaded_version:
            if not self._weights.same_upload(tensors):
                self._differs(worker, version)
        elif self._oldest_useful <= version <= self._weights.version:
            self._weights.load_upload(version, tensors)
            self._shared.event("deposit", worker=worker, version=version)
            self._report_differences()
            self._shared.updated(version)
        self._shared.changed.notify_all()

    @property
    def _oldest_useful(self) -> int:
        """With backup workers a worker can catch up from the version before by the last reply."""
        return self._weights.version if self._job.exact else self._weights.version - 1

    def fetch(self, worker: int, deadline: float, alive: Callable[[], bool]) -> Reply:
        """Return the weights for a worker that has lost its own or has missed too many sums."""
        weights = self._weights
        if self._job.exact and weights.uploaded_version < self._oldest_useful:
            raise RefusedError("memory", f"no server and no worker's checkpoint has the weights of {weights.version}")
        if not self._waiting:
            self._waiting_since = time.monotonic()
        self._waiting.append(worker)
        try:
            self._shared.changed.notify_all()
            self._shared.wait(
                lambda: weights.uploaded_version >= self._oldest_useful,
                deadline,
                alive,
                lambda: "a worker to upload its weights",
            )
        finally:
            self._waiting.remove(worker)
        frames = [*(encode(x, "none") for x in weights.snapshot()), *weights.scale_frames()]
        return Reply(weights.uploaded_version, tuple(frames))
