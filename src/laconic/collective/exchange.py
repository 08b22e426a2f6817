"""Exchange: named tensors replaced by their means over ranks, each by the codec that a policy gives it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from laconic.codecs import parse
from laconic.codecs.memory import ErrorFeedback
from laconic.collective.reductions.allreduce import Reducer
from laconic.collective.reductions.exact import Exact
from laconic.collective.reductions.two_shot import TwoShot
from laconic.collective.stats import ExchangeStats
from laconic.errors import ConfigError, LaconicError
from laconic.packet import TensorSpec
from laconic.policy import Policy

__all__ = ["EXACT", "Exchange", "Reduction", "common", "peer_failure_as_error", "summable"]

log = logging.getLogger("laconic")

EXACT = "none"
OWN = ("/residual", "/velocity")
"""Ends of the keys under which a rank keeps what it has not sent."""
NONFINITE = ("spread", "skip", "raise")


class Reduction(Protocol):
    """One way to a mean."""

    def reduce_all(self, tensors: Sequence[tuple[str, Tensor]]) -> None: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


def summable(spec: str) -> bool:
    """Whether ranks' packets are added by an all-reduce; otherwise they go to owners and back."""
    memories, chain = parse(spec)
    return chain.summable and all(isinstance(stage, ErrorFeedback) for stage in memories)


@contextmanager
def peer_failure_as_error(group: dist.ProcessGroup | None, doing: str) -> Iterator[None]:
    """What the backend says when another rank is gone becomes one line that says what to do."""
    try:
        yield
    except LaconicError:
        raise
    except RuntimeError as error:
        said = " ".join(str(error).split())
        raise LaconicError(
            f"rank {dist.get_rank(group)} lost another rank while it {doing}: it died, or was silent for as long as "
            f"the group waits. Restart from the last checkpoint. ({said[:300]})"
        ) from error


def common(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What of an exchange's state is the same on all ranks, of any number: rounds, agreed scales, warm starts.

    It must stay when residuals are dropped: a rank that counts other rounds than the rest cannot agree with them.
    """
    return {key: x for key, x in state.items() if not key.endswith(OWN)}


class Exchange:
    """Means over the ranks of a group. All ranks call ``mean`` with the same names in the same order.

    Args:
        spec: A codec or channel: ``none``, ``ef|topk:0.01|qsgd:4``, ``ef|thc:4``, …
        group: The ranks; all of them by default.
        policy: Codecs by name pattern; by default small and one-dimensional tensors are not compressed.
        nonfinite: What becomes of a tensor when a value of some rank is not finite: ``spread`` (NaN on all ranks, as
            in a plain mean), ``skip`` (it is left out) or ``raise``, on all ranks.
        ledger: Where to count; one of its own by default.
    """

    def __init__(
        self,
        spec: str,
        group: dist.ProcessGroup | None = None,
        *,
        policy: Policy | Mapping[str, str] | None = None,
        nonfinite: str = "spread",
        ledger: ExchangeStats | None = None,
    ) -> None:
        if nonfinite not in NONFINITE:
            raise ConfigError(f"nonfinite must be one of {', '.join(NONFINITE)}, got {nonfinite!r}")
        self.spec, self.group, self.policy, self.nonfinite = spec, group, Policy.of(policy), nonfinite
        self.ledger = ExchangeStats() if ledger is None else ledger
        self.exempt: dict[str, str] = {}
        self._exact = Exact(group, ledger=self.ledger)
        self._roads: dict[str, Reduction] = {EXACT: self._exact}
        for each in (spec, self.policy.small, *self.policy.rules.values()):
            self._road(each)  # so that what is wrong is said now and not in the first step

    def _road(self, spec: str) -> Reduction:
        road = self._roads.get(spec)
        if road is None:
            if summable(spec):
                road = Reducer(spec, self.group, nonfinite=self.nonfinite, ledger=self.ledger)
            else:
                road = TwoShot(spec, self.group, nonfinite=self.nonfinite, ledger=self.ledger)
            self._roads[spec] = road
        return road

    @property
    def exact(self) -> bool:
        """Whether no tensor is compressed, whatever its name and shape."""
        return {self.spec, self.policy.small, *self.policy.rules.values()} == {EXACT}

    def spec_of(self, name: str, x: Tensor) -> str:
        """Which codec a tensor gets."""
        choice = self.policy.choose(name, TensorSpec.of(x), self.spec)
        if choice.reason and choice.spec != self.spec and name not in self.exempt:
            self.exempt[name] = f"{choice.spec}: {choice.reason}"
            log.info("%r travels as %r instead of %r: it %s", name, choice.spec, self.spec, choice.reason)
        return choice.spec

    def mean(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Replace tensors by their means over all ranks, the same bits on each."""
        by_spec: dict[str, list[tuple[str, Tensor]]] = {}
        for name, x in tensors:
            if x.numel():
                by_spec.setdefault(self.spec_of(name, x), []).append((name, x))
        with peer_failure_as_error(self.group, f"exchanged {len(tensors)} tensors from {tensors[0][0]!r} on"):
            # What is small goes along with what is large.
            finish = self._exact.begin(plain) if (plain := by_spec.pop(EXACT, [])) else None
            for spec, same in by_spec.items():
                self._road(spec).reduce_all(same)
            if finish is not None:
                finish()

    def mean_exactly(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """The same without compression."""
        with peer_failure_as_error(self.group, f"averaged {len(tensors)} tensors as they are"):
            self._exact.reduce_all(tensors)

    # --------------------------------------------------------------------------------------------------------- state

    def take_over(self, before: Exchange) -> bool:
        """Go on with what another exchange has not sent yet; False when some of it must be dropped."""
        state = before.state_dict()
        kept = {key: x for key, x in state.items() if key.partition("//")[0] in self._roads}
        self.load_state_dict(kept)
        mine, theirs = self._roads[self.spec], before._roads[before.spec]
        if isinstance(mine, TwoShot) and isinstance(theirs, TwoShot) and before.spec != self.spec:
            return mine.take_over(theirs)
        lost = [key for key in state if key not in kept and key.endswith(OWN)]
        return not lost

    def state_dict(self) -> dict[str, Tensor]:
        """Residuals by codec and name."""
        return {f"{spec}//{key}": x for spec, road in self._roads.items() for key, x in road.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> bool:
        """Replace the memory by a saved one; what is of other codecs is left out, and said. Then it returns False."""
        by_spec: dict[str, dict[str, Tensor]] = {spec: {} for spec in self._roads}
        for key, x in state.items():
            spec, _, rest = key.partition("//")
            by_spec.setdefault(spec, {})[rest] = x
        others = [spec for spec in by_spec if spec not in self._roads]
        for spec in others:
            log.warning("the saved memory of %r is left out: this exchange is by %r", spec, self.spec)
        for spec, road in self._roads.items():
            road.load_state_dict(by_spec[spec])
        return not any(key.endswith(OWN) for spec in others for key in by_spec[spec])
