"""Exchange: replaces named tensors by their means over ranks, each by the codec that a policy chooses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.aggregate.homomorphic import Summing
from laconic.codecs import parse
from laconic.codecs.memory import ErrorFeedback
from laconic.collective.consistency import peer_failure_as_error
from laconic.collective.executor import UNDER_WAY
from laconic.collective.process_groups import backend_of
from laconic.collective.reductions.allreduce import Reducer
from laconic.collective.reductions.exact import Exact
from laconic.collective.reductions.two_shot import TwoShot
from laconic.collective.stats import ExchangeStats
from laconic.errors import ConfigError, NonFiniteError
from laconic.packet import TensorSpec
from laconic.policy import Choice, Policy
from laconic.residual_storage import ResidualStorage
from laconic.residuals import KeepsResiduals, SlotMemory, saved_by_name

__all__ = ["EXACT", "Exchange", "MemoryCopy", "NamedTensors", "Reduction", "encoding_error", "rank_independent"]

log = logging.getLogger("laconic")

NamedTensors = Sequence[tuple[str, Tensor]]

MemoryCopy = dict[tuple[str, str], dict[str, SlotMemory]]
"""Copies of what reductions remember, by spec and part of the reduction."""

EXACT = "none"
RANK_MEMORY = ("/residual", "/velocity")
"""Suffixes of the state keys that belong to one rank."""
NONFINITE = ("spread", "skip", "raise")
AVERAGES = ("all", "senders")


class Reduction(Protocol):
    """One way to compute means."""

    def reduce_all(self, tensors: NamedTensors) -> None: ...
    def residual(self, slot: str, numel: int) -> Tensor | None: ...
    @property
    def residual_resets(self) -> int: ...
    @property
    def memories(self) -> Mapping[str, KeepsResiduals]: ...
    def set_aside(self) -> AbstractContextManager[None]: ...
    def begin_rounds(self, number: int) -> None: ...
    def portable_state(self, slots: Mapping[str, int]) -> dict[str, Tensor]: ...
    def load_portable_state(self, state: Mapping[str, Tensor]) -> None: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def checked_state(self, state: Mapping[str, Tensor]) -> Callable[[], None]: ...
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


def _uses_allreduce(spec: str) -> bool:
    """Whether the packets of a spec are added by an all-reduce; otherwise they go through ``TwoShot``."""
    memories, chain = parse(spec)
    return chain.summable and all(isinstance(stage, ErrorFeedback) for stage in memories)


def rank_independent(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of an exchange's state that is equal on all ranks: rounds, agreed scales, warm starts.

    It must stay when residuals are dropped: a rank with other round numbers cannot agree with the rest.
    """
    return {key: x for key, x in state.items() if not key.endswith(RANK_MEMORY)}


def _doing(groups: Mapping[str, NamedTensors]) -> str:
    names = [name for group in groups.values() for name, _ in group]
    return f"exchanged {len(names)} tensors ({', '.join(names[:3])}, …)"


def encoding_error(x: Tensor, spec: str, ranks: int) -> float | None:
    """Return the squared error of one encoding over the squared norm, without memory; None if x is not finite or 0."""
    _, chain = parse(spec)
    values = x.detach().to(torch.float32).contiguous()
    norm = float(values.square().sum())
    if not norm > 0:
        return None
    try:
        if chain.summable:
            summing = Summing(chain, ranks, ring=True)
            decoded = summing.chain.decode(summing.packet(values, summing.probe(values)))
        else:
            decoded = chain.decode(chain.encode(values))
    except NonFiniteError:
        return None
    return float((decoded - values).square().sum()) / norm


