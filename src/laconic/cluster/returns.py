"""What a server sends back: ``weights``, ``delta``, ``gradients`` or ``sum``, one object each.

A job chooses its object once (``Job.reply_kind``). The object knows what follows from the choice: which side runs the
optimizer, how large frames can be, and how an update becomes frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from laconic.channels import Channel
from laconic.cluster.homomorphic.server import check_summable, message_limit
from laconic.codecs import parse
from laconic.errors import ConfigError
from laconic.frames import decode, max_nbytes
from laconic.policy import Policy

if TYPE_CHECKING:
    from laconic.cluster.job import Job
    from laconic.cluster.protocol import Frame
    from laconic.cluster.weights import Weights

__all__ = ["REPLY_KINDS", "Combined", "ReplyKind"]


class Combined(Protocol):
    """The combined pushes of a round."""

    def result(self) -> dict[str, Tensor]: ...
    def frames(self) -> Sequence[Frame] | None:
        """Return the pushed frames if the result is one worker's push, else None."""
        ...


class ReplyKind:
    """Facts and methods that depend on what the server sends back."""

    server_has_weights = True
    """Whether the server holds the weights of every version and runs the optimizer."""
    workers_step = False
    """Whether workers run the optimizer."""
    is_weights = False
    """Whether a reply holds the weights, so that a worker that missed updates can continue with it."""
    is_change = False
    """Whether a reply changes the weights that a worker holds: it cannot be made a second time."""

    def check(self, job: Job) -> None:
        """Raise ``ConfigError`` if the job's other options do not allow this kind."""

    def pull_channel(self, job: Job) -> Channel:
        return Channel(job.pull, policy=Policy(small=job.pull_small))

    def push_limits(self, job: Job, tensors: Iterable[Tensor]) -> list[int]:
        """Return the largest possible frame of each slot that a worker pushes, in bytes."""
        return _frame_limits((job.push, job.push_small), tensors)

    def pull_limits(self, job: Job, tensors: Iterable[Tensor]) -> list[int]:
        """Return the largest possible frame of each slot in a reply or an uncompressed snapshot, in bytes."""
        return _frame_limits((job.pull, job.pull_small), tensors)

    def workers_differ(self, job: Job) -> bool:
        """Whether workers of a synchronous job hold other weights than the server, because the pull is lossy."""
        return False

    def update(self, weights: Weights, combined: Combined) -> Iterator[Sequence[Frame]]:
        """Apply a round and yield the reply slot by slot. Frames leave while later ones are encoded.

        A frame may be in parts, and is valid until the next one is requested.
        """
        raise NotImplementedError

    def reply(self, weights: Weights, held: dict[str, Tensor], channel: Channel) -> Iterator[bytes]:
        """Yield the reply to one worker of a job without rounds; ``held`` are the weights that this worker holds."""
        raise NotImplementedError


class ReturnWeights(ReplyKind):
    """The server sends its weights."""

    is_weights = True

    def workers_differ(self, job: Job) -> bool:
        return any(parse(spec)[1].text != "none" for spec in (job.pull, job.pull_small))

    def update(self, weights: Weights, combined: Combined) -> Iterator[Sequence[Frame]]:
        update = combined.result()
        for portion in weights.portions:  # the first ones leave while the others are updated
            weights.step({name: update[name] for _, name in portion})
            for slot, name in portion:
                x = weights.parameters[name]
                if weights.held:
                    frame = weights.encode_slot(slot, name, x)
                    weights.held[name].copy_(decode(frame, device=x.device))
                    yield (frame,)
                else:
                    yield weights.encode_parts(slot, name, x)

    def reply(self, weights: Weights, held: dict[str, Tensor], channel: Channel) -> Iterator[bytes]:
        return (weights.encode_slot(slot, name, x) for slot, (name, x) in enumerate(weights.parameters.items()))


class ReturnDelta(ReplyKind):
    """The server sends how its weights differ from those that workers hold."""

    is_change = True

    def pull_channel(self, job: Job) -> Channel:
        # The next difference contains what a lossy codec did not send: a residual would send it twice.
        pull, small = (parse(spec)[1].text for spec in (job.pull, job.pull_small))
        return Channel(pull, policy=Policy(small=small))

    def workers_differ(self, job: Job) -> bool:
        return True

    def update(self, weights: Weights, combined: Combined) -> Iterator[Sequence[Frame]]:
        weights.step(combined.result())
        yield from ((frame,) for frame in self.reply(weights, weights.held, weights.channel))

    def reply(self, weights: Weights, held: dict[str, Tensor], channel: Channel) -> Iterator[bytes]:
        return (weights.encode_difference(slot, name, held, channel) for slot, name in enumerate(weights.parameters))


class ReturnGradients(ReplyKind):
    """The server sends the combined gradient; server and workers take the same step by it."""

    workers_step = True

    def check(self, job: Job) -> None:
        if not job.update_mode.in_rounds:
            raise ConfigError("returns=gradients needs mode sync: each worker would take other steps than the server")

    def update(self, weights: Weights, combined: Combined) -> Iterator[Sequence[Frame]]:
        pushed = combined.frames()
        if pushed is not None:  # one worker's push goes to all workers without a second loss
            weights.step(combined.result())
            yield from ((frame,) for frame in pushed)
            return
        frames = {}
        for slot, (name, x) in enumerate(combined.result().items()):
            frames[name] = weights.encode_slot(slot, name, x)
            yield (frames[name],)
        weights.step_frames(frames)  # like the workers: by the decoded frames, not by the mean they were made of


class ReturnSum(ReplyKind):
    """The server adds compressed pushes and sends the sum; workers hold the weights."""

    server_has_weights = False
    workers_step = True

    def check(self, job: Job) -> None:
        if not job.update_mode.in_rounds:
            raise ConfigError(f"returns=sum needs mode sync, because a sum is that of a round, got {job.mode!r}")
        if job.after != "mean":
            raise ConfigError(f"returns=sum needs after=mean, because workers get a sum, got {job.after!r}")
        if (job.pull, job.pull_small) != ("none", "none"):
            raise ConfigError(
                f"returns=sum needs pull=none and pull_small=none, because the sum of the pushes is sent back, got "
                f"{job.pull!r} and {job.pull_small!r}"
            )
        for spec in (job.push, job.push_small):
            check_summable(spec, job.workers)

    def push_limits(self, job: Job, tensors: Iterable[Tensor]) -> list[int]:
        return [message_limit(x) for x in tensors]

    def pull_limits(self, job: Job, tensors: Iterable[Tensor]) -> list[int]:
        return [message_limit(x) for x in tensors]


REPLY_KINDS: Mapping[str, ReplyKind] = {
    "weights": ReturnWeights(), "gradients": ReturnGradients(), "delta": ReturnDelta(), "sum": ReturnSum(),
}  # fmt: skip


def _frame_limits(specs: Iterable[str], tensors: Iterable[Tensor]) -> list[int]:
    codecs = [parse("none")[1], *(parse(spec)[1] for spec in specs)]
    return [max(max_nbytes(codec, x) for codec in codecs) for x in tensors]
