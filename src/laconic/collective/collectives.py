"""Collectives: all-reduce, reduce-scatter, all-gather and messages by codecs, over any process group of torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.codecs import parse
from laconic.codecs.memory import MomentumCorrection
from laconic.collective import transport
from laconic.collective.consistency import peer_failure_as_error, require_same_on_all_ranks
from laconic.collective.exchange import EXACT, Exchange, NamedTensors, rank_independent
from laconic.collective.executor import ExchangeThread
from laconic.collective.process_groups import backend_of, rank_in, size_of
from laconic.collective.reductions.scatter_gather import AllGather, ReduceScatter, Rows
from laconic.collective.reductions.shards import ShardRounds
from laconic.collective.saved_state import saved_world
from laconic.collective.stats import ExchangeStats
from laconic.collective.work import CodecWork
from laconic.errors import ConfigError, InputError
from laconic.packet import FLOATS, TensorSpec
from laconic.policy import Policy
from laconic.residual_storage import ResidualStorage
from laconic.residuals import saved_by_name

__all__ = ["Collectives", "NamedPairs", "Op"]

log = logging.getLogger("laconic")

Op = Literal["mean", "sum"]

NamedPairs = Sequence[tuple[str, Tensor, Tensor]]
"""Name, output and input of each tensor."""


class Collectives:
    """Collectives of named tensors over the ranks of a group, each tensor by the codec that a policy chooses.

    All ranks make the object with the same arguments, which is checked, and call its methods for the same names in the
    same order. The tensors of one call travel together. Names identify residuals and rounds; a name may be used by
    several methods, each of which keeps its own. Codecs that add packets by an all-reduce (``thc``, ``shared``) do so
    in ``all_reduce`` only; elsewhere their frames are sent and decoded like those of all other codecs.

    Args:
        spec: A codec or channel: ``none`` (torch's own collectives, bit for bit), ``qsgd:4``, ``ef|topk:0.01``, …
        group: The ranks; all of them by default. Any ``ProcessGroup``, also one that torch.distributed does not know.
        policy: Codecs by name pattern; by default small and one-dimensional tensors are not compressed. What counts is
            the tensor of all shards together: a shard of shape (n, m) on w ranks belongs to a tensor of (w n, m).
        nonfinite: What to do with a shard if a value of it is not finite on some rank: ``spread`` (NaN on all ranks
            that receive the shard), ``skip`` (leave out the contribution; a gathered shard becomes zero) or ``raise``
            on all ranks.
        stats: Where to count; a new ``ExchangeStats`` by default.
        shapes: What the policy looks at instead, by name: for shards that were flattened or padded.
        storage: In which dtype and where residuals are kept between rounds.
    """

    def __init__(
        self, spec: str, group: dist.ProcessGroup | None = None, *, policy: Policy | Mapping[str, str] | None = None,
        nonfinite: str = "spread", stats: ExchangeStats | None = None, shapes: Mapping[str, TensorSpec] | None = None,
        storage: ResidualStorage | None = None,
    ) -> None:  # fmt: skip
        if group is None and not (dist.is_available() and dist.is_initialized()):
            raise ConfigError("torch.distributed has no process group yet: call init_process_group first")
        self.spec, self.group, self.nonfinite = spec, group, nonfinite
        self._exchange = Exchange(
            spec, group, policy=policy, nonfinite=nonfinite, stats=stats, shapes=shapes, storage=storage
        )
        self.policy, self.stats = self._exchange.policy, self._exchange.stats
        self.rank, self.size = rank_in(group), size_of(group)
        settings = {"codec": spec, "policy": repr(self.policy), "nonfinite": nonfinite}
        require_same_on_all_ranks("Collectives", settings, group, self.stats)
        self._scatters: dict[str, ReduceScatter] = {}
        self._gathers: dict[str, AllGather] = {}
        self._thread: ExchangeThread | None = None
        self._first_round = 0

    def __repr__(self) -> str:
        return f"Collectives({self.spec!r}, rank={self.rank}, size={self.size})"

    @property
    def exempt(self) -> dict[str, str]:
        """Names of the tensors that do not get the spec, with their codec and the reason."""
        return self._exchange.exempt

    # ------------------------------------------------------------------------------------------------- collectives

    def all_reduce(self, tensors: NamedTensors, *, op: Op = "mean", async_op: bool = False) -> CodecWork | None:
        """Replace tensors by their means or sums over ranks, the same bits on each."""
        _require_op(op)
        _require_floats(tensors)

        def task() -> None:
            groups = self._exchange.group_by_spec(tensors)
            if op == "mean":
                self._exchange.mean_by_spec(groups)
                return
            with self._failures("added", [name for name, _ in tensors]):
                finish = self._add_exactly([x for _, x in groups.pop(EXACT, [])])
                self._exchange.mean_by_spec(groups)
                finish()
            for group in groups.values():
                torch._foreach_mul_([x for _, x in group], float(self.size))

        return self._run(task, [x for _, x in tensors], async_op)

    def reduce_scatter(self, tensors: NamedPairs, *, op: Op = "mean", async_op: bool = False) -> CodecWork | None:
        """Write this rank's shard of each input's mean or sum over ranks to its output.

        Args:
            tensors: Name, output and input. An input holds the shards of all ranks in their order along its first
                dimension: for an output of shape (n, m) it has shape (ranks * n, m) or (ranks, n, m). It is not
                changed. Both have the same dtype and device. An output may be the rank's own shard of the input.
            op: ``mean`` or ``sum``.
            async_op: Return at once a ``Work`` to wait for. Tensors must not be used before that.
        """
        _require_op(op)
        groups = self._group_pairs("reduce_scatter", tensors, shard=1, whole=2)

        def task() -> None:
            with self._failures("reduced and scattered", [name for name, *_ in tensors]):
                finish = self._scatter_exactly(groups.pop(EXACT, []), op == "mean")
                for spec, group in groups.items():
                    self._scatter_encoded(spec, group, op == "mean")
                finish()

        return self._run(task, [output for _, output, _ in tensors], async_op)

    def all_gather(self, tensors: NamedPairs, *, async_op: bool = False) -> CodecWork | None:
        """Write the inputs of all ranks to the output: the same bits on all ranks, this rank's own shard included.

        Args:
            tensors: Name, output and input. For an input of shape (n, m) an output has shape (ranks * n, m) or
                (ranks, n, m). Both have the same dtype and device. An input may be the rank's own shard of the output.
            async_op: Return at once a ``Work`` to wait for. Tensors must not be used before that.
        """
        groups = self._group_pairs("all_gather", tensors, shard=2, whole=1)

        def task() -> None:
            with self._failures("gathered", [name for name, *_ in tensors]):
                finish = self._gather_exactly(groups.pop(EXACT, []))
                for spec, group in groups.items():
                    self._gather_encoded(spec, group)
                finish()

        return self._run(task, [output for _, output, _ in tensors], async_op)

    # -------------------------------------------------------------------------------------------------- with codecs

    def _scatter_by(self, spec: str) -> ReduceScatter:
        if spec not in self._scatters:
            _require_shards("reduce_scatter", spec)
            self._scatters[spec] = ReduceScatter(
                spec, self.group, nonfinite=self.nonfinite, stats=self.stats, storage=self._exchange.storage
            )
            self._scatters[spec].begin_rounds(self._first_round)
        return self._scatters[spec]

    def _gather_by(self, spec: str) -> AllGather:
        if spec not in self._gathers:
            _require_shards("all_gather", spec)
            if any(isinstance(stage, MomentumCorrection) for stage in parse(spec)[0]):
                raise ConfigError(f"all_gather: {spec!r}: momentum is for gradients that are added; use 'ef' or none")
            self._gathers[spec] = AllGather(
                spec, self.group, nonfinite=self.nonfinite, stats=self.stats, storage=self._exchange.storage
            )
            self._gathers[spec].begin_rounds(self._first_round)
        return self._gathers[spec]

    def _scatter_encoded(self, spec: str, tensors: NamedPairs, mean: bool) -> None:
        slots, copies = [], []
        for name, output, x in tensors:
            rows = [row if r == self.rank else _flat(row) for r, row in enumerate(_rows(x, self.size))]
            own = _result_of(output)
            own.copy_(rows[self.rank].reshape(-1))
            rows[self.rank] = own
            slots.append((name, rows))
            if own.data_ptr() != output.data_ptr():
                copies.append((output, own))
        self._scatter_by(spec).reduce_all(slots, mean=mean)
        for output, own in copies:
            output.copy_(own.view(output.shape))

    def _gather_encoded(self, spec: str, tensors: NamedPairs) -> None:
        slots: list[tuple[str, Rows]] = []
        copies = []
        for name, output, x in tensors:
            outputs = _rows(output, self.size)
            rows = [_result_of(row) for row in outputs]
            rows[self.rank].copy_(x.reshape(-1))
            slots.append((name, rows))
            copies += [(o, row) for o, row in zip(outputs, rows, strict=True) if o.data_ptr() != row.data_ptr()]
        self._gather_by(spec).gather_all(slots)
        for row, values in copies:
            row.copy_(values.view(row.shape))

    # ------------------------------------------------------------------------------------- torch's own collectives

    def _add_exactly(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        self._count(tensors)
        dense = [x.contiguous() for x in tensors]
        works = [transport.all_reduce(x, self.group, self.stats, as_torch=True) for x in dense]

        def finish() -> None:
            with self.stats.during("wire_s"):
                for work in works:
                    work.wait()
            for x, total in zip(tensors, dense, strict=True):
                if total is not x:
                    x.copy_(total)

        return finish

    def _scatter_exactly(self, tensors: NamedPairs, mean: bool) -> Callable[[], None]:
        self._count([x for *_, x in tensors])
        pending = []
        for same in _by_dtype(tensors):
            if len(same) == 1 and all(x.is_contiguous() for x in same[0][1:]):
                _, output, x = same[0]
                wait = transport.reduce_scatter(output.view(-1), x.view(-1), self.group, self.stats, mean=mean)
                pending.append((wait, same, output))
                continue
            joined = torch.cat([x.reshape(self.size, -1) for *_, x in same], dim=1)
            own = torch.empty(joined.shape[1], dtype=joined.dtype, device=joined.device)
            wait = transport.reduce_scatter(own, joined.view(-1), self.group, self.stats, mean=mean)
            pending.append((wait, same, own))

        def finish() -> None:
            for wait, same, own in pending:
                wait()
                if own is not same[0][1]:
                    parts = torch.split(own, [output.numel() for _, output, _ in same])
                    for (_, output, _), part in zip(same, parts, strict=True):
                        output.copy_(part.view(output.shape))

        return finish

    def _gather_exactly(self, tensors: NamedPairs) -> Callable[[], None]:
        self._count([output for _, output, _ in tensors])
        pending = []
        for same in _by_dtype(tensors):
            if len(same) == 1 and all(x.is_contiguous() for x in same[0][1:]):
                _, output, x = same[0]
                wait = transport.all_gather(output.view(-1), x.view(-1), self.group, self.stats)
                pending.append((wait, same, output))
                continue
            own = torch.cat([x.reshape(-1) for *_, x in same])
            joined = torch.empty(self.size, own.numel(), dtype=own.dtype, device=own.device)
            pending.append((transport.all_gather(joined.view(-1), own, self.group, self.stats), same, joined))

        def finish() -> None:
            for wait, same, joined in pending:
                wait()
                if joined is not same[0][1]:
                    parts = torch.split(joined, [x.numel() for *_, x in same], dim=1)
                    for (_, output, _), part in zip(same, parts, strict=True):
                        output.copy_(part.reshape(output.shape))

        return finish

    def _count(self, wholes: Sequence[Tensor]) -> None:
        self.stats.rounds += bool(wholes)
        self.stats.values += sum(x.numel() for x in wholes)

    # ---------------------------------------------------------------------------------------------- order and errors

    def _group_pairs(
        self, call: str, tensors: NamedPairs, *, shard: Literal[1, 2], whole: Literal[1, 2]
    ) -> dict[str, list[tuple[str, Tensor, Tensor]]]:
        """Check shapes and dtypes; return the tensors that are not empty by the spec that the policy chooses."""
        groups: dict[str, list[tuple[str, Tensor, Tensor]]] = {}
        for entry in tensors:
            name, small, large = entry[0], entry[shard], entry[whole]
            shape = (self.size * small.shape[0], *small.shape[1:]) if small.dim() else (self.size,)
            if tuple(large.shape) not in (shape, (self.size, *small.shape)):
                raise InputError(
                    f"{call}: {name!r}: expected a tensor of shape {list(shape)} or {[self.size, *small.shape]} for "
                    f"shards of shape {list(small.shape)} on {self.size} ranks, got {list(large.shape)}"
                )
            if small.dtype != large.dtype or small.device != large.device:
                raise InputError(
                    f"{call}: {name!r}: input and output must have one dtype and device, got {entry[2].dtype} on "
                    f"{entry[2].device} and {entry[1].dtype} on {entry[1].device}"
                )
            spec = self._exchange.choose(name, TensorSpec(shape, small.dtype))
            if spec != EXACT:
                _require_floats([(name, small)])
            if small.numel():
                groups.setdefault(spec, []).append(entry)
        return groups

    def _failures(self, done: str, names: Sequence[str]) -> Any:
        return peer_failure_as_error(self.group, f"{done} {len(names)} tensors ({', '.join(names[:3])}, …)")

    def _run(self, task: Callable[[], None], tensors: Sequence[Tensor], async_op: bool) -> CodecWork | None:
        """Run a task now, or on the thread if some task ran there: operations keep their order."""
        # Ranks of torch's threaded group are threads, and the group cannot be used on any other thread.
        if backend_of(self.group) == "threaded" or not (async_op or self._thread is not None):
            with torch.no_grad():
                if async_op:
                    return CodecWork.run(task, tensors)
                task()
                return None
        if self._thread is None:
            self._thread = ExchangeThread("laconic-collectives")
        work = CodecWork.start(self._thread, task, tensors)
        if async_op:
            return work
        work.wait()
        return None

    def close(self) -> None:
        """Wait for asynchronous operations and end their thread."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def begin_rounds(self, number: int) -> None:
        """Count the rounds of all tensors from this number on, the same on all ranks; rounding seeds follow from it."""
        self._first_round = number
        self._exchange.begin_rounds(number)
        operations: list[ShardRounds] = [*self._scatters.values(), *self._gathers.values()]
        for operation in operations:
            operation.begin_rounds(number)

    # -------------------------------------------------------------------------------------------------------- state

    @property
    def residual_resets(self) -> int:
        """How often a residual was reset, because it overflowed or its slot changed its shape."""
        operations: list[ShardRounds] = [*self._scatters.values(), *self._gathers.values()]
        return self._exchange.residual_resets + sum(operation.residual_resets for operation in operations)

    @property
    def residual_nbytes(self) -> int:
        """The bytes that residuals take between rounds."""
        operations: list[ShardRounds] = [*self._scatters.values(), *self._gathers.values()]
        memories = [memory for operation in operations for memory in operation.memories.values()]
        return self._exchange.residual_nbytes + sum(memory.residual_nbytes for memory in memories)

    def state_dict(self) -> dict[str, Tensor]:
        """Return residuals and rounds of this rank: ``all_reduce/…``, ``reduce_scatter/spec//…``, ``all_gather/…``."""
        state = {f"all_reduce/{key}": x for key, x in self._exchange.state_dict().items()}
        for kind, operations in (("reduce_scatter", self._scatters), ("all_gather", self._gathers)):
            for spec, operation in operations.items():
                state |= {f"{kind}/{spec}//{key}": x for key, x in operation.state_dict().items()}
        return state | {"world": torch.tensor([self.rank, self.size])}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> bool:
        """Continue from a saved state; False if residuals were dropped, which is logged.

        They are dropped if another rank, or another number of ranks, or another codec saved them. Round numbers stay:
        they are equal on all ranks.
        """
        if "world" not in saved_by_name(state):
            raise InputError("expected the result of Collectives.state_dict: 'world' is missing")
        saved, ours = saved_world(state), (self.rank, self.size)
        memory = {key: x for key, x in state.items() if key != "world"}
        if saved != ours:
            log.warning("residuals were saved by rank %d of %d, this is rank %d of %d: they are reset", *saved, *ours)
            memory = rank_independent(memory)
        replace_exchange, replacements = self._exchange.checked_state(_below("all_reduce/", memory)), []
        kept = saved == ours
        specs = {self.spec, self.policy.small, *self.policy.rules.values()} - {EXACT}
        for kind, operation_of in (("reduce_scatter", self._scatter_by), ("all_gather", self._gather_by)):
            saved_by = {key.partition("//")[0] for key in _below(f"{kind}/", memory)}
            for spec in sorted(saved_by & specs):
                replacements.append(operation_of(spec).checked_state(_below(f"{kind}/{spec}//", memory)))
            for spec in sorted(saved_by - specs):
                log.warning("the saved memory of %s by %r is left out: this object uses %r", kind, spec, self.spec)
                left_out = _below(f"{kind}/{spec}//", memory)
                kept = kept and len(rank_independent(left_out)) == len(left_out)
        for replace in replacements:
            replace()
        return replace_exchange() and kept


def _below(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): x for key, x in state.items() if key.startswith(prefix)}