class Exchange:
    """Means over the ranks of a group. All ranks call ``mean`` with the same names in the same order.

    Args:
        spec: A codec or channel: ``none``, ``ef|topk:0.01|qsgd:4``, ``ef|thc:4``, …
        group: The ranks; all of them by default.
        policy: Codecs by name pattern; by default small and one-dimensional tensors are not compressed.
        nonfinite: What to do with a tensor if a value of some rank is not finite: ``spread`` (NaN on all ranks, as in
            an uncompressed mean), ``skip`` (leave it out) or ``raise`` on all ranks.
        average: ``all`` divides sums by the number of ranks; ``senders`` divides each value by the number of ranks
            that sent it, where the codec selects values.
        stats: Where to count; a new ``ExchangeStats`` by default.
        shapes: Shapes of whole tensors by name, where shards of them are exchanged: the policy looks at the whole ones.
        storage: In which dtype and where residuals are kept between rounds.
    """

    def __init__(
        self, spec: str, group: dist.ProcessGroup | None = None, *, policy: Policy | Mapping[str, str] | None = None,
        nonfinite: str = "spread", average: str = "all", stats: ExchangeStats | None = None,
        shapes: Mapping[str, TensorSpec] | None = None, storage: ResidualStorage | None = None,
    ) -> None:  # fmt: skip
        if nonfinite not in NONFINITE:
            raise ConfigError(f"nonfinite must be one of {', '.join(NONFINITE)}, got {nonfinite!r}")
        if average not in AVERAGES:
            raise ConfigError(f"average must be one of {', '.join(AVERAGES)}, got {average!r}")
        self.spec, self.group, self.policy, self.nonfinite = spec, group, Policy.of(policy), nonfinite
        self.average, self.storage = average, storage
        self.stats = ExchangeStats() if stats is None else stats
        self.shapes = dict(shapes or {})
        self.exempt: dict[str, str] = {}
        self._turn = 0
        self._exact = Exact(group, stats=self.stats, as_torch=self.exact)
        self._reductions: dict[str, Reduction] = {EXACT: self._exact}
        for text in (spec, self.policy.small, *self.policy.rules.values()):
            self.reduction(text)  # an invalid spec raises now and not in the first step

    def reduction(self, spec: str) -> Reduction:
        """Return the way by which the tensors of a spec are reduced."""
        reduction = self._reductions.get(spec)
        if reduction is None:
            if _uses_allreduce(spec):
                reduction = Reducer(
                    spec, self.group, nonfinite=self.nonfinite, stats=self.stats, storage=self.storage
                )  # fmt: skip
            else:
                reduction = TwoShot(
                    spec, self.group, nonfinite=self.nonfinite, average=self.average, stats=self.stats,
                    storage=self.storage,
                )  # fmt: skip
            self._reductions[spec] = reduction
        return reduction

    def with_spec(self, spec: str) -> Exchange:
        """Return an exchange that differs in its codec only, without the memory of this one."""
        return Exchange(
            spec, self.group, policy=self.policy, nonfinite=self.nonfinite, average=self.average, stats=self.stats,
            shapes=self.shapes, storage=self.storage,
        )  # fmt: skip

    def choice(self, name: str, x: Tensor) -> Choice:
        """Return the codec that the policy chooses for a tensor, and why if it is not the default."""
        return self.policy.choose(name, self.shapes.get(name) or TensorSpec.of(x), self.spec)

    @property
    def exact(self) -> bool:
        """Whether no tensor is compressed, whatever its name and shape."""
        return {self.spec, self.policy.small, *self.policy.rules.values()} == {EXACT}

    def group_by_spec(self, tensors: NamedTensors) -> dict[str, list[tuple[str, Tensor]]]:
        """Return the tensors that are not empty, grouped by the spec that the policy chooses for them."""
        groups: dict[str, list[tuple[str, Tensor]]] = {}
        for name, x in tensors:
            spec = self._note_exempt(name, self.choice(name, x))
            if x.numel():
                groups.setdefault(spec, []).append((name, x))
        return groups

    def choose(self, name: str, tensor: TensorSpec) -> str:
        """Return the spec that the policy chooses for a tensor, by its whole shape where that is known."""
        return self._note_exempt(name, self.policy.choose(name, self.shapes.get(name) or tensor, self.spec))

    def _note_exempt(self, name: str, choice: Choice) -> str:
        if choice.reason and choice.spec != self.spec and name not in self.exempt:
            self.exempt[name] = f"{choice.spec}: {choice.reason}"
            log.info("%r travels as %r instead of %r: it %s", name, choice.spec, self.spec, choice.reason)
        return choice.spec

    def mean(self, tensors: NamedTensors) -> None:
        """Replace tensors by their means over all ranks, the same bits on each."""
        self.mean_by_spec(self.group_by_spec(tensors))

    def mean_by_spec(self, groups: Mapping[str, NamedTensors]) -> None:
        """Replace tensors, as grouped by ``group_by_spec``, by their means."""
        for _ in self._mean(groups, 0):
            pass

    @property
    def overlaps(self) -> bool:
        """Whether ``mean_in_steps`` may be used: a rank may begin the next means earlier than others do.

        Ranks then differ in the order of what they start later, so that must be messages with tags of one kind.
        """
        compressed = [reduction for spec, reduction in self._reductions.items() if spec != EXACT]
        return len(compressed) == 1 and isinstance(compressed[0], TwoShot)

    def mean_in_steps(self, groups: Mapping[str, NamedTensors]) -> Iterator[None]:
        """Do what ``mean_by_spec`` does, and yield where the next of ``UNDER_WAY`` means may begin."""
        self._turn = (self._turn + 1) % UNDER_WAY
        return self._mean(groups, self._turn)

    def _mean(self, groups: Mapping[str, NamedTensors], turn: int) -> Iterator[None]:
        with peer_failure_as_error(self.group, _doing(groups)):
            exact = groups.get(EXACT)  # usually small tensors: their all-reduce overlaps with the large ones
            finish = self._exact.begin(exact, turn) if exact else None
            not_finite = None
            for spec, group in groups.items():
                if spec != EXACT:
                    try:
                        reduction = self.reduction(spec)
                        if isinstance(reduction, TwoShot):
                            yield from reduction.reduce_in_steps(group, turn)
                        else:
                            reduction.reduce_all(group)
                    except NonFiniteError as error:  # on all ranks, which complete the round before they raise
                        not_finite = not_finite or error
            if finish is not None:
                finish()
            if not_finite is not None:
                raise not_finite

    def stays_on(self, device: torch.device, specs: Iterable[str]) -> bool:
        """Whether means of tensors on a GPU by these specs are computed without the host.

        ``mean`` then only launches work on the current stream, and nothing waits for it.
        """
        if device.type != "cuda" or backend_of(self.group) != "nccl":
            return False
        reductions = [self.reduction(spec) for spec in specs if spec != EXACT]
        return all(isinstance(each, TwoShot | Reducer) and each.stays_on(device) for each in reductions)

    def prepare(self, groups: Mapping[str, NamedTensors]) -> Callable[[], None] | None:
        """Return a function that does what ``mean_by_spec`` does, for tensors that stay in place and with little work.

        None if the host takes part. All tensors must be on a GPU on which ``stays_on`` holds.
        """
        means = []
        for spec, named in groups.items():
            reduction = self.reduction(spec)
            if isinstance(reduction, TwoShot | Reducer):
                prepared = reduction.prepare(named)
                if prepared is None:
                    return None
                means.append(prepared)
        exact = self._exact.prepare(groups[EXACT]) if EXACT in groups else None
        doing = _doing(groups)

        def mean() -> None:
            try:
                finish = None if exact is None else exact()
                for each in means:
                    each()
                if finish is not None:
                    finish()
            except RuntimeError:
                with peer_failure_as_error(self.group, doing):
                    raise

        return mean

    def forget_places(self) -> None:
        """Drop what was prepared for tensors on a GPU where they were: it holds their memory."""
        for reduction in self._reductions.values():
            if isinstance(reduction, TwoShot | Reducer | Exact):
                reduction.forget_places()

    def settle(self) -> None:
        """Count what happened on a GPU so far, which waits for it."""
        for reduction in self._reductions.values():
            if isinstance(reduction, TwoShot | Reducer):
                reduction.settle()

    def mean_exactly(self, tensors: NamedTensors) -> None:
        """Replace tensors by their means without compression."""
        with peer_failure_as_error(self.group, f"averaged {len(tensors)} uncompressed tensors"):
            self._exact.reduce_all(tensors)

    def residual(self, name: str, x: Tensor) -> Tensor | None:
        """Return what this rank has yet to send of a tensor of this name and shape; None if it keeps nothing."""
        if not x.numel():
            return None
        spec = self.choice(name, x).spec
        residual = self.reduction(spec).residual(name, x.numel())
        # On the device of the tensor, wherever it is kept; of a shape alone (meta) where it is.
        return None if residual is None else (residual if x.is_meta else residual.to(x.device)).view(x.shape)

    @property
    def residual_resets(self) -> int:
        """How often a residual was reset, because it overflowed or its slot changed its shape."""
        return sum(reduction.residual_resets for reduction in self._reductions.values())

    @property
    def residual_nbytes(self) -> int:
        """The bytes that residuals take between rounds."""
        memories = [memory for reduction in self._reductions.values() for memory in reduction.memories.values()]
        return sum(memory.residual_nbytes for memory in memories)

    def carry_residuals(self, before: Exchange, tensors: NamedTensors) -> bool:
        """Continue with the residuals that this rank kept in another group; False if some of them must be dropped.

        Args:
            before: An exchange with the same codec and policy.
            tensors: All tensors that were exchanged.
        """
        kept = True
        for spec, named in self.group_by_spec(tensors).items():
            ours, theirs = self.reduction(spec), before.reduction(spec)
            if isinstance(ours, TwoShot) and isinstance(theirs, TwoShot):
                kept = ours.carry_residuals(theirs, {name: x.numel() for name, x in named}) and kept
            else:  # residuals of sums belong to whole slots of one rank, whatever the number of ranks
                ours.load_state_dict({k: x for k, x in theirs.state_dict().items() if k.endswith(RANK_MEMORY)})
        return kept

    # ------------------------------------------------------------------- rounds that engines repeat with other ranks

    def begin_rounds(self, number: int) -> None:
        """Count the rounds of all slots from this number on, which is the same on all ranks.

        Rounding seeds and common random positions follow from it, so ranks that join need no other memory of rounds.
        """
        for reduction in self._reductions.values():
            reduction.begin_rounds(number)

    @contextmanager
    def set_aside_residuals(self) -> Iterator[None]:
        """Let the block contribute its tensors alone: what this rank has yet to send is neither used nor changed."""
        with ExitStack() as stack:
            for reduction in self._reductions.values():
                stack.enter_context(reduction.set_aside())
            yield

    def copy_memory(self, into: MemoryCopy | None = None) -> MemoryCopy:
        """Return a copy of all residuals and warm starts, in the tensors of an earlier copy where they fit."""
        earlier = into or {}
        return {
            (spec, key): memory.copy_memories(earlier.get((spec, key)))
            for spec, reduction in self._reductions.items()
            for key, memory in reduction.memories.items()
        }

    def restore_memory(self, copy: MemoryCopy) -> None:
        """Return to the memory of a copy: the rounds since then did not take place. The copy is used up."""
        for spec, reduction in self._reductions.items():
            for key, memory in reduction.memories.items():
                memory.restore_memories(copy.get((spec, key), {}))

    def portable_state(self, tensors: NamedTensors) -> dict[str, Tensor]:
        """Return residuals and warm starts of whole slots, which fit any number of ranks.

        Args:
            tensors: All tensors that were exchanged.
        """
        return {
            f"{spec}//{key}": x
            for spec, named in self.group_by_spec(tensors).items()
            for key, x in self.reduction(spec).portable_state({name: x.numel() for name, x in named}).items()
        }

    def load_portable_state(self, state: Mapping[str, Tensor]) -> bool:
        """Replace the memory by a portable state; False if parts of it belong to other codecs and were dropped."""
        by_spec: dict[str, dict[str, Tensor]] = {spec: {} for spec in self._reductions}
        for key, x in state.items():
            spec, _, rest = key.partition("//")
            by_spec.setdefault(spec, {})[rest] = x
        for spec, reduction in self._reductions.items():
            reduction.load_portable_state(by_spec[spec])
        return all(spec in self._reductions for spec in by_spec)

    def scale_residuals(self, factor: float) -> bool:
        """Multiply the residuals of this rank, because the tensors' unit changes; False if there are none."""
        state = self.state_dict()
        kept = [key for key in state if key.endswith(RANK_MEMORY)]
        if kept:
            self.load_state_dict(state | {key: state[key] * factor for key in kept})
        return bool(kept)

    def take_over(self, before: Exchange) -> bool:
        """Continue with the residuals of another exchange; False if some of them must be dropped."""
        state = before.state_dict()
        kept = {key: x for key, x in state.items() if key.partition("//")[0] in self._reductions}
        self.load_state_dict(kept)
        ours, theirs = self._reductions[self.spec], before._reductions[before.spec]
        if isinstance(ours, TwoShot) and isinstance(theirs, TwoShot) and before.spec != self.spec:
            return ours.take_over(theirs)
        return not any(key not in kept and key.endswith(RANK_MEMORY) for key in state)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of all reductions, with keys ``spec//slot/residual`` and the like."""
        return {
            f"{spec}//{key}": x
            for spec, reduction in self._reductions.items()
            for key, x in reduction.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> bool:
        """Replace the memory by a saved one; False if residuals of other codecs were dropped, which is logged.

        An invalid state raises ``InputError`` and changes nothing.
        """
        return self.checked_state(state)()

    def checked_state(self, state: Mapping[str, Tensor]) -> Callable[[], bool]:
        """Check a saved state; return the function that replaces the memory by it, with the result of loading it."""
        by_spec: dict[str, dict[str, Tensor]] = {spec: {} for spec in self._reductions}
        for key, x in saved_by_name(state).items():
            spec, _, rest = key.partition("//")
            by_spec.setdefault(spec, {})[rest] = x
        replacements = [reduction.checked_state(by_spec[spec]) for spec, reduction in self._reductions.items()]
        unknown = [spec for spec in by_spec if spec not in self._reductions]

        def replace_all() -> bool:
            for spec in unknown:
                log.warning("the saved memory of %r is left out: this exchange uses %r", spec, self.spec)
            for replace in replacements:
                replace()
            return not any(key.endswith(RANK_MEMORY) for spec in unknown for key in by_spec[spec])

        return replace_all
