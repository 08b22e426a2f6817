"""Rounds: the exchange of one fragment at a time, at once or on a thread while training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collective.buffers import BufferCache
from laconic.collective.consistency import peer_failure_as_error
from laconic.collective.exchange import Exchange
from laconic.collective.executor import ExchangeThread
from laconic.collective.groups import device_of
from laconic.collective.local.fragments import Fragment
from laconic.collective.local.inside import ReplicaRanks
from laconic.collective.local.options import LocalOptions
from laconic.collective.stats import ExchangeStats
from laconic.collective.transport import all_reduce
from laconic.errors import NonFiniteError

__all__ = ["LocalStats", "PendingRound", "Rounds"]


@dataclass
class LocalStats(ExchangeStats):
    """Counts of one rank's exchanges of fragments."""

    exchanges: int = 0
    """Exchanges of a fragment."""
    waited_s: float = 0.0
    """Seconds that training stood still for exchanges."""
    clipped: int = 0
    """Exchanges in which ``clip`` made this rank's change smaller."""
    weight: float = 1.0
    """This rank's weight in the last exchange; 1 is the share of a rank among equals."""


@dataclass
class PendingRound:
    """The exchange of a fragment that has begun and is not applied."""

    fragment: Fragment
    due: int
    """The step after which the result is applied."""
    changes: list[Tensor]
    """This rank's changes, then their means."""
    buffers: list[tuple[str, Tensor]]
    """The model's float buffers when the round began, then their means."""
    tokens: float = 0.0
    """Tokens of this rank that the changes come from."""
    starts: list[Tensor] = field(default_factory=list)
    """The parameters when the round began, where progress since then is kept."""
    buffer_starts: dict[str, Tensor] = field(default_factory=dict)
    future: torch.futures.Future[Tensor] | None = None
    error: Exception | None = None
    """What the exchange on the thread raised."""
    done: bool = False


