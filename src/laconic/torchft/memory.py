"""ReplicaMemory: the residuals of one replica over steps that torchft discards and quorums of other replicas.

torchft repeats a step that failed, with another quorum. What the failed attempt took out of the residuals must then be
put back; but if the other replicas committed the step, they have this replica's frames, and nothing must be put back.
The next quorum shows which: a replica that missed a committed step is healed, and its step number jumps ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collective.consistency import require_same_on_all_ranks
from laconic.collective.exchange import Exchange, MemoryCopy
from laconic.collective.process_groups import rank_in, size_of
from laconic.collective.reductions.shards import GATHER
from laconic.collective.saved_state import saved_by_name, saved_floats
from laconic.collective.stats import ExchangeStats
from laconic.errors import ConfigError, InputError
from laconic.policy import Policy

__all__ = ["Counts", "ReplicaMemory"]

log = logging.getLogger("laconic")

ROUNDS_PER_STEP = 1 << 10
"""The most all-reduces of one slot in a step whose rounding seeds all differ."""

COMMON = "/start"
"""Suffix of the memory that is equal on all replicas: where PowerSGD continues."""


@dataclass
class Counts(ExchangeStats):
    """Counts of one replica's exchanges and steps."""

    committed_steps: int = 0
    discarded_steps: int = 0
    """Attempts that all replicas dropped: their residuals were put back."""
    steps_committed_by_others: int = 0
    """Attempts that failed here only: this replica's frames were used, so its residuals were not put back."""
    quorums: int = 0
    residual_carries: int = 0
    """How often residuals were cut anew for another number of replicas, or another rank."""
    residual_resets: int = 0
    nonparticipating_steps: int = 0
    """Steps in which torchft zeroed this replica's tensors, so its residuals waited."""


