"""HSDPAttachment: replicas of a model that is sharded by ``fully_shard``, whose gradients are exchanged compressed.

Inside a replica torch reduce-scatters gradients and gathers parameters as always. Each rank then exchanges the reduced
gradient of its shard with its counterparts in the other replicas, so error feedback costs the memory of one shard.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.collective.attachment import AttachOptions
from laconic.collective.consistency import peer_failure_as_error
from laconic.collective.exchange import EXACT, Exchange
from laconic.collective.executor import ExchangeThread, Steps
from laconic.collective.fsdp.memory import Place, load_memory, require_error_feedback_only, saved_memory
from laconic.collective.fsdp.param_groups import ParamGroup, write_back
from laconic.collective.fsdp.sharded import ShardedAttachment, Slots
from laconic.collective.transport import all_reduce
from laconic.policy import Policy

__all__ = ["HSDPAttachment"]

log = logging.getLogger("laconic")


class _Pending(NamedTuple):
    """An exchange for which backward does not wait before its end."""

    slots: Slots
    done: torch.futures.Future[Tensor]


class HSDPAttachment(ShardedAttachment):
    """The compressed exchange between replicas, returned by ``attach``, which describes the arguments."""

    def __init__(
        self, module: nn.Module, spec: str, options: AttachOptions, groups: Sequence[ParamGroup],
        replicate: dist.ProcessGroup,
    ) -> None:  # fmt: skip
        require_error_feedback_only(spec, Policy.of(options.policy))
        super().__init__(module, spec, options, groups, replicate)
        inside = self._groups[0].shard_group
        self._place = Place(dist.get_rank(self._group), self._ranks, dist.get_rank(inside), dist.get_world_size(inside))
        self._pending: list[_Pending] = []
        self._kept_back: dict[str, Tensor] = {}
        """Shards that were reduced while ``set_requires_all_reduce(False)`` held, by parameter name."""
        self._compared = False
        for group in self._groups:
            group.take_over_replicas()
            group.install(self._reduce)
        self._attached = True
        self._warn_about_codec()

    def _prepare(self, exchange: Exchange) -> None:
        self._wait_for_pending()

    def _require_allowed(self, spec: str) -> None:
        require_error_feedback_only(spec, self._exchange.policy)

    def _stop(self) -> None:
        self._wait_for_pending()
        if self._kept_back:
            log.warning("detached between set_requires_all_reduce(False) and (True): the gradients kept back are lost")
            self._kept_back.clear()
        super()._stop()

    # ------------------------------------------------------------------------------------------------------ backward

    def _reduce(self, group: ParamGroup, flat: Tensor) -> None:
        """Exchange the reduced shards of a parameter group. torch calls it on all ranks in the same order."""
        first = self._begin_backward(self._wait_for_pending)
        slots = group.slots(flat)
        if not group.requires_all_reduce:
            self._keep_back(slots)
            return
        self._add_kept_back(slots)
        step, exchange = self._step_stats.steps, self._exchange
        check = first and (self._due(self.check_every) or not self._compared)
        self._compared = self._compared or check
        measure = self._due(self.error_every)
        exact = step < self.warmup_steps or exchange.exact
        groups = {} if exact else exchange.group_by_spec([(each.name, values) for each, values in slots])
        exact = exact or set(groups) <= {EXACT}
        adds, parameters = group.adds, self._local_values() if check else {}

        def steps() -> Steps:
            if check:
                self._check_drift(step, parameters)
            if exact:
                self._reduce_exactly(flat, adds)
                return flat
            if measure:
                self._measure_errors(groups)
            yield from exchange.mean_in_steps(groups)
            return flat.mul_(self._ranks) if adds else flat

        # The next group's shards may leave while this one's wait for replicas, but not before a collective that blocks:
        # a replica that is not as far yet would wait for this one's means, and this one for the replica.
        if check or exact or flat.is_cuda or not exchange.overlaps:
            pending = _Pending(slots, self._submit(lambda: ExchangeThread.run_steps(steps()), flat))
        else:
            pending = _Pending(slots, self._thread.submit_steps(steps()))
        if group.can_wait(flat):
            self._pending.append(pending)
        else:
            self._wait(pending)

    def _reduce_exactly(self, flat: Tensor, adds: bool) -> None:
        """Do what torch does between replicas, with the same bits."""
        stats = self._exchange.stats
        stats.rounds += 1
        stats.values += flat.numel()
        with peer_failure_as_error(self._group, "reduced uncompressed gradients"), stats.during("wire_s"):
            all_reduce(flat, self._group, stats, dist.ReduceOp.SUM if adds else dist.ReduceOp.AVG).wait()

    def _end_backward(self) -> None:
        super()._end_backward()
        self._wait_for_pending()

    def _wait_for_pending(self) -> None:
        while self._pending:
            self._wait(self._pending.pop(0), write=True)

    def _wait(self, pending: _Pending, *, write: bool = False) -> None:
        began_s = time.perf_counter()
        pending.done.wait()
        self._step_stats.add_exposed(began_s)
        if write:
            write_back(pending.slots)

    def _keep_back(self, slots: Slots) -> None:
        """Add shards to those kept back, and hand out zeros, to which the means will be added."""
        for each, values in slots:
            kept = self._kept_back.get(each.name)
            self._kept_back[each.name] = values.clone() if kept is None else kept.add_(values)
            values.zero_()

    def _add_kept_back(self, slots: Slots) -> None:
        for each, values in slots:
            kept = self._kept_back.pop(each.name, None)
            if kept is not None:
                values.add_(kept)

    # --------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory of this rank, sharded like the optimizer's for ``torch.distributed.checkpoint``.

        Residuals are DTensors with the meshes of their parameters. Names hold the number of the replica, so that all
        ranks save into one checkpoint.
        """
        return saved_memory(self._exchange, self._sharded_parameters(), self._place) | self._saved_steps()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved state, with the same bits if the mesh is the same.

        On another mesh, residuals are cut for the shards of now; those of replicas that no longer exist, and what
        belongs to shards of another size, is dropped, logged and counted.
        """
        load_steps = self._checked_steps(state)
        if not load_memory(self._exchange, self._sharded_parameters(), self._place, state):
            self._step_stats.residual_resets += 1
        load_steps()
        self._compared = False
