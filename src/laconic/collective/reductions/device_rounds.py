"""The two rounds of ``TwoShot`` on a GPU: sections travel between GPUs, and the host never waits for them.

It serves codecs whose messages have a fixed size (``device_codings.py``), with or without error feedback. There are no
headers and checksums: both ends know the layout, and NCCL delivers what was sent. What the host would look at stays on
the device: whether a shard is finite travels as its amax bits behind the sections, and events are counted there and
read when ``stats`` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import kernels
from laconic.channels import Channel
from laconic.collective.process_groups import rank_in, size_of
from laconic.collective.reductions.device_codings import DeviceCoding
from laconic.collective.reductions.device_events import INVALID, NONFINITE, RESETS, DeviceEvents
from laconic.collective.reductions.device_messages import Message, Plan
from laconic.collective.reductions.device_replay import Recent, Replay
from laconic.collective.reductions.device_residuals import DeviceResiduals, RoundNumbers, Workspace
from laconic.collective.reductions.ranges import cut_into_parts
from laconic.collective.stats import ExchangeStats
from laconic.collective.transport import ALL_GATHER
from laconic.kernels.interface import NONFINITE as NONFINITE_BITS
from laconic.kernels.random import hash_of, splitmix64

__all__ = ["DeviceRounds"]

PART = 1 << 26
"""The largest number of values of one round. More would need large buffers; fewer, more launches."""

LOADED_PART = 1 << 24
"""The largest number of values of a round that loads residuals: their memory is what a smaller dtype saves."""

MAX_PLANS = 4096
"""Sets of slots whose buffers are kept: a module's DDP buckets, before and after DDP has reordered them."""


class _Sender:
    """Encodes the shards of one message, with their residuals.

    Args:
        sender: Whose rounding seeds are used.
        values: The shards.
    """

    def __init__(
        self, coding: DeviceCoding, channel: Channel, message: Message, sender: int, values: Sequence[Tensor],
        counts: Tensor, workspace: Workspace,
    ) -> None:  # fmt: skip
        self._coding, self._channel, self._message, self._values = coding, channel, message, values
        self._counts, self._backend = counts, backend_for(values[0])
        self._slots, device = [piece.slot for piece in message.ranges], values[0].device
        inner = [splitmix64(sender ^ hash_of(name)) for name in message.names]
        self._rounds = RoundNumbers(inner, None, device)
        stored = channel.residuals_of(message.names, values)
        self._residuals = None
        if stored is not None:
            self._residuals = DeviceResiduals(channel, message.names, stored, inner, device, workspace)

    @property
    def current(self) -> bool:
        """Whether the channel still keeps the same residuals."""
        return self._residuals is None or self._residuals.current

    def begin_round(self, rounds: Sequence[int]) -> None:
        """Let this round's rounding seeds be those of the frames that ``TwoShot`` would send.

        Args:
            rounds: The round of each slot.
        """
        if not self._coding.randomized and self._residuals is None:
            return
        wanted = [rounds[slot] for slot in self._slots]
        if self._coding.randomized:
            self._rounds.begin(wanted)
        if self._residuals is not None:
            self._residuals.begin_round(wanted)

    def encode(self, unusable: Tensor | None = None) -> None:
        """Write the message: sections, and the amax bits of each shard, or those that make it unusable."""
        backend, values, message = self._backend, self._values, self._message
        keys = self._rounds.draw(backend) if self._coding.randomized else self._rounds.keys
        if self._coding.zeroed:
            message.buffer.zero_()
        if self._residuals is None:
            bits = self._coding.encode(values, None, backend, keys, message.sections, unusable, self._counts)
            message.amax_bits = bits if unusable is None else torch.maximum(bits, unusable)
            return
        skip = backend.amax_bits_all(values)  # an error must leave residuals unchanged, so it is detected beforehand
        if unusable is not None:
            skip = torch.maximum(skip, unusable)
        self._residuals.load()
        residuals = self._residuals.floats
        if self._channel.decay != 1.0:
            backend.scale_all(residuals, self._channel.decay, skip)
        bits = self._coding.encode(values, residuals, backend, keys, message.sections, skip, self._counts)
        backend.fill_all(residuals, bits, 0.0)  # where a sum with the residual left float32
        self._residuals.store(backend)
        self._counts[RESETS].add_((bits >= NONFINITE_BITS).sum())
        message.amax_bits = torch.maximum(bits, skip)