class ReplicaMemory:
    """Exchange, residuals and their state before the attempt that is under way."""

    def __init__(self, spec: str, policy: Policy, nonfinite: str, counts: Counts) -> None:
        self.spec, self.policy, self.nonfinite = spec, policy, nonfinite
        self.stats = self.counts = counts
        self.exchange: Exchange | None = None
        self._slots: dict[str, Tensor] = {}
        """A tensor without memory for each slot seen: its shape and dtype."""
        self._next_group: dist.ProcessGroup | None = None
        self._waiting: dict[str, Tensor] = {}
        """A loaded portable state, until there is an exchange for it."""
        self._before: MemoryCopy = {}
        """The memory before the attempt."""
        self._attempt: int | None = None
        """The step of the attempt under way."""
        self._undecided: int | None = None
        """The step of a failed attempt, until the next quorum shows whether other replicas committed it."""
        self._common: dict[str, Tensor] | None = None
        """Common memory received while healing, which is that of the beginning of the attempt."""
        self._checked = False

    # ------------------------------------------------------------------------------------------------------ attempts

    def join(self, group: dist.ProcessGroup) -> None:
        """Use the replicas of another quorum from the next attempt on."""
        self.end_attempt(committed=False)
        self._next_group = group
        self.counts.quorums += 1

    def begin_attempt(self, step: int, slots: list[tuple[str, Tensor]], *, participates: bool) -> Exchange:
        """Return the exchange, ready for the step if this is its first all-reduce."""
        if self._attempt is None:
            self._settle(step)
            self._follow_quorum()
            assert self.exchange is not None, "torchft reduces before it has configured a quorum"
            if self._common is not None:
                self._replace_common(self._common)
                self._common = None
            self.exchange.begin_rounds(step * ROUNDS_PER_STEP)
            self._before = self.exchange.copy_memory(self._before)
            self._attempt = step
            self.counts.nonparticipating_steps += not participates
        assert self.exchange is not None
        for name, x in slots:
            if name not in self._slots:
                self._slots[name] = torch.empty(x.shape, dtype=x.dtype, device="meta")
        return self.exchange

    def end_attempt(self, committed: bool) -> None:
        """Note whether torchft commits the attempt; without an attempt under way nothing happens."""
        if self._attempt is None:
            return
        if committed:
            self.counts.committed_steps += 1
            self._common = None  # this attempt's exchange has brought the common memory up to date
        else:
            self._undecided = self._attempt
        self._attempt = None

    def _settle(self, step: int) -> None:
        """Put residuals back after an attempt that all replicas dropped: the manager is still at its step."""
        failed, self._undecided = self._undecided, None
        if failed is None or self.exchange is None:
            return
        if step > failed:
            self.counts.steps_committed_by_others += 1
            log.info("step %d failed here and was committed by other replicas: residuals stay as sent", failed)
            return
        self.exchange.restore_memory(self._before)
        self._before = {}
        self.counts.discarded_steps += 1
        log.info("step %d was discarded: residuals are put back", failed)

    def _follow_quorum(self) -> None:
        """Move residuals to an exchange with the replicas of the quorum."""
        group, self._next_group = self._next_group, None
        if group is None and not self._waiting:
            return
        loaded, before, self._waiting = self._waiting, self.exchange, {}
        if before is not None:
            group = group or before.group
        self.exchange = Exchange(
            self.spec, group, policy=self.policy, nonfinite=self.nonfinite, stats=self.stats
        )  # fmt: skip
        self._checked, self._before = False, {}
        state = loaded
        if before is not None:
            self.exchange.exempt |= before.exempt
            self.counts.residual_resets += before.residual_resets
            if not loaded and _place(before.group) == _place(group):  # the cuts into shards are still valid
                self.exchange.load_state_dict(before.state_dict())
                return
            state = before.portable_state(list(self._slots.items())) | loaded
        if state:
            self.counts.residual_carries += 1
            try:
                kept = self.exchange.load_portable_state(state)
            except InputError as error:  # such as residuals that overflow when they are added: the training goes on
                kept = False
                log.warning("residuals do not fit and are dropped: %s", error)
            if not kept:
                self.counts.residual_resets += 1
                log.warning("residuals of other codecs than %r were saved: they are dropped", self.spec)

    def check_settings(self) -> None:
        """Compare codec and policy with the other replicas, once for each quorum."""
        if not self._checked and self.exchange is not None:
            require_same_on_all_ranks("laconic.torchft.attach", self._settings(), self.exchange.group, self.stats)
            self._checked = True

    def _settings(self) -> dict[str, str]:
        return {"codec": self.spec, "policy": repr(self.policy), "nonfinite": self.nonfinite}

    # --------------------------------------------------------------------------------------------------------- state

    def common_state(self) -> dict[str, Any]:
        """Return what a replica needs that is healed from this one. Residuals are this replica's own and stay here."""
        if self._undecided is not None:  # the source of a healing is at the newest step, so all dropped the attempt
            self._settle(self._undecided)
        state = {} if self.exchange is None else self.exchange.state_dict()
        return self._settings() | {"common": {key: x for key, x in state.items() if key.endswith(COMMON)}}

    def load_common_state(self, state: Mapping[str, Any]) -> None:
        """Take over the common memory of the replica that this one is healed from."""
        for name, ours in self._settings().items():
            if state.get(name) != ours:
                raise ConfigError(
                    f"laconic.torchft.attach: this replica has {name} {ours!r}, the one it is healed from "
                    f"{state.get(name)!r}: use the same on all replicas"
                )
        self._common = {key: saved_floats(key, x) for key, x in saved_by_name(state.get("common")).items()}

    def _replace_common(self, common: Mapping[str, Tensor]) -> None:
        assert self.exchange is not None
        own = {key: x for key, x in self.exchange.state_dict().items() if not key.endswith(COMMON)}
        self.exchange.load_state_dict(own | dict(common))

    def portable_state(self) -> dict[str, Tensor]:
        """Return residuals and warm starts, for a checkpoint between two steps."""
        if self.exchange is None or self._waiting:
            return dict(self._waiting)
        with self._before_failed_attempt():
            return self.exchange.portable_state(list(self._slots.items()))

    @contextmanager
    def _before_failed_attempt(self) -> Iterator[None]:
        """Let the block see the memory without an attempt that failed and is undecided yet."""
        if self._undecided is None or self.exchange is None:
            yield
            return
        now = self.exchange.copy_memory()
        self.exchange.restore_memory(self._before)
        try:
            yield
        finally:
            self.exchange.restore_memory(now)

    def unsent(self) -> dict[str, Tensor]:
        """Return what this replica has yet to deliver of each slot's sum, as a sender and as an owner of means."""
        exchange, owed = self.exchange, {}
        if exchange is None:
            return {}
        with self._before_failed_attempt():
            state, replicas = exchange.portable_state(list(self._slots.items())), size_of(exchange.group)
            for slot, like in self._slots.items():
                own = exchange.residual(slot, like)
                means = [x for key, x in state.items() if key.endswith(f"//{GATHER}/{slot}/residual")]
                parts = [x.reshape(-1) for x in ([] if own is None else [own])] + [x * replicas for x in means]
                if parts:
                    owed[slot] = torch.stack(parts).sum(0).view(like.shape)
        return owed

    def load_portable_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a checkpoint with the next step."""
        waiting = {key: saved_floats(key, x) for key, x in saved_by_name(state).items()}
        self._undecided, self._waiting = None, waiting


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return what decides how slots are cut into shards, and which replica owns which."""
    return rank_in(group), size_of(group)
