"""A worker's side of ``returns=sum``: what it sends of each slot, and what the answer makes of it.

Integers of a round are on the scales that the round before agreed on, 1.25 times as wide, so that nothing need be
asked before sending; what outgrows them is clipped, and error feedback sends it later. The first round has no scales:
there workers settle them first (``Link.agree``). If the values of anybody are not finite, the scales that come back say
so to everybody, and all drop the same round as if it had not been.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from laconic.aggregate.homomorphic import Contributor
from laconic.cluster.homomorphic.server import UNUSABLE, pack_part, read_scales, unpack_part
from laconic.cluster.job import Job
from laconic.cluster.protocol import Frame
from laconic.counters import LogOnce
from laconic.errors import NonFiniteError
from laconic.frames import encode
from laconic.wire import Buffer

__all__ = ["MOST_DROPPED", "Summands"]


MOST_DROPPED = 10
"""Rounds in a row without a finite value for all: then the weights themselves must be to blame."""


class Summands:
    """One worker's slots, round by round.

    Args:
        job: What was agreed.
        worker: Which one this is.
        like: The slots.
    """

    def __init__(self, job: Job, worker: int, like: Mapping[str, Tensor]) -> None:
        self._how = {how.name: how for how in job.slot_sums(like)}
        made = {spec: Contributor(spec, workers=job.workers, worker=worker) for spec in (job.push, job.push_small)}
        self._of = {name: made[job.push_spec(name, x)] for name, x in like.items()}
        self._contributors = list(made.values())
        self._scales: dict[str, Tensor] = {}
        self._sent: set[str] = set()
        self._probed: set[str] = set()
        self.dropped = 0
        self._warn_once = LogOnce("dropped")
        """Rounds that all workers dropped because somebody's values were not finite."""
        self._in_a_row = 0

    @property
    def must_agree(self) -> bool:
        """Whether there are no scales to carry over: workers must settle them before they send."""
        return len(self._scales) < len(self._of)

    # ---------------------------------------------------------------------------------------------------- sending

    def probe(self, slot: str, x: Tensor, *, seed: int) -> Tensor:
        """Begin a round of a slot: the scales of its blocks. The same seed for all workers."""
        self._probed.add(slot)
        return self._of[slot].probe(slot, x, seed=seed)

    def message(self, slot: str, x: Tensor, *, seed: int) -> Frame:
        """Begin and end it, on scales that are carried over."""
        probe = self.probe(slot, x, seed=seed)
        carried = self._of[slot].summing.carry(self._scales[slot])
        return self.settled(slot, probe, carried, seed=seed)

    def settled(self, slot: str, probe: Tensor, agreed: Tensor, *, seed: int) -> Frame:
        """End it on scales that were agreed on."""
        one, summand = self._of[slot], None
        if one.usable(probe) and one.usable(agreed):
            summand = one.encode(slot, agreed, seed=seed)
            self._sent.add(slot)
        return pack_part(scale_frame(probe.cpu()), summand)

    def agreed(self, slot: str, frame: Frame) -> Tensor:
        """Scales of a slot as they came."""
        return _floats(read_scales(frame, self._how[slot].num_scales))

    # -------------------------------------------------------------------------------------------------- receiving

    def take(self, answer: Mapping[str, Frame]) -> dict[str, Buffer] | None:
        """The frames to decode, by slot; None when the round is dropped, by all workers alike."""
        frames: dict[str, Buffer] = {}
        usable = True
        for slot, message in answer.items():
            scales, total = unpack_part(message)
            bits = read_scales(scales, self._how[slot].num_scales)
            if bits.numel() and int(bits.max()) >= UNUSABLE:
                usable = False  # of this slot the scales stay what they were
                continue
            self._scales[slot] = _floats(bits)
            if total is not None:
                frames[slot] = total
        if usable and len(frames) == len(answer):
            self._forget_round()
            self._in_a_row = 0
            return frames
        self._drop()
        return None

    def _drop(self) -> None:
        for slot in self._probed:
            if slot in self._sent:
                self._of[slot].undo(slot)
            else:
                self._of[slot].skip(slot)
        self._forget_round()
        self.dropped += 1
        self._in_a_row += 1
        if self._in_a_row >= MOST_DROPPED:
            raise NonFiniteError(
                f"for {self._in_a_row} rounds values of some worker were not finite: take a smaller --lr"
            )
        self._warn_once("nonfinite", "a value of some worker is not finite: all workers drop this round and continue")

    def _forget_round(self) -> None:
        self._sent, self._probed = set(), set()

    # ------------------------------------------------------------------------------------------------------ memory

    def forget(self, slots: Sequence[str], why: str) -> None:
        """Begin what these slots have yet to send anew. Scales stay: they are the others', too."""
        for one in self._contributors:
            one.forget([slot for slot in slots if self._of[slot] is one], why)

    @property
    def residual_resets(self) -> int:
        return sum(one.stats.residual_resets for one in self._contributors)

    def state_dict(self) -> dict[str, Tensor]:
        """Residuals and scales."""
        tensors = {f"scales/{slot}": x for slot, x in self._scales.items()}
        for one in self._contributors:
            tensors |= {f"residual/{name}": x for name, x in one.state_dict().items()}
        return tensors

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace all by what was saved."""
        parts: dict[str, dict[str, Tensor]] = {"scales": {}, "residual": {}}
        for key, x in state.items():
            part, _, name = key.partition("/")
            parts[part][name] = x
        for one in self._contributors:
            mine = {name: x for name, x in parts["residual"].items() if self._of.get(name.rpartition("/")[0]) is one}
            one.load_state_dict(mine)
        self._scales = parts["scales"]
        self._forget_round()

    def begin_again(self, frames: Sequence[Frame], *, empty: bool) -> None:
        """Go on where the others do, with the scales that a server tells; with an empty memory or one's own."""
        if empty:
            self.load_state_dict({})
        self._forget_round()
        self.load_scales(frames)

    def load_scales(self, frames: Sequence[Frame]) -> None:
        """What a server says that the others go on with; nothing for a slot where it is unusable."""
        found = {}
        for how, frame in zip(self._how.values(), frames, strict=True):
            bits = read_scales(frame, how.num_scales)
            if not bits.numel() or int(bits.max()) < UNUSABLE:
                found[how.name] = _floats(bits)
        self._scales = found


def scale_frame(probe: Tensor) -> bytes:
    return encode(probe, "none")


def _floats(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)