def _require_op(op: str) -> None:
    if op not in ("mean", "sum"):
        raise ConfigError(f"op must be 'mean' or 'sum', got {op!r}")


def _require_floats(tensors: NamedTensors) -> None:
    for name, x in tensors:
        if x.dtype not in FLOATS:
            raise InputError(f"{name!r}: expected a float tensor, got {str(x.dtype).removeprefix('torch.')}")


def _require_shards(call: str, spec: str) -> None:
    _, chain = parse(spec)
    if chain.values is not None and chain.values.needs_shape:
        raise ConfigError(
            f"{call}: {spec!r} needs whole matrices and not shards of them: use all_reduce, or qsgd or thc"
        )


def _rows(x: Tensor, ranks: int) -> Rows:
    return list(x.reshape(ranks, x.shape[0] // ranks, *x.shape[1:]).unbind(0))


def _flat(x: Tensor) -> Tensor:
    return x.detach().to(torch.float32).reshape(-1).contiguous()


def _result_of(x: Tensor) -> Tensor:
    """Return a flat float32 tensor for the values of x: its own memory, or new memory where that is not possible."""
    if x.dtype == torch.float32 and x.is_contiguous():
        return x.detach().view(-1)
    return torch.empty(x.numel(), device=x.device)


def _by_dtype(tensors: NamedPairs) -> list[list[tuple[str, Tensor, Tensor]]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, Tensor, Tensor]]] = {}
    for pair in tensors:
        kinds.setdefault((pair[1].dtype, pair[1].device), []).append(pair)
    return list(kinds.values())
