"""A worker's connection: its protocol, and one connection to several servers that each own a shard of the slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from laconic.cluster.job import Job
from laconic.cluster.protocol import Frame
from laconic.cluster.push_buffer import PushBuffer
from laconic.cluster.rejoin import Offer
from laconic.cluster.replies import Reply
from laconic.errors import ConfigError, FrameError

__all__ = ["Connection", "ServerStatus", "ShardedConnection", "partition"]

T = TypeVar("T")


@dataclass(frozen=True)
class ServerStatus:
    """A server's answer to ``hello``.

    Args:
        versions: The versions from which the job can resume.
        over: Whether all work is done.
        weights: Whether the server has the weights of its version: ``here``, ``coming`` (an upload is under way) or
            ``missing``. Always ``here`` unless returns=sum.
    """

    job: Job
    versions: frozenset[int]
    over: bool
    weights: str = "here"


class Connection(Protocol):
    """A worker's side of the protocol; ``Client``, ``ShardedConnection`` and ``InProcessConnection`` implement it."""

    def hello(self) -> ServerStatus: ...
    def join(self, attempt: int, offer: Offer) -> tuple[int, bool]:
        """Return the exchange to resume at and whether residuals must be dropped; see ``Core.join``."""
        ...

    def snapshot(self) -> Reply: ...
    def exchange(self, sequence: int, frames: Iterable[tuple[int, Frame]], score: Callable[[], float]) -> Reply:
        """Push one frame per slot as they become ready, and return the reply.

        Args:
            frames: Slots and frames; iterated again if they must be sent again.
            score: Called when all frames are sent.
        """
        ...

    def agree_scales(self, sequence: int, scales: Sequence[Frame]) -> Sequence[Frame]:
        """With returns=sum, before a push: send one frame of scales per slot, return the agreed scales."""
        ...

    def upload_weights(self, version: int, frames: Sequence[Frame]) -> None:
        """With returns=sum: upload the weights of a version, then the optimizer's state: one or two frames per slot."""
        ...

    def compare_weights(self, version: int, digests: Sequence[Frame]) -> None:
        """With returns=sum: let the server compare one's weights of a version: one frame of a hash per slot."""
        ...

    def leave(self) -> None: ...
    def close(self) -> None: ...


def partition(tensors: Mapping[str, Tensor], servers: int) -> list[dict[str, Tensor]]:
    """Assign slots to servers: the largest slot first, each to the server with the fewest values so far.

    >>> import torch
    >>> shards = partition({"a": torch.zeros(3), "b": torch.zeros(8), "c": torch.zeros(4)}, 2)
    >>> [list(shard) for shard in shards]
    [['b'], ['a', 'c']]
    """
    if not 1 <= servers <= len(tensors):
        raise ConfigError(f"servers must be 1 to {len(tensors)}, the number of tensors, got {servers}")
    owner = {}
    loads = [0] * servers
    for name, x in sorted(tensors.items(), key=lambda item: -item[1].numel()):
        least_loaded = loads.index(min(loads))
        owner[name] = least_loaded
        loads[least_loaded] += x.numel()
    return [{name: x for name, x in tensors.items() if owner[name] == server} for server in range(servers)]


class ShardedConnection:
    """One connection to several servers; each call goes to all of them at once."""

    def __init__(self, connections: Sequence[Connection], shards: Sequence[Sequence[int]]) -> None:
        self._connections, self._shards = connections, shards
        self._local_numbers = [{slot: number for number, slot in enumerate(shard)} for shard in shards]
        self._pool = ThreadPoolExecutor(len(connections), thread_name_prefix="laconic-shard")

    def hello(self) -> ServerStatus:
        statuses = self._on_all(lambda server, connection: connection.hello())
        if any(status.job != statuses[0].job for status in statuses):
            raise ConfigError("the servers serve different jobs: start all of them with the same configuration")
        versions = frozenset.intersection(*(status.versions for status in statuses))
        weights = min((status.weights for status in statuses), key=("missing", "coming", "here").index)
        return ServerStatus(statuses[0].job, versions, all(status.over for status in statuses), weights)

    def join(self, attempt: int, offer: Offer) -> tuple[int, bool]:
        answers = self._on_all(lambda server, connection: connection.join(attempt, offer))
        # Answers differ only without rounds, where one server may have received a push that another has not.
        return min(sequence for sequence, _ in answers), any(lost for _, lost in answers)

    def snapshot(self) -> Reply:
        return self._merged(self._on_all(lambda server, connection: connection.snapshot()))

    def exchange(self, sequence: int, frames: Iterable[tuple[int, Frame]], score: Callable[[], float]) -> Reply:
        push = frames if isinstance(frames, PushBuffer) else PushBuffer.of(frames)
        return self._merged(
            self._on_all(
                lambda server, connection: connection.exchange(sequence, push.shard(self._local_numbers[server]), score)
            )
        )

    def agree_scales(self, sequence: int, scales: Sequence[Frame]) -> Sequence[Frame]:
        return self._gather(
            self._on_all(lambda server, connection: connection.agree_scales(sequence, self._scatter(server, scales)))
        )

    def upload_weights(self, version: int, frames: Sequence[Frame]) -> None:
        self._on_all(lambda server, connection: connection.upload_weights(version, self._scatter(server, frames)))

    def compare_weights(self, version: int, digests: Sequence[Frame]) -> None:
        self._on_all(lambda server, connection: connection.compare_weights(version, self._scatter(server, digests)))

    def leave(self) -> None:
        self._on_all(lambda server, connection: connection.leave())

    def close(self) -> None:
        self._on_all(lambda server, connection: connection.close())
        self._pool.shutdown()

    def _on_all(self, call: Callable[[int, Connection], T]) -> list[T]:
        """Call on all servers at once. An error is raised when all calls have ended: none goes on in the background."""
        calls = [self._pool.submit(call, server, connection) for server, connection in enumerate(self._connections)]
        errors = [error for each in calls if (error := each.exception()) is not None]
        if errors:
            raise errors[0]
        return [each.result() for each in calls]

    @property
    def _num_slots(self) -> int:
        return sum(map(len, self._shards))

    def _scatter(self, server: int, frames: Sequence[Frame]) -> list[Frame]:
        """Return one server's frames of a sequence that holds one or more frames per slot, kind after kind."""
        kinds = range(0, len(frames), self._num_slots)
        return [frames[start + slot] for start in kinds for slot in self._shards[server]]

    def _gather(self, by_server: Sequence[Sequence[Frame]]) -> list[Frame]:
        """Undo ``_scatter``."""
        kinds = len(by_server[0]) // len(self._shards[0])  # weights, then the optimizer's state
        frames: dict[int, Frame] = {}
        for shard_frames, slots in zip(by_server, self._shards, strict=True):
            for number, frame in enumerate(shard_frames):
                kind, local = divmod(number, len(slots))
                frames[kind * self._num_slots + slots[local]] = frame
        if sorted(frames) != list(range(kinds * self._num_slots)):
            raise FrameError(f"the servers sent {len(frames)} frames for {kinds * self._num_slots} slots")
        return [frames[position] for position in range(len(frames))]

    def _merged(self, replies: Sequence[Reply]) -> Reply:
        """Merge the servers' replies; the first server's ticket counts, because all servers get the same pushes."""
        frames = self._gather([reply.frames for reply in replies])
        return Reply(min(reply.sequence for reply in replies), tuple(frames), replies[0].ticket)
