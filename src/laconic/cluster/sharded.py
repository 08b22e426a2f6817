"""Several servers, each with some of the slots: one link to all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from laconic.cluster.connection import Link, Standing
from laconic.cluster.protocol import Frame
from laconic.cluster.push_buffer import PushBuffer
from laconic.cluster.rejoin import Offer
from laconic.cluster.replies import Reply
from laconic.errors import ConfigError, FrameError

__all__ = ["ShardedLink", "partition"]

T = TypeVar("T")


def partition(tensors: Mapping[str, Tensor], servers: int) -> list[dict[str, Tensor]]:
    """Which server has which slots: the largest first, each to the server with the least so far.

    >>> import torch
    >>> parts = partition({"a": torch.zeros(3), "b": torch.zeros(8), "c": torch.zeros(4)}, 2)
    >>> [list(part) for part in parts]
    [['b'], ['a', 'c']]
    """
    if not 1 <= servers <= len(tensors):
        raise ConfigError(f"servers must be 1 to {len(tensors)}, as many as there are tensors, got {servers}")
    of = {}
    loads = [0] * servers
    for name, x in sorted(tensors.items(), key=lambda item: -item[1].numel()):
        least = loads.index(min(loads))
        of[name] = least
        loads[least] += x.numel()
    return [{name: x for name, x in tensors.items() if of[name] == server} for server in range(servers)]


class ShardedLink:
    """A link to each server; what a worker does, it does with all of them at once.

    Args:
        links: One per server.
        parts: The numbers of each server's slots among all.
    """

    def __init__(self, links: Sequence[Link], parts: Sequence[Sequence[int]]) -> None:
        self._links, self._parts = links, parts
        self._numbers = [{slot: number for number, slot in enumerate(part)} for part in parts]
        self._pool = ThreadPoolExecutor(len(links), thread_name_prefix="laconic-shard")

    def hello(self) -> Standing:
        found = self._all(lambda link: link.hello())
        if any(one.job != found[0].job for one in found):
            raise ConfigError("the servers serve different jobs: start all of them with the same configuration")
        versions = frozenset.intersection(*(one.versions for one in found))
        weights = min((one.weights for one in found), key=("missing", "coming", "here").index)
        return Standing(found[0].job, versions, all(one.over for one in found), weights)

    def join(self, attempt: int, offer: Offer) -> tuple[int, bool]:
        found = self._all(lambda link: link.join(attempt, offer))
        # Apart only where nobody promised more: without rounds a server may have had a push that another had not.
        return min(sequence for sequence, _ in found), any(lost for _, lost in found)

    def snapshot(self) -> Reply:
        replies = self._all(lambda link: link.snapshot())
        return _joined(replies, self._in_order([reply.frames for reply in replies]))

    def exchange(self, sequence: int, frames: Iterable[tuple[int, Frame]], score: Callable[[], float]) -> Reply:
        outbox = frames if isinstance(frames, PushBuffer) else _full(frames)
        replies = self._each(lambda server, link: link.exchange(sequence, outbox.only(self._numbers[server]), score))
        return _joined(replies, self._in_order([reply.frames for reply in replies]))

    def agree(self, sequence: int, scales: Sequence[Frame]) -> Sequence[Frame]:
        found = self._each(lambda server, link: link.agree(sequence, self._of_server(server, scales)))
        return [frame for frame in self._in_order(found) if frame is not None]

    def deposit(self, version: int, frames: Sequence[Frame]) -> None:
        self._each(lambda server, link: link.deposit(version, self._of_server(server, frames)))

    def _of_server(self, server: int, frames: Sequence[Frame]) -> list[Frame]:
        """The frames of one server's slots, where there may be several of each, one kind after the other."""
        count = sum(map(len, self._parts))
        return [frames[start + slot] for start in range(0, len(frames), count) for slot in self._parts[server]]

    def _in_order(self, found: Sequence[Sequence[Frame]]) -> list[Frame | None]:
        """The reverse."""
        count = sum(map(len, self._parts))
        parts = len(found[0]) // len(self._parts[0])  # weights, and the optimizer's memory after them
        frames: list[Frame | None] = [None] * (parts * count)
        for some, slots in zip(found, self._parts, strict=True):
            for number, frame in enumerate(some):
                part, at = divmod(number, len(slots))
                frames[part * count + slots[at]] = frame
        return frames

    def leave(self) -> None:
        self._all(lambda link: link.leave())

    def close(self) -> None:
        self._all(lambda link: link.close())
        self._pool.shutdown()

    def _all(self, call: Callable[[Link], T]) -> list[T]:
        return self._each(lambda _, link: call(link))

    def _each(self, call: Callable[[int, Link], T]) -> list[T]:
        """With all servers at once. An error is raised when all have ended: nothing goes on in the background."""
        waiting = [self._pool.submit(call, server, link) for server, link in enumerate(self._links)]
        failed = [error for one in waiting if (error := one.exception()) is not None]
        if failed:
            raise failed[0]
        return [one.result() for one in waiting]


def _full(frames: Iterable[tuple[int, Frame]]) -> PushBuffer:
    outbox = PushBuffer()
    for slot, frame in frames:
        outbox.put(slot, frame)
    outbox.end()
    return outbox


def _joined(replies: Sequence[Reply], frames: list[Frame | None]) -> Reply:
    """The first server's tickets count: all get as many pushes."""
    whole = tuple(frame for frame in frames if frame is not None)
    if len(whole) != len(frames):
        raise FrameError(f"the servers sent {len(whole)} frames for {len(frames)} slots")
    return Reply(min(reply.sequence for reply in replies), whole, replies[0].ticket)
