"""ShardedAttachment: what attachments of modules of ``fully_shard`` share, with replicas and without."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from laconic.collective.attachment import Attachment, AttachOptions, NamedParameters
from laconic.collective.ddp import unwrapped
from laconic.collective.exchange import Exchange
from laconic.collective.fsdp.param_groups import ParamGroup, ShardedParameter
from laconic.collective.saved_state import saved_count, saved_counts, saved_scale
from laconic.errors import InputError

__all__ = ["ShardedAttachment", "Slots"]

Slots = Sequence[tuple[ShardedParameter, Tensor]]


class ShardedAttachment(Attachment):
    """An attachment with names, parameters and steps of a sharded module.

    Args:
        groups: The module's parameter groups.
        group: The ranks that exchange.
    """

    def __init__(
        self, module: nn.Module, spec: str, options: AttachOptions, groups: Sequence[ParamGroup],
        group: dist.ProcessGroup,
    ) -> None:  # fmt: skip
        self._groups = list(groups)
        self._attached = False
        self._backward: int | None = None
        """torch's number of the backward under way, and then of the last one."""
        self._end_queued = self._counted = False
        shapes = {each.name: each.whole for each in self._sharded_parameters()}
        super().__init__(module, spec, options, group, shapes=shapes)
        shards = [(each.name, each.padded_numel) for each in self._sharded_parameters()]
        self._require_same_arguments(shards=repr(shards))

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
        pass

    def _stop(self) -> None:
        for group in self._groups:
            group.remove()
        self._attached = False

    # ------------------------------------------------------------------------------------------------------ backward

    def _begin_backward(self, leftovers: Callable[[], None] = lambda: None) -> bool:
        """Return whether this is the first exchange of a backward, at whose end the step is counted.

        Args:
            leftovers: Ends the exchanges of an earlier backward that ended with an error.
        """
        number = torch._C._current_graph_task_id()
        new = number != self._backward
        if new:
            leftovers()
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

    # --------------------------------------------------------------------------------------------------------- state

    def _saved_steps(self) -> dict[str, Tensor]:
        # A checkpoint of all ranks holds the counts of one of them: they do nearly the same.
        state = {"steps": torch.tensor(self._step_stats.steps), "counts": self._exchange.stats.saved()}
        return state if self._scale is None else state | {"scale": torch.tensor(self._scale, dtype=torch.float64)}

    def _checked_steps(self, state: Mapping[str, Tensor]) -> Callable[[], None]:
        """Check the saved steps and counts; return the function that continues from them."""
        if "steps" not in state:
            raise InputError("expected the result of state_dict of an attached FSDP module: 'steps' is missing")
        steps, scale, counts = saved_count("steps", state["steps"]), saved_scale(state), saved_counts(state)

        def load_steps() -> None:
            self._step_stats.steps = steps
            self._exchange.stats.load(counts)
            if self._scale is not None and scale is not None:
                self._scale = scale

        return load_steps
