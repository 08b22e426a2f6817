"""The exchange of several simulated workers in one process, with real frames in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from laconic import sums
from laconic.aggregate.homomorphic import Contributor
from laconic.aggregate.homomorphic.families import family_of
from laconic.channels import Channel
from laconic.codecs import parse
from laconic.frames import decode
from laconic.packet import TensorSpec
from laconic.policy import Policy

__all__ = ["SimulatedExchange", "SlotReport"]


@dataclass
class SlotReport:
    """What an exchange did to one slot.

    Args:
        spec: Its codec; another than the exchange's where the policy says so.
        error: Sum over rounds of the relative squared error of the mean.
        residuals: Norm of the residual over that of the tensor, worker 0, in each round.
    """

    spec: str
    rounds: int
    error: float
    residuals: list[float]

    @property
    def mean_error(self) -> float:
        """Relative squared error of a round's mean, on average."""
        return self.error / max(1, self.rounds)

    @property
    def growth(self) -> float:
        """How many times as large the residual is at the end as in the middle; 1 without residuals."""
        count = len(self.residuals)
        if count < 8:
            return 1.0
        quarter = count // 4
        middle = self.residuals[count // 2 - quarter // 2 : count // 2 + quarter // 2 + 1]
        end = self.residuals[-quarter:]
        before = sum(middle) / len(middle)
        return sum(end) / len(end) / before if before > 0 else 1.0


class SimulatedExchange:
    """Means of the tensors of several workers by one spec.

    As the two-shot reduction does, each worker encodes by a channel of its own, and the mean is encoded again by one
    more. Packets of summable codecs are added without decoding, and nothing is encoded again.

    Args:
        spec: A codec, with or without error feedback.
        policy: Which slots get another codec; see ``Policy``.
    """

    def __init__(self, spec: str, workers: int, policy: Policy | None = None) -> None:
        self.spec, self.workers, self.policy = spec, workers, policy or Policy()
        self.nbytes = 0
        """Bytes that one worker has sent and received so far."""
        self.slots: dict[str, SlotReport] = {}
        self._up = [Channel(spec, policy=self.policy) for _ in range(workers)]
        self._down = Channel(spec, policy=self.policy)
        self._sums: dict[str, list[Contributor]] = {}

    def mean(self, slot: str, tensors: Sequence[Tensor], seed: int) -> Tensor:
        """Return the decoded mean of a slot's tensors, one of each worker."""
        sender: Channel | Contributor
        choice = self.policy.choose(slot, TensorSpec.of(tensors[0]), self.spec)
        if family_of(parse(choice.spec)[1]) is not None:
            result, sender = self._summed(slot, choice.spec, tensors, seed)
        else:
            pairs = zip(self._up, tensors, strict=True)
            frames = [channel.encode(slot, x, seed=_seed(seed, k)) for k, (channel, x) in enumerate(pairs)]
            where = tensors[0].device
            total = decode(frames[0], device=where)
            for frame in frames[1:]:
                total += decode(frame, device=where)
            reply = self._down.encode(slot, total / self.workers, seed=_seed(seed, self.workers))
            self.nbytes += len(frames[0]) + len(reply)
            result, sender = decode(reply, device=where), self._up[0]
        self._report(slot, choice.spec, tensors, result, sender)
        return result

    def _summed(self, slot: str, spec: str, tensors: Sequence[Tensor], seed: int) -> tuple[Tensor, Contributor]:
        if spec not in self._sums:
            self._sums[spec] = [Contributor(spec, workers=self.workers, worker=k) for k in range(self.workers)]
        contributors = self._sums[spec]
        probes = [one.probe(slot, x, seed=seed) for one, x in zip(contributors, tensors, strict=True)]
        agreed = contributors[0].summing.agree(probes)
        contributors[0].summing.require_usable(agreed)
        frames = [bytes(one.encode(slot, agreed, seed=seed)) for one in contributors]
        total = sums.add(*frames)
        for one in contributors:
            one.received(slot, sums.packet(total))
        self.nbytes += len(frames[0]) + len(total) + 8 * agreed.numel() * (contributors[0].summing.by == "max")
        return decode(total, device=tensors[0].device), contributors[0]

    def _report(
        self, slot: str, spec: str, tensors: Sequence[Tensor], result: Tensor, sender: Channel | Contributor
    ) -> None:
        report = self.slots.setdefault(slot, SlotReport(spec, 0, 0.0, []))
        exact = sum(tensors[1:], start=tensors[0]) / self.workers
        norm = float(exact.square().sum())
        report.rounds += 1
        report.error += float((result.view_as(exact) - exact).square().sum()) / norm if norm > 0 else 0.0
        residual, sent = sender.residual(slot), float(tensors[0].norm())
        if residual is not None and sent > 0:
            report.residuals.append(float(residual.norm()) / sent)


def _seed(round_seed: int, sender: int) -> int:
    """Return the rounding seed of a sender: all differ."""
    return round_seed * 1009 + sender
