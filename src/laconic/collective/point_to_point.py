"""PointToPoint: named tensors from one rank to another, by codecs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.aggregate import OpenedFrame
from laconic.channels import Channel
from laconic.codecs import parse
from laconic.collective.buffers import BufferCache
from laconic.collective.consistency import peer_failure_as_error
from laconic.collective.exchange import EXACT, NONFINITE, NamedTensors
from laconic.collective.process_groups import is_registered
from laconic.collective.reductions import messages
from laconic.collective.saved_state import saved_count
from laconic.collective.stats import ExchangeStats
from laconic.collective.transport import PREFIX, Transport
from laconic.counters import LogOnce
from laconic.errors import ConfigError, InputError, NonFiniteError
from laconic.kernels.random import hash_of, splitmix64
from laconic.packet import TensorSpec
from laconic.policy import Policy
from laconic.residuals import saved_by_name

__all__ = ["MessageWork", "PointToPoint"]

_FIRST_TAG, _TAGS = 1 << 30, 1 << 28
"""Tags of these messages lie above those of collectives, which may be under way in the same group."""


class MessageWork(dist.Work):
    """A message on its way. What is left to do (decoding, or waiting until it has left) is done by ``wait``."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        """Whether ``wait`` has returned."""
        return self._finish is None

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[None]:
        """Wait for the message and return a completed future."""
        self.wait()
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


class PointToPoint:
    """Messages between the ranks of a group: what one rank sends by ``send``, the other receives by ``recv``.

    Both ranks use the same names, shapes and dtypes. One message of the same names is on its way at a time: the next
    call waits for the last one. Messages with different names may be received in any order (not with NCCL, which has no
    tags). There is no thread: tensors are encoded by ``send`` and decoded by ``recv``, or by ``wait`` of its work.

    Args:
        spec: A codec, or ``ef`` and a codec: each name then has a residual for each receiver.
        group: The ranks; all of them by default.
        policy: Codecs by name pattern; by default small and one-dimensional tensors are not compressed.
        nonfinite: If a value is not finite: ``spread`` (the receiver gets NaN), ``skip`` (zeros) or ``raise`` on both
            ranks.
        seed: Distinguishes the rounding of several objects.
        stats: Where to count; a new ``ExchangeStats`` by default.
    """

    def __init__(
        self, spec: str, group: dist.ProcessGroup | None = None, *, policy: Policy | Mapping[str, str] | None = None,
        nonfinite: str = "spread", seed: int = 0, stats: ExchangeStats | None = None,
    ) -> None:  # fmt: skip
        if nonfinite not in NONFINITE:
            raise ConfigError(f"nonfinite must be one of {', '.join(NONFINITE)}, got {nonfinite!r}")
        self.spec, self.policy, self.nonfinite, self.seed = spec, Policy.of(policy), nonfinite, seed
        parse(spec)
        self.stats = ExchangeStats() if stats is None else stats
        self.transport = Transport(group, self.stats)
        if self.transport.by_all_to_all:
            raise ConfigError("torch's threaded process group has no send and recv: use a gloo group")
        self._channels: dict[int, Channel] = {}
        self._sizes = Channel(spec, policy=self.policy)
        self._rounds: dict[tuple[int, str], int] = {}
        self._buffers = BufferCache()
        self._last: dict[Hashable, MessageWork] = {}
        self._warn_once = LogOnce("stats")

    def send(self, tensors: NamedTensors, dst: int, *, async_op: bool = False) -> MessageWork | None:
        """Send tensors to a rank in one message.

        Args:
            dst: The receiver's global rank, as in torch.
            async_op: Return a ``Work``, and do not wait until the message has left. The tensors may be changed at once.
        """
        rank, names = self._peer(dst), tuple(name for name, _ in tensors)
        values = [self._values(name, x) for name, x in tensors]
        limit, pinned = self._limit(names, values), any(x.is_cuda for x in values)
        self.stats.rounds += 1
        self.stats.values += sum(x.numel() for x in values)
        channel = self._channel(rank)
        seeds = [self._next_seed(rank, name) for name in names]
        self._wait_for_last(("send", rank, names))
        buffer = self._buffers.get((rank, names), PREFIX + limit, pinned=pinned)
        bad: list[str] = []

        def encode(body: Tensor) -> Sequence[tuple[int, int] | None]:
            spans = channel.encode_all_into(names, values, body, seeds=seeds)
            bad.extend(name for name, span in zip(names, spans, strict=True) if span is None)
            return spans

        with self.stats.during("encode_s"):
            message = messages.write(names, encode, buffer[PREFIX:])
        with peer_failure_as_error(self.transport.group, f"sent {names[:3]} to rank {dst}"):
            sending = self.transport.point_to_point(("send", names), limit, _tag(names), pinned=pinned)
            sending.send({rank: buffer[: PREFIX + message.numel()]})
            if self.transport.grouped:
                sending.receive()

        def finish() -> None:
            with peer_failure_as_error(self.transport.group, f"sent {names[:3]} to rank {dst}"):
                sending.finish()
            self._report(bad)

        work = self._last["send", rank, names] = MessageWork(finish)
        if async_op:
            return work
        work.wait()
        return None

    def recv(self, tensors: NamedTensors, src: int, *, async_op: bool = False) -> MessageWork | None:
        """Replace tensors by those that a rank sends.

        Args:
            src: The sender's global rank, as in torch.
            async_op: Return a ``Work`` whose ``wait`` decodes the message into the tensors.
        """
        rank, names = self._peer(src), tuple(name for name, _ in tensors)
        likes = [self._like(name, x) for name, x in tensors]
        limit, pinned = self._limit(names, likes), any(x.is_cuda for _, x in tensors)
        self._wait_for_last(("recv", rank, names))
        with peer_failure_as_error(self.transport.group, f"received {names[:3]} from rank {src}"):
            arriving = self.transport.point_to_point(("recv", names), limit, _tag(names), sources=[rank], pinned=pinned)
            if self.transport.grouped:
                arriving.send({})

        def finish() -> None:
            with peer_failure_as_error(self.transport.group, f"received {names[:3]} from rank {src}"):
                received = arriving.receive().get(rank)
            if received is not None:
                with self.stats.during("decode_s"), torch.no_grad():
                    self._decode(received, tensors, likes, rank)

        work = self._last["recv", rank, names] = MessageWork(finish)
        if async_op:
            return work
        work.wait()
        return None

    def _wait_for_last(self, key: Hashable) -> None:
        """Finish the last message of these names and ranks: its buffer and its length are used by the next one."""
        last = self._last.pop(key, None)
        if last is not None:
            last.wait()

    def _decode(self, message: Tensor, tensors: NamedTensors, likes: Sequence[Tensor], sender: int) -> None:
        bad = []
        frames = messages.read(message, [name for name, _ in tensors], sender)
        for (name, x), like, frame in zip(tensors, likes, frames, strict=True):
            if messages.is_void(frame):
                bad.append(name)
                x.fill_(0.0 if self.nonfinite == "skip" else float("nan"))
                continue
            opened = OpenedFrame.of(frame, like, name)
            self._require_codec(name, like, opened, sender)
            direct = x.dtype == like.dtype and x.is_contiguous()
            out = x.detach() if direct else torch.empty(like.shape, dtype=like.dtype, device=x.device)
            opened.decode_into(out)
            if not direct:
                x.copy_(out)
        self._report(bad)

    def _require_codec(self, name: str, like: Tensor, frame: OpenedFrame, sender: int) -> None:
        ours = parse(self._spec_of(name, like))[1].text
        if frame.chain.text != ours:
            raise InputError(
                f"rank {sender} sends {name!r} by {frame.chain.text!r}, this rank expects {ours!r}: use one spec and "
                "policy on both ranks"
            )

    def _report(self, bad: Sequence[str]) -> None:
        for name in bad:
            self.stats.skipped_nonfinite += 1
            self._warn_once("nonfinite", f"{name}: a value is not finite (nonfinite={self.nonfinite!r})")
        if bad and self.nonfinite == "raise":
            raise NonFiniteError(f"{bad[0]}: a value is not finite")

    # ------------------------------------------------------------------------------------------------------- details

    def _peer(self, rank: int) -> int:
        """Return the rank in the group of a global rank."""
        group = self.transport.group
        peer = dist.get_group_rank(group, rank) if group is not None and is_registered(group) else rank
        if not 0 <= peer < self.transport.size or peer == self.transport.rank:
            raise InputError(f"expected another rank of the group of {self.transport.size} ranks, got {rank}")
        return peer

    def _spec_of(self, name: str, x: Tensor) -> str:
        return self.policy.choose(name, TensorSpec.of(x), self.spec).spec

    def _like(self, name: str, x: Tensor) -> Tensor:
        """Return a tensor of the shape and dtype in which a tensor travels: float32, unless it is not compressed."""
        dtype = x.dtype if self._spec_of(name, x) == EXACT else torch.float32
        return torch.empty(x.shape, dtype=dtype, device="meta")

    def _values(self, name: str, x: Tensor) -> Tensor:
        return x.detach().to(self._like(name, x).dtype).contiguous()

    def _limit(self, names: Sequence[str], values: Sequence[Tensor]) -> int:
        frames = [self._sizes.max_nbytes(name, x) for name, x in zip(names, values, strict=True)]
        return messages.max_nbytes(names, frames)

    def _channel(self, rank: int) -> Channel:
        if rank not in self._channels:
            self._channels[rank] = Channel(self.spec, policy=self.policy)
        return self._channels[rank]

    def _next_seed(self, rank: int, name: str) -> int:
        key = (rank, name)
        self._rounds[key] = self._rounds.get(key, self.seed) + 1
        return splitmix64(self._rounds[key] ^ splitmix64(hash_of(f"{self.transport.rank} {rank} {name}")))

    # --------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        """Return residuals and rounds of this rank as a sender: ``3/slot/residual`` for what rank 3 has yet to get."""
        state = {
            f"{rank}/{key}": x for rank, channel in self._channels.items() for key, x in channel.state_dict().items()
        }
        return state | {f"{rank}/{name}/round": torch.tensor(n) for (rank, name), n in self._rounds.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the memory by a saved one of this rank."""
        residuals: dict[int, dict[str, Tensor]] = {}
        rounds = {}
        for key, x in saved_by_name(state).items():
            rank, _, rest = key.partition("/")
            if not (rank.isdecimal() and len(rank) < 10 and int(rank) < self.transport.size):
                raise InputError(f"expected the result of PointToPoint.state_dict, got the key {key!r}")
            if rest.endswith("/round"):
                rounds[int(rank), rest.removesuffix("/round")] = saved_count(key, x, at_least=-(1 << 63))
            else:
                residuals.setdefault(int(rank), {})[rest] = x
        peers = {*residuals, *self._channels}
        for replace in [self._channel(peer).checked_state(residuals.get(peer, {})) for peer in sorted(peers)]:
            replace()
        self._rounds = rounds


def _tag(names: tuple[str, ...]) -> int:
    return _FIRST_TAG + 2 * (hash_of(repr(names)) % _TAGS)
