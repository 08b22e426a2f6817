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
from torch.autograd import Variable

from laconic.collective.attachment import Attachment, AttachOptions, NamedParameters
from laconic.collective.consistency import peer_failure_as_error
from laconic.collective.ddp import unwrapped
from laconic.collective.exchange import EXACT, Exchange
from laconic.collective.fsdp.memory import Place, load_memory, require_error_feedback_only, saved_memory
from laconic.collective.fsdp.param_groups import ParamGroup, ShardedParameter, write_back
from laconic.collective.transport import all_reduce
from laconic.errors import InputError

__all__ = ["HSDPAttachment"]

log = logging.getLogger("laconic")

Slots = Sequence[tuple[ShardedParameter, Tensor]]


class _Pending(NamedTuple):
    """An exchange for which backward does not wait before its end."""

    slots: Slots
    done: torch.futures.Future[Tensor]


class HSDPAttachment(Attachment):
    """The compressed exchange between replicas, returned by ``attach``, which describes the arguments."""

    def __init__(
        self, module: nn.Module, spec: str, options: AttachOptions, groups: Sequence[ParamGroup],
        replicate: dist.ProcessGroup,
    ) -> None:  # fmt: skip
        self._groups = list(groups)
        self._attached = False
        shard_group = groups[0].shard_group
        super().__init__(
            module, spec, options, replicate, shapes={each.name: each.whole for each in self._sharded_parameters()}
        )
        self._place = Place(
            dist.get_rank(self._group), self._ranks, dist.get_rank(shard_group), dist.get_world_size(shard_group)
        )
        shards = [(each.name, list(each.shard_shape)) for each in self._sharded_parameters()]
        self._require_same_arguments(shards=repr(shards))
        self._pending: list[_Pending] = []
        self._kept_back: dict[str, Tensor] = {}
        """Shards that were reduced while ``set_requires_all_reduce(False)`` held, by parameter name."""
        self._backward: int | None = None
        """torch's number of the backward under way, and then of the last one."""
        self._end_queued = self._counted = False
        self._compared = False
        for group in self._groups:
            group.take_over_replicas()
            group.install(self._reduce)
        self._attached = True
        self._warn_if_nothing_is_compressed()

    def serves(self, module: nn.Module) -> bool:
        return self._module() is unwrapped(module)

    @property
    def attached(self) -> bool:
        return self._attached

    def _sharded_parameters(self) -> list[ShardedParameter]:
        return [each for group in self._groups for each in group.parameters]

    def _parameters(self) -> NamedParameters:
        return [(each.name, each.parameter) for each in self._sharded_parameters()]

    def _prepare(self, exchange: Exchange) -> None:
        self._wait_for_pending()

    def _require_allowed(self, spec: str) -> None:
        require_error_feedback_only(spec, self._exchange.policy)

    def _stop(self) -> None:
        self._wait_for_pending()
        if self._kept_back:
            log.warning("detached between set_requires_all_reduce(False) and (True): the gradients kept back are lost")
            self._kept_back.clear()
        for group in self._groups:
            group.remove()
        self._attached = False

    # ------------------------------------------------------------------------------------------------------ backward

    def _reduce(self, group: ParamGroup, flat: Tensor) -> None:
        """Exchange the reduced shards of a parameter group. torch calls it on all ranks in the same order."""
        first = self._begin_backward()
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
        adds = group.adds

        def task() -> Tensor:
            if check:
                self._check_drift(step)
            if exact:
                self._reduce_exactly(flat, adds)
                return flat
            if measure:
                self._measure_errors(groups)
            exchange.mean_by_spec(groups)
            return flat.mul_(self._ranks) if adds else flat

        pending = _Pending(slots, self._submit(task, flat))
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

    def _begin_backward(self) -> bool:
        """Return whether this is the first exchange of a backward; its end waits for all of them."""
        number = torch._C._current_graph_task_id()
        new = number != self._backward
        if new:
            self._wait_for_pending()  # of a backward that ended with an error
            self._backward, self._counted = number, False
            self._follow_gradient_scale()
        if new or not self._end_queued:  # torch runs it again for parts of the module that it finishes later
            Variable._execution_engine.queue_callback(self._end_backward)
            self._end_queued = True
        return new

    def _end_backward(self) -> None:
        self._end_queued = False
        if not self._counted:
            self._counted = True
            self._step_stats.steps += 1
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
        state = saved_memory(self._exchange, self._sharded_parameters(), self._place)
        state["steps"] = torch.tensor(self._step_stats.steps)
        return state if self._scale is None else state | {"scale": torch.tensor(self._scale, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved state, with the same bits if the mesh is the same.

        On another mesh, residuals are cut for the shards of now; those of replicas that no longer exist, and what
        belongs to shards of another size, is dropped, logged and counted.
        """
        if "steps" not in state:
            raise InputError("expected the result of state_dict of an attached FSDP module: 'steps' is missing")
        if not load_memory(self._exchange, self._sharded_parameters(), self._place, state):
            self._step_stats.residual_resets += 1
        self._step_stats.steps = int(state["steps"])
        self._compared = False
        if self._scale is not None and "scale" in state:
            self._scale = float(state["scale"])
