"""A worker's side of ``returns=sum``: encodes contributions and reads the sums that come back.

The integers of a round are on the scales that the round before agreed on, times 1.25, so that no extra call is needed
before a push; values beyond them are clipped, and error feedback sends the rest later. The first round has no scales:
workers agree on them first (``Connection.agree_scales``). If a worker's values are not finite, the scales that come
back mark this, and all workers drop the same round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from laconic.aggregate.homomorphic import Contributor
from laconic.cluster.homomorphic.server import UNUSABLE, pack_contribution, read_scales, unpack_contribution
from laconic.cluster.job import Job
from laconic.cluster.protocol import Frame
from laconic.counters import LogOnce
from laconic.errors import NonFiniteError
from laconic.frames import encode
from laconic.wire import Buffer

__all__ = ["MAX_DROPPED", "SummingWorker", "scale_frame"]

MAX_DROPPED = 10
"""Rounds dropped in a row after which training ends: then the weights are probably not finite."""


class SummingWorker:
    """One worker's slots, round by round.

    Args:
        like: Tensors of the slots' shapes.
    """

    def __init__(self, job: Job, worker: int, like: Mapping[str, Tensor]) -> None:
        self._slot_sums = {how.name: how for how in job.slot_sums(like)}
        by_spec = {spec: Contributor(spec, workers=job.workers, worker=worker) for spec in (job.push, job.push_small)}
        self._contributor = {name: by_spec[job.push_spec(name, x)] for name, x in like.items()}
        self._contributors = list(by_spec.values())
        self._scales: dict[str, Tensor] = {}
        self._sent: set[str] = set()
        self._probed: set[str] = set()
        self.dropped = 0
        """Rounds that all workers dropped because a worker's values were not finite."""
        self._dropped_in_a_row = 0
        self._warn_once = LogOnce("dropped")

    @property
    def must_agree(self) -> bool:
        """Whether there are no scales of an earlier round: workers must agree on them before they push."""
        return len(self._scales) < len(self._contributor)

    def probe(self, slot: str, x: Tensor, *, seed: int) -> Tensor:
        """Begin a slot's round and return the scales of its blocks. All workers give the same seed."""
        self._probed.add(slot)
        return self._contributor[slot].probe(slot, x, seed=seed)

    def encode(self, slot: str, x: Tensor, *, seed: int) -> Frame:
        """Return a slot's contribution on the scales of the round before."""
        probe = self.probe(slot, x, seed=seed)
        carried = self._contributor[slot].summing.carry(self._scales[slot])
        return self.encode_on(slot, probe, carried, seed=seed)

    def encode_on(self, slot: str, probe: Tensor, agreed: Tensor, *, seed: int) -> Frame:
        """Return a probed slot's contribution on agreed scales."""
        contributor, summand = self._contributor[slot], None
        if contributor.usable(probe) and contributor.usable(agreed):
            summand = contributor.encode(slot, agreed, seed=seed)
            self._sent.add(slot)
        return pack_contribution(scale_frame(probe.cpu()), summand)

    def read_scales(self, slot: str, frame: Frame) -> Tensor:
        """Return a slot's agreed scales from their frame."""
        return _floats(read_scales(frame, self._slot_sums[slot].num_scales))

    def read_reply(self, reply: Mapping[str, Frame]) -> dict[str, Buffer] | None:
        """Return the frames to decode, by slot; None if all workers drop this round."""
        frames: dict[str, Buffer] = {}
        usable = True
        for slot, message in reply.items():
            scales, total = unpack_contribution(message)
            bits = read_scales(scales, self._slot_sums[slot].num_scales)
            if not _usable(bits):
                usable = False  # this slot keeps its scales
                continue
            self._scales[slot] = _floats(bits)
            if total is not None:
                frames[slot] = total
        if usable and len(frames) == len(reply):
            self._end_round()
            self._dropped_in_a_row = 0
            return frames
        self._drop_round()
        return None

    def _drop_round(self) -> None:
        for slot in self._probed:
            if slot in self._sent:
                self._contributor[slot].undo(slot)
            else:
                self._contributor[slot].skip(slot)
        self._end_round()
        self.dropped += 1
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row >= MAX_DROPPED:
            raise NonFiniteError(
                f"values of some worker were not finite for {self._dropped_in_a_row} rounds: use a smaller --lr"
            )
        self._warn_once("nonfinite", "a value of some worker is not finite: all workers drop this round and continue")

    def _end_round(self) -> None:
        self._sent, self._probed = set(), set()

    def forget(self, slots: Sequence[str], why: str) -> None:
        """Drop the residuals of some slots. Their scales stay, because all workers share them."""
        for contributor in self._contributors:
            contributor.forget([slot for slot in slots if self._contributor[slot] is contributor], why)

    @property
    def residual_resets(self) -> int:
        return sum(contributor.stats.residual_resets for contributor in self._contributors)

    def state_dict(self) -> dict[str, Tensor]:
        """Return residuals and scales."""
        tensors = {f"scales/{slot}": x for slot, x in self._scales.items()}
        for contributor in self._contributors:
            tensors |= {f"residual/{name}": x for name, x in contributor.state_dict().items()}
        return tensors

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        parts: dict[str, dict[str, Tensor]] = {"scales": {}, "residual": {}}
        for key, x in state.items():
            part, _, name = key.partition("/")
            parts[part][name] = x
        for contributor in self._contributors:
            residuals = parts["residual"].items()
            contributor.load_state_dict(
                {name: x for name, x in residuals if self._contributor.get(name.rpartition("/")[0]) is contributor}
            )
        self._scales = parts["scales"]
        self._end_round()

    def restart(self, scale_frames: Sequence[Frame], *, empty: bool) -> None:
        """Continue with the server's scales (none where they are unusable), without residuals if ``empty``."""
        if empty:
            self.load_state_dict({})
        self._end_round()
        self._scales = {}
        for how, frame in zip(self._slot_sums.values(), scale_frames, strict=True):
            bits = read_scales(frame, how.num_scales)
            if _usable(bits):
                self._scales[how.name] = _floats(bits)


def scale_frame(probe: Tensor) -> bytes:
    return encode(probe, "none")


def _usable(bits: Tensor) -> bool:
    return not bits.numel() or int(bits.max()) < UNUSABLE


def _floats(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)
