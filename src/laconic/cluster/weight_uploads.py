"""Weight uploads of jobs with ``returns=sum``: requests for weights, the choice of a worker, and the uploads kept."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from laconic import counters, wire
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
"""Seconds after which the next worker in order may upload weights that are needed and have not been uploaded."""
CONFIRM_TIMEOUTS, FINAL_CONFIRM_TIMEOUTS = 12, 4
"""So many times ``UPLOADER_TIMEOUT`` the server waits for a second worker's upload before it uses the only one there
is; while the job goes on a worker may be computing, at its end none is."""


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

    The job's uploader is the first of its workers that has not left: worker 0. If weights are needed and it does not
    upload them, because it needs them itself or is late, workers with higher numbers may, one more after each
    ``UPLOADER_TIMEOUT``; never one that waits for the weights itself. The upload of such a stand-in is used only when
    another worker has uploaded the same bits, unless no other worker is there that could.

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
        """Version and digests of the weights that workers announced and that are not yet compared, one per worker."""
        self._digests: tuple[list[int], list[bytes]] = [], []
        """Digests of the weights that are here, and how often each tensor had been changed when they were computed."""
        self._asked: set[int] = set()
        """The workers that were asked to upload."""
        self._unconfirmed: dict[int, tuple[int, list[bytes]]] = {}
        """Version and digests of what stand-ins have uploaded and no other worker has confirmed."""
        self._latest: dict[int, int] = {}
        """The newest version of which each worker has uploaded or announced weights."""

    @property
    def status(self) -> str:
        """Whether the server has the weights of its version: ``here``, ``coming`` or ``missing``."""
        if self._weights.uploaded_version == self._weights.version:
            return "here"
        return "coming" if self._incoming else "missing"

    def asks(self, worker: int) -> bool:
        """Whether this worker must upload, because others need the weights."""
        if self._waiting and worker not in self._asked and self._may_upload(worker, self._waiting_since):
            uploaded = self._unconfirmed.get(worker, (-1, []))[0] == self._weights.version
            if not uploaded or not self._must_be_confirmed(worker, final=False):
                self._asked.add(worker)
        return worker in self._asked

    def _holders(self) -> list[int]:
        """Return the workers that have not left and do not wait for the weights themselves, in order."""
        present = (session.worker for session in self._members.sessions if session.present)
        return [worker for worker in present if worker not in self._waiting]

    def _may_upload(self, worker: int, needed_since: float) -> bool:
        """Whether a worker may upload weights that have been needed since a time."""
        holders = self._holders()
        if worker not in holders:
            return False
        if any(other != worker and at >= self._oldest_useful for other, (at, _) in self._unconfirmed.items()):
            return True  # to confirm it
        return time.monotonic() > needed_since + holders.index(worker) * UPLOADER_TIMEOUT

    def _is_stand_in(self, worker: int) -> bool:
        """Whether this is not the job's uploader, and other workers hold the weights, too."""
        present = (session.worker for session in self._members.sessions if session.present)
        return worker != next(present, worker) and bool(set(self._holders()) - {worker})

    def _must_be_confirmed(self, worker: int, *, final: bool) -> bool:
        """Whether a worker's upload counts only together with the same upload of another one."""
        if not self._is_stand_in(worker):
            return False
        since = self._waiting_since if self._waiting else self._weights.updated_at
        return time.monotonic() < since + (FINAL_CONFIRM_TIMEOUTS if final else CONFIRM_TIMEOUTS) * UPLOADER_TIMEOUT

    def _check_uploader(self, worker: int, *, final: bool) -> None:
        holders = self._holders()
        overdue = final and self._may_upload(worker, self._weights.updated_at)
        if worker in holders[:1] or (worker in self._asked and worker in holders) or overdue:
            return
        expected = f"worker {holders[0]}" if holders else "no worker"
        raise RefusedError("uploader", f"{expected} uploads the weights of this job, not worker {worker}")

    def stop_asking(self, worker: int) -> None:
        """The worker has uploaded, or it is gone."""
        self._asked.discard(worker)

    def is_first(self, worker: int, version: int) -> bool:
        """Whether a worker uploads or announces weights of this version for the first time; it does so once."""
        with self._shared.changed:
            first = self._latest.get(worker, -1) < version <= self._weights.version
            if first:
                self._latest[worker] = version
            return first

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

    def read_digests(self, frames: Sequence[Frame]) -> list[bytes]:
        """Decode the SHA-256 of each slot. Needs no lock."""
        if len(frames) != len(self._weights.slots):
            raise FrameError(f"expected the SHA-256 of {len(self._weights.slots)} slots, got {len(frames)} frames")
        like = torch.empty(DIGEST_NBYTES, dtype=torch.uint8)
        return [bytes(decode(frame, like=like).tolist()) for frame in frames]

    def compare(self, worker: int, version: int, digests: list[bytes]) -> None:
        """Compare a worker's weights of a version with those that are uploaded, by the SHA-256 of each slot."""
        self._announced[worker] = version, digests
        self._report_differences()

    def _report_differences(self) -> None:
        """Log and record which workers announced other weights than those uploaded."""
        version = self._weights.uploaded_version
        compared = {worker: digests for worker, (at, digests) in self._announced.items() if at == version}
        if not compared:
            return
        mine = self._own_digests()
        for worker, digests in compared.items():
            del self._announced[worker]
            if digests != mine:
                self._differs(worker, version)

    def _own_digests(self) -> list[bytes]:
        """Return the digests of the weights that are here, computed once: the lock is held, and a worker may repeat."""
        changes = [x._version for x in self._weights.like]
        if self._digests[0] != changes:
            self._digests = changes, weight_digests(self._weights.like)
        return self._digests[1]

    def _differs(self, worker: int, version: int) -> None:
        self._shared.event("deposit_differs", worker=worker, version=version)
        self._warn_once(
            f"worker {worker}",
            f"worker {worker} holds other weights of exchange {version} than the server, which keeps its own",
        )

    def store(self, worker: int, version: int, tensors: Sequence[Tensor], *, final: bool) -> None:
        """Keep the weights of a version, unless they are too old, already here, or another worker must confirm them."""
        self.stop_asking(worker)
        if version == self._weights.uploaded_version:
            if not self._weights.same_upload(tensors):
                self._differs(worker, version)
        elif self._oldest_useful <= version <= self._weights.version and self._is_confirmed(
            worker, version, tensors, final=final
        ):
            self._unconfirmed.clear()
            self._weights.load_upload(version, tensors)
            self._shared.event("deposit", worker=worker, version=version)
            self._report_differences()
            self._shared.updated(version)
        self._shared.changed.notify_all()

    def _is_confirmed(self, worker: int, version: int, tensors: Sequence[Tensor], *, final: bool) -> bool:
        """Whether an upload may be used: it is the job's uploader's, or another worker has uploaded the same bits."""
        if worker not in self._holders():  # it waits for the weights itself, or has left
            return False
        if not self._must_be_confirmed(worker, final=final):
            if self._is_stand_in(worker):
                counters.count(
                    "unconfirmed uploads", 1, f"no other worker has confirmed the weights that worker {worker} uploads"
                )
            return True
        digests = weight_digests(tensors)
        others = {other: theirs for other, (at, theirs) in self._unconfirmed.items() if at == version}
        others.pop(worker, None)
        if digests in others.values():
            return True
        self._unconfirmed[worker] = version, digests
        self._shared.event("deposit_unconfirmed", worker=worker, version=version)
        if others:
            self._shared.event("deposit_differs", worker=worker, version=version)
            self._warn_once(f"stand-in {worker}", f"worker {worker} and another one upload other weights: none is used")
        return False

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
