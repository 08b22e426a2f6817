"""FSDPAttachment: a model that ``fully_shard`` has sharded over all its ranks, with compressed collectives.

Gradients are reduce-scattered by a codec without memory: error feedback would need the whole gradient's residual on
each rank. Parameters can be gathered as quantized weights, which the optimizer does not see: it steps the shards. Or as
differences to the weights of the last forward pass, of which each rank then keeps a whole copy. What one difference
leaves out is part of the next one, so the copies follow the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.codecs import parse
from laconic.collective.attachment import AttachOptions
from laconic.collective.collectives import Collectives
from laconic.collective.exchange import EXACT, Exchange
from laconic.collective.fsdp.param_groups import ParamGroup
from laconic.collective.fsdp.sharded import ShardedAttachment
from laconic.collective.transport import all_gather
from laconic.counters import LogOnce
from laconic.errors import ConfigError
from laconic.packet import FLOATS
from laconic.policy import Policy

__all__ = ["FSDPAttachment"]


class FSDPAttachment(ShardedAttachment):
    """The compressed collectives of a sharded module, returned by ``attach``, which describes the arguments."""

    def __init__(
        self, module: nn.Module, spec: str, options: AttachOptions, groups: Sequence[ParamGroup], gather: str | None,
        *, delta: bool = False,
    ) -> None:  # fmt: skip
        policy = Policy.of(options.policy)
        _require_shards(spec, policy)
        if options.check_every:
            raise ConfigError("check_every compares replicas, and a model without replicas has none: leave it out")
        if gather is not None:
            _require_shards(gather, policy)
            if not all(group.gathers_plainly for group in groups):
                raise ConfigError("gather needs reshard_after_forward to be True or False, and no float8 weights")
        elif delta:
            raise ConfigError("gather_delta needs the codec of the differences, such as gather='qsgd:4'")
        super().__init__(module, spec, options, groups, groups[0].shard_group)
        self.gather = gather
        self._copies: dict[ParamGroup, Tensor] | None = {} if delta else None
        """The parameters that all ranks had in the last forward pass, float32, [ranks, shard]."""
        self._require_same_arguments(gather=repr((gather, delta)))
        self._warn_once = LogOnce("stats()")
        self._scatters = self._collectives(spec)
        self._gathers = None if gather is None else self._collectives(gather)
        for group in self._groups:
            group.install_collectives(self._reduce_scatter, self._all_gather if gather is not None else None)
        self._attached = True
        self._warn_if_nothing_is_compressed()

    def _collectives(self, spec: str) -> Collectives:
        before = self._exchange
        return Collectives(
            spec, self._group, policy=before.policy, nonfinite=before.nonfinite, stats=before.stats,
            shapes=before.shapes, storage=before.storage,
        )  # fmt: skip

    @property
    def _residual_nbytes(self) -> int:
        return self._scatters.residual_nbytes + (0 if self._gathers is None else self._gathers.residual_nbytes)

    def _prepare(self, exchange: Exchange) -> None:
        self._scatters = self._collectives(exchange.spec)

    def _require_allowed(self, spec: str) -> None:
        _require_shards(spec, self._exchange.policy)

    def _reduce_scatter(self, group: ParamGroup, output: Tensor, whole: Tensor, op: Any) -> bool:
        """Reduce-scatter the gradients of a group; False if torch must do it."""
        first = self._begin_backward()
        if self._step_stats.steps < self.warmup_steps or self._exchange.exact:
            self._exchange.stats.rounds += 1
            self._exchange.stats.values += whole.numel()
            self._exchange.stats.bytes_scattered += whole.numel() * whole.element_size()
            return False
        if first:
            self._scatters.begin_rounds(self._step_stats.steps)
        slots = group.scattered(output, whole)
        if self._due(self.error_every):
            self._measure_errors(self._exchange.group_by_spec([(name, row) for name, _, row in slots]))
        mean = op == dist.ReduceOp.AVG
        self._scatters.reduce_scatter(slots, op="mean" if mean else "sum")
        if not mean and op != dist.ReduceOp.SUM:  # torch then divides in the same operation
            assert group.divisor is not None
            output.div_(group.divisor)
        return True

    def _all_gather(self, group: ParamGroup, output: Tensor, shards: Tensor) -> bool:
        """Gather the parameters of a group; False if torch must do it."""
        gathers = self._gathers
        assert gathers is not None
        if self._step_stats.steps < self.warmup_steps:
            return False
        if shards.dtype not in FLOATS:
            self._warn_once("dtypes", "a group of parameters of several dtypes is gathered uncompressed")
            return False
        # The same seeds in forward and backward: gradients are those of the weights that forward used.
        gathers.begin_rounds(self._step_stats.steps)
        if self._copies is None:
            gathers.all_gather(group.gathered(shards, output))
            return True
        copy = self._copies.get(group)
        if copy is None:
            copy = self._copies[group] = torch.empty(gathers.size, shards.numel(), device=shards.device)
            all_gather(copy.view(-1), shards.float(), self._group, gathers.stats)()
        elif not group.gathers_for_backward:
            self._update(copy, group, shards.float())
        output.copy_(copy.view(-1))
        if not bool(copy.sum().isfinite()):
            self._warn_once("copies", "gathered parameters are not finite: the next ones are gathered uncompressed")
            del self._copies[group]  # on all ranks: they have the same bits
        return True

    def _update(self, copy: Tensor, group: ParamGroup, shards: Tensor) -> None:
        """Add to a copy of a group's parameters the differences that all ranks gather; exempt ones are replaced."""
        gathers, policy, shapes = self._gathers, self._exchange.policy, self._exchange.shapes
        assert gathers is not None
        decoded = torch.empty_like(copy)
        slots, compressed = [], []
        for exact, delta in zip(
            group.gathered(shards, copy), group.gathered(shards - copy[gathers.rank], decoded), strict=True
        ):
            name, rows, _ = exact
            if policy.choose(name, shapes[name], gathers.spec).spec == EXACT:
                slots.append(exact)
            else:
                slots.append(delta)
                compressed.append((rows, delta[1]))
        gathers.all_gather(slots)
        for rows, differences in compressed:
            rows.add_(differences)

    def gather_exactly(self) -> None:
        """Gather parameters uncompressed once: after they were changed by other means than small steps.

        All ranks call it. Only differences (``gather_delta``) need it.
        """
        if self._copies is not None:
            self._copies.clear()

    def stats(self) -> dict[str, Any]:
        exempt = self._scatters.exempt | ({} if self._gathers is None else self._gathers.exempt)
        return super().stats() | {"exempt": exempt, "gather": self.gather, "gather_delta": self._copies is not None}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the number of steps, from which rounding seeds follow: there is no other memory."""
        return self._saved_steps()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved state."""
        self._checked_steps(state)()
        self.gather_exactly()


def _require_shards(spec: str, policy: Policy) -> None:
    """Raise ``ConfigError`` for codecs that cannot be used where shards are reduced or gathered."""
    for text in (spec, policy.small, *policy.rules.values()):
        memories, chain = parse(text)
        if memories:
            raise ConfigError(
                f"{text!r} would keep a residual of the whole gradient on each rank, because the model is sharded over "
                f"all of them: use {chain.text!r}, or replicas, attach(…, replicate=mesh['replicate']), where the "
                "residual is one shard's"
            )
        if text != EXACT and chain.values is not None and chain.values.needs_shape:
            raise ConfigError(f"{text!r} needs whole matrices and not shards of them: use 'qsgd:8' or 'thc:4'")