class _Round:
    """The exchange of some tensors, in stretches of work between the collectives."""

    def __init__(
        self, plan: Plan, coding: DeviceCoding, channels: tuple[Channel, Channel], flats: Sequence[Tensor], rank: int,
        ranks: int, counts: Tensor, workspace: Workspace,
    ) -> None:  # fmt: skip
        self.plan, self._coding, self._counts, self._weight = plan, coding, counts, 1.0 / ranks
        self._own, self._all = plan.own.values(flats), plan.all.values(flats)
        self._backend, device = backend_for(flats[0]), flats[0].device
        outgoing = plan.outgoing.values(flats)
        self._outgoing = self._means = None
        if outgoing:
            self._outgoing = _Sender(coding, channels[0], plan.outgoing, rank, outgoing, counts, workspace)
        if self._own:
            self._means = _Sender(coding, channels[1], plan.own, ranks, self._own, counts, workspace)
        self.senders = [sender for sender in (self._outgoing, self._means) if sender is not None]
        stretches: list[Callable[[], None]] = [self._send, self._sum, self._receive]
        if not plan.peers:
            stretches = [self._exchange_alone]
        self.stretches = [Replay(stretch, device) for stretch in stretches]

    @property
    def current(self) -> bool:
        """Whether the channels still keep the same residuals."""
        return all(sender.current for sender in self.senders)

    def _send(self) -> None:
        if self._outgoing is not None:
            self._outgoing.encode()

    def _sum(self) -> None:
        """Add up the shards of this rank, and encode the means."""
        if self._means is None:
            return
        torch._foreach_mul_(self._own, self._weight)
        unusable = torch.zeros(len(self._own), dtype=torch.int32, device=self._own[0].device)
        for message in self.plan.incoming:
            bits = message.amax_bits
            flag = self._coding.decode(message.sections, self._backend, self._own, self._weight, bits)
            self._counts[INVALID].add_(flag[0])
            unusable = torch.maximum(unusable, bits)
        self._means.encode(unusable)

    def _receive(self) -> None:
        bits = self.plan.all.amax_bits
        flag = self._coding.decode(self.plan.all.sections, self._backend, self._all, None, bits)
        self._backend.fill_all(self._all, bits, float("nan"))
        self._counts[INVALID].add_(flag[0])
        self._counts[NONFINITE].add_((bits >= NONFINITE_BITS).sum())

    def _exchange_alone(self) -> None:
        assert self._means is not None
        self._means.encode()
        self._receive()


class DeviceRounds:
    """Means over ranks of tensors on one GPU, the same bits as those of the rounds that go through the host.

    A shard that is not finite on some rank becomes NaN on all of them (``nonfinite="spread"``); its residuals stay.

    Args:
        scatter, gather: The channels that keep the residuals of this rank, as a sender and as an owner.
    """

    def __init__(
        self, coding: DeviceCoding, scatter: Channel, gather: Channel, group: dist.ProcessGroup | None,
        stats: ExchangeStats,
    ) -> None:  # fmt: skip
        self._coding, self._channels, self._group, self.stats = coding, (scatter, gather), group, stats
        self.rank, self.ranks = rank_in(group), size_of(group)
        self._plans: dict[tuple[Any, ...], list[Plan]] = {}
        self._rounds: Recent[tuple[tuple[tuple[str, int], ...], list[_Round]]] = Recent()
        self.events, self._workspace = DeviceEvents(), Workspace()

    def reduce(self, flats: Sequence[tuple[str, Tensor]], rounds: Mapping[str, int]) -> None:
        """Replace tensors by their means. It only launches work: later uses on the same stream see the means."""
        self._launch(self._rounds_for(flats), [rounds[slot] for slot, _ in flats])
        self.events.copy_to_host()

    def prepare(self, flats: Sequence[tuple[str, Tensor]]) -> Callable[[Sequence[int]], None]:
        """Return a function that replaces tensors, which stay where they are, by their means; it takes their rounds."""
        prepared = self._rounds_for(flats)

        def launch(numbers: Sequence[int]) -> None:
            nonlocal prepared
            for exchange in prepared:
                if not exchange.current:
                    prepared = self._rounds_for(flats)
                    break
            self._launch(prepared, numbers)

        return launch

    def forget_places(self) -> None:
        """Drop what was prepared for tensors where they were."""
        self._rounds.clear()
        self._plans.clear()

    def _launch(self, exchanges: Sequence[_Round], numbers: Sequence[int]) -> None:
        for exchange in exchanges:
            for sender in exchange.senders:
                sender.begin_round(numbers)
            self._run(exchange)

    def _run(self, exchange: _Round) -> None:
        plan, (first, *others) = exchange.plan, exchange.stretches
        first()
        if not others:
            return
        self.stats.bytes_sent += plan.bytes_sent
        self.stats.bytes_received += plan.bytes_received
        dist.all_to_all_single(plan.received, plan.sent, plan.received_nbytes, plan.sent_nbytes, group=self._group)
        others[0]()
        getattr(dist, ALL_GATHER)(plan.means, plan.mean, group=self._group)
        others[1]()

    def _rounds_for(self, flats: Sequence[tuple[str, Tensor]]) -> list[_Round]:
        """Return the rounds of tensors, made anew if they or their residuals are elsewhere than before."""
        found, sizes = self._rounds.get(flats), tuple((slot, flat.numel()) for slot, flat in flats)
        if found is None or found[0] != sizes or not all(each.current for each in found[1]):
            values, counts = [flat for _, flat in flats], self.events.on(flats[0][1].device)
            found = (
                sizes,
                [
                    _Round(plan, self._coding, self._channels, values, self.rank, self.ranks, counts, self._workspace)
                    for plan in self._plans_for(sizes, values[0].device)
                ],
            )
            self._rounds.put(flats, found)
        return found[1]

    def _plans_for(self, sizes: tuple[tuple[str, int], ...], device: torch.device) -> list[Plan]:
        plans = self._plans.get((device, sizes))
        if plans is None:
            if len(self._plans) >= MAX_PLANS:  # the sets of slots do not recur
                self._plans.clear()
            part = PART if self._channels[0].storage.in_place(device) else LOADED_PART
            plans = self._plans[device, sizes] = [
                Plan(ranges, self._coding, self.rank, self.ranks, device)
                for ranges in cut_into_parts(sizes, part, self.ranks)
            ]
        return plans


def backend_for(x: Tensor) -> kernels.MultiTensorKernels:
    backend = kernels.multi_tensor_backend_for(x)
    assert backend is not None
    return backend