class Rounds:
    """Exchanges fragments. Everything that takes part in a mean happens in one task, on this thread or on another.

    Args:
        exchange: Computes the means.
        options: Weights, clip and where ranks continue.
        inside: The ranks of this replica that share its exchange; None if each exchanges everything.
        stats: Where to count.
    """

    def __init__(
        self, exchange: Exchange, options: LocalOptions, inside: ReplicaRanks | None, stats: LocalStats
    ) -> None:
        self.exchange, self.options, self.inside, self.stats = exchange, options, inside, stats
        self.failed = False
        """Whether an exchange broke off."""
        self.rank, self.size = dist.get_rank(exchange.group), dist.get_world_size(exchange.group)
        self._buffers = BufferCache()
        self._thread: ExchangeThread | None = None

    def begin(
        self, fragment: Fragment, buffers: Sequence[tuple[str, Tensor]], due: int, *, overlap: bool
    ) -> PendingRound:
        """Measure the fragment's changes and start to replace them by their means over all ranks."""
        changes, flats = self._change_buffers(fragment)
        fragment.subtract_into(changes)
        if fragment.displaced:  # the residual is part of the difference, and the codec adds it again
            for name, change in zip(fragment.names, changes, strict=True):
                residual = self.exchange.residual(name, change)
                if residual is not None:
                    change.sub_(residual.to(change.dtype))
        tokens, fragment.tokens = fragment.tokens, 0.0
        # With overlap training changes the buffers while their means are computed.
        copies = [(name, x.clone() if overlap else x) for name, x in buffers]
        pending = PendingRound(fragment, due, changes, copies, tokens)
        if overlap and self.options.keeps_progress:
            pending.starts = [value.clone() for value in fragment.values()]
            pending.buffer_starts = {name: x.clone() for name, x in copies}
        self.stats.exchanges += 1

        def task() -> None:
            self._scale(flats, tokens)
            named = list(zip(fragment.names, changes, strict=True))
            if self.inside is None:
                self.exchange.mean(named)
            else:
                self.inside.mean(named, self.exchange.mean)
            if copies:
                self.exchange.mean_exactly(copies)

        def task_on_thread() -> Tensor:
            try:
                task()
            except Exception as error:  # of any kind: a future would wrap it
                pending.error = error
            return flats[0]

        if overlap:
            pending.future = self._submit(task_on_thread, [*flats, *(x for _, x in copies)])
            return pending
        with self._waiting(pending):
            task()
        return pending

    def wait(self, pending: PendingRound) -> None:
        """Wait until the means are there; an error of the exchange is raised here."""
        if pending.done:
            return
        assert pending.future is not None
        with self._waiting(pending):
            pending.future.wait()
            if pending.error is not None:
                raise pending.error

    @contextmanager
    def _waiting(self, pending: PendingRound) -> Iterator[None]:
        """Count the time of the block. If the exchange fails, the changes stay in the parameters for the next one."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            pending.fragment.tokens += pending.tokens
            pending.fragment.exchanged_at = -1
            # Ranks skip a round of values that are not finite together; other errors leave residuals half changed.
            self.failed = self.failed or not isinstance(error, NonFiniteError)
            raise
        finally:
            self.stats.waited_s += time.perf_counter() - began
        pending.future, pending.done = None, True

    def close(self) -> None:
        """End the thread after the exchange in progress."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def _change_buffers(self, fragment: Fragment) -> tuple[list[Tensor], list[Tensor]]:
        """Return a tensor for each parameter's change, and the flat buffers that they are parts of.

        One fragment is exchanged at a time, so all fragments share the memory.
        """
        kinds = dict.fromkeys((x.dtype, x.device) for x in fragment.anchors)
        flats, offsets = {}, dict.fromkeys(kinds, 0)
        for dtype, device in kinds:
            numel = sum(x.numel() for x in fragment.anchors if (x.dtype, x.device) == (dtype, device))
            flats[dtype, device] = self._buffers.get("changes", numel, dtype, device)
        changes = []
        for anchor in fragment.anchors:
            kind = anchor.dtype, anchor.device
            at = offsets[kind]
            changes.append(flats[kind][at : at + anchor.numel()].view(anchor.shape))
            offsets[kind] = at + anchor.numel()
        return changes, list(flats.values())

    # ------------------------------------------------------------------------------------------- weights and clipping

    def _scale(self, flats: Sequence[Tensor], tokens: float) -> None:
        """Multiply this rank's changes by its weight and its clip factor, both from numbers that all ranks know."""
        options = self.options
        if options.weight_by is None and options.clip is None:
            return
        norm = 0.0
        if options.clip is not None:
            squares = [float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2 for flat in flats]
            norm = sum(squares) ** 0.5
        all_tokens, norms = self.gather(tokens, norm)
        factor = 1.0
        if options.clip is not None:
            factor = clip_factor(norms, self.rank)
            self.stats.clipped += factor < 1.0
        if options.weight_by is not None:
            self.stats.weight = token_weight(all_tokens, self.rank)
            factor *= self.stats.weight
        if factor != 1.0:
            torch._foreach_mul_(list(flats), factor)

    def gather(self, *numbers: float) -> list[list[float]]:
        """Return each number of all ranks, exactly: a sum in which every rank fills in its own places."""
        table = torch.zeros(len(numbers), self.size, dtype=torch.float64, device=device_of(self.exchange.group))
        table[:, self.rank] = torch.tensor(numbers, dtype=torch.float64)
        with peer_failure_as_error(self.exchange.group, "exchanged weights and norms"):
            all_reduce(table, self.exchange.group, self.exchange.stats).wait()
        gathered: list[list[float]] = table.tolist()
        return gathered

    # ------------------------------------------------------------------------------------------------------- threads

    def _submit(self, task: Callable[[], Tensor], used: Sequence[Tensor]) -> torch.futures.Future[Tensor]:
        if self._thread is None:
            self._thread = ExchangeThread("laconic-local-sgd")
        return self._thread.submit_after_stream(task, used)


def token_weight(tokens: Sequence[float], rank: int) -> float:
    """Return a rank's weight in a mean by tokens: 1 for all ranks if they saw equally many, or none."""
    total = sum(tokens)
    return tokens[rank] * len(tokens) / total if total > 0 else 1.0


def clip_factor(norms: Sequence[float], rank: int) -> float:
    """Return the factor that brings the norm of a rank's change down to the median over ranks, if it is above it."""
    finite = sorted(norm for norm in norms if norm < float("inf"))  # comparisons with NaN are false
    own = norms[rank]
    if not finite or not 0.0 < own < float("inf"):
        return 1.0
    middle = len(finite) // 2
    median = finite[middle] if len(finite) % 2 else (finite[middle - 1] + finite[middle]) / 2
    return min(1.0, median / own)
