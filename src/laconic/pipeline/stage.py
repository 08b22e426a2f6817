"""compress: one line that makes a pipeline stage send its activations and gradients compressed.

torch offers no hook, so five methods of the stage object are replaced: those that list what is sent and received, and
those that hand received tensors to the stage's module. Schedules call no others to move tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.stage import _PipelineStageBase

from laconic.errors import ConfigError, InputError, NonFiniteError
from laconic.packet import TensorSpec
from laconic.pipeline.messages import NONFINITE, Position
from laconic.pipeline.neighbours import Neighbours
from laconic.pipeline.traffic import Arrival, Traffic, load, save

__all__ = ["StageCompression", "compress"]

log = logging.getLogger("laconic")

Operations = list[dist.P2POp]

_REPLACED = (
    "get_fwd_send_ops", "get_bwd_send_ops", "get_fwd_recv_ops", "get_bwd_recv_ops", "_retrieve_recv_activations",
    "_retrieve_recv_grads",
)  # fmt: skip
_MARK = "_laconic_compression"
RAISE_WAIT_S = 10.0
"""How long a stage that raises waits for its neighbour to receive the reason."""


class StageCompression:
    """The compressed traffic of one pipeline stage, returned by ``compress``, which describes the arguments."""

    def __init__(
        self, stage: _PipelineStageBase, forward: str, backward: str, *, delta: bool, nonfinite: str, seed: int | None,
        error_every: int, timeout_s: float,
    ) -> None:  # fmt: skip
        self.stage, self.nonfinite, self.delta = stage, nonfinite, delta
        seed = dist.get_rank() if seed is None else seed
        options: dict[str, Any] = {"seed": seed, "nonfinite": nonfinite, "error_every": error_every}
        self._forward = Traffic(forward, "forward", stage.stage_index, delta=delta, **options)
        self._backward = Traffic(backward, "backward", stage.stage_index, delta=False, **options)
        settings = {
            "forward": self._forward.sender.text, "backward": self._backward.sender.text,
            "delta": str(delta), "nonfinite": nonfinite,
        }  # fmt: skip
        self._neighbours = Neighbours(stage, settings, timeout_s)
        self._samples: list[int | str] | None = None
        self._copy_resets = 0
        self._set_up_for: object = None
        # gloo sends nothing before it knows that a receive was posted, and that notice queues behind what the other
        # rank is sending. Schedules post sends before receives, so a link would carry one direction at a time. NCCL
        # needs sends and receives in one group.
        compressed = {forward, backward} != {"none"}
        self._posts_receives = compressed and dist.get_backend(stage.group) == "gloo"
        self._original: dict[str, Callable[..., Any]] = {name: getattr(stage, name) for name in _REPLACED}
        for name, method in zip(_REPLACED, (
            self._forward_sends, self._backward_sends, self._forward_receives, self._backward_receives,
            self._activations, self._gradients,
        ), strict=True):  # fmt: skip
            setattr(stage, name, method)
        setattr(stage, _MARK, self)

    def __repr__(self) -> str:
        codecs = f"forward={self._forward.sender.text!r}, backward={self._backward.sender.text!r}"
        return f"StageCompression(stage {self.stage.stage_index} of {self.stage.num_stages}, {codecs})"

    # ---------------------------------------------------------------------------------------- methods of the stage

    def _forward_sends(self, chunk: int) -> Operations:
        return self._sends(self._forward, chunk, self._original["get_fwd_send_ops"](chunk))

    def _backward_sends(self, chunk: int) -> Operations:
        return self._sends(self._backward, chunk, self._original["get_bwd_send_ops"](chunk))

    def _forward_receives(self, chunk: int) -> Operations:
        return self._receives(self._forward, chunk, self._original["get_fwd_recv_ops"](chunk))

    def _backward_receives(self, chunk: int) -> Operations:
        return self._receives(self._backward, chunk, self._original["get_bwd_recv_ops"](chunk))

    def _activations(self, chunk: int) -> Any:
        self._decode(self._forward, chunk)
        return self._original["_retrieve_recv_activations"](chunk)

    def _gradients(self, chunk: int) -> Any:
        self._decode(self._backward, chunk)
        return self._original["_retrieve_recv_grads"](chunk)

    # ------------------------------------------------------------------------------------------------------ traffic

    def _sends(self, traffic: Traffic, chunk: int, operations: Operations) -> Operations:
        if operations:
            self._neighbours.compare()
        sending = []
        for number, operation in enumerate(operations):
            x = operation.tensor
            self._check_shape(traffic, number, x)
            nonfinite = traffic.stats.nonfinite
            message = traffic.sender.message(
                x, Position(chunk, number), sample=self._sample(chunk), training=self.stage.has_backward
            )
            if message is None:
                sending.append(operation)
                continue
            sending.append(_with_tensor(operation, message))
            if self.nonfinite == "raise" and traffic.stats.nonfinite > nonfinite:
                self._raise_nonfinite(traffic, chunk, sending)
        return sending

    def _raise_nonfinite(self, traffic: Traffic, chunk: int, sending: Operations) -> None:
        with suppress(RuntimeError):  # the neighbour raises, too, if it still receives
            for operation in sending:
                work = dist.isend(operation.tensor, group=operation.group, group_dst=operation.group_peer)
                if work is not None:
                    work.wait(timedelta(seconds=RAISE_WAIT_S))
        raise NonFiniteError(
            f"stage {self.stage.stage_index}, micro-batch {chunk}: a tensor sent {traffic.direction} holds a NaN or an "
            "infinity. Find where it arises, or drop it with nonfinite='skip'"
        )

    def _receives(self, traffic: Traffic, chunk: int, operations: Operations) -> Operations:
        if operations:
            self._neighbours.compare()
        receiving: Operations = []
        arriving: list[Arrival] = []
        for number, operation in enumerate(operations):
            out, receiver, message = operation.tensor, traffic.receiver, None
            position = Position(chunk, number)
            nbytes = receiver.expected_nbytes(TensorSpec.of(out), position, training=self.stage.has_backward)
            if not isinstance(nbytes, str):
                message = torch.empty(nbytes, dtype=torch.uint8, device=out.device)
                operation = _with_tensor(operation, message)
            traffic.stats.bytes_received += operation.tensor.numel() * operation.tensor.element_size()
            work = None
            if self._posts_receives:
                work = dist.irecv(
                    operation.tensor, group=operation.group, tag=operation.tag, group_src=operation.group_peer
                )
            else:
                receiving.append(operation)
            if message is not None or work is not None:
                arriving.append(Arrival(position, message, out, work))
        if arriving:
            traffic.arriving[chunk] = arriving
        return receiving

    def _decode(self, traffic: Traffic, chunk: int) -> None:
        for position, message, out, work in traffic.arriving.pop(chunk, ()):
            if work is not None:
                work.wait()
            if message is not None:
                sample, training = self._sample(chunk), self.stage.has_backward
                traffic.receiver.read(message, out, position, sample=sample, training=training)

    def _sample(self, chunk: int) -> int | str | None:
        return None if self._samples is None else self._samples[chunk]

    def _check_shape(self, traffic: Traffic, number: int, x: Tensor) -> None:
        """Raise if a tensor does not fit the buffers of the receiver, which torch makes in the first step."""
        if self.stage.act_send_info is not self._set_up_for:  # torch has made new buffers on all stages
            self._set_up_for = self.stage.act_send_info
            self._forward.shapes.clear()
            self._backward.shapes.clear()
        spec = TensorSpec.of(x)
        expected = traffic.shapes.setdefault(number, spec)
        if spec != expected:
            raise InputError(
                f"stage {self.stage.stage_index}: tensor {number} sent {traffic.direction} has shape "
                f"{list(spec.shape)} of {spec.dtype}, but the receiver's buffer was made for {list(expected.shape)} of "
                f"{expected.dtype}. torch's pipelines need equal micro-batches in all steps: drop a shorter last batch"
            )

    # ----------------------------------------------------------------------------------------------------- controls

    def use_samples(self, samples: Sequence[int | str] | None) -> None:
        """Name the samples of the next step's micro-batches, for ``delta``. All stages call it alike before each step.

        Args:
            samples: A number or text for each micro-batch, which must stand for the same examples in every step. None:
                the number of the micro-batch, for batches that never change.
        """
        if samples is None:
            self._samples = None
            return
        if not self.delta:
            raise ConfigError("use_samples needs delta=True: without it no copies are kept")
        names = list(samples)
        if not all(isinstance(name, int | str) and not isinstance(name, bool) for name in names):
            raise ConfigError(f"samples must be numbers or texts, got {names!r:.100}")
        if len(set(names)) < len(names):
            raise ConfigError(f"samples must differ within a step, got {names!r:.100}")
        self._samples = names

    def stats(self) -> dict[str, Any]:
        """Return the counts of both directions so far: ``{"forward": {"bytes_sent": …}, "backward": …}``.

        Bytes are those of the tensors that this stage handed to ``torch.distributed``, or received from it. A direction
        counts what it sends: activations are sent forward, gradients backward.
        """
        counts: dict[str, Any] = {
            traffic.direction: {"codec": traffic.sender.text, **asdict(traffic.stats)}
            for traffic in (self._forward, self._backward)
        }
        copies = [end.copies for end in (self._forward.sender, self._forward.receiver) if end.copies is not None]
        return counts | {"copies_nbytes": sum(each.nbytes for each in copies), "copy_resets": self._copy_resets}

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the next step depends on: counts for rounding, the copies of ``delta``, the bases of ``klt``."""
        return {"stage": self._stage_and_count(), **save(self._forward), **save(self._backward)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved state; all stages load that of the same step. An invalid state changes nothing.

        Copies and bases of another stage or number of stages are dropped, which is logged and counted. With ``klt`` the
        next step compares the states of all stages, and raises ``ConfigError`` if they do not belong to one step.
        """
        where = state.get("stage") if isinstance(state, Mapping) else None
        if not isinstance(where, Tensor) or where.shape != (2,) or where.dtype != torch.int64 or where.is_meta:
            raise InputError("expected the result of StageCompression.state_dict: 'stage' must be two whole numbers")
        saved, ours = where.tolist(), self._stage_and_count().tolist()
        if saved != ours:
            self._copy_resets += 1
            log.warning("the state is that of stage %d of %d, this is stage %d of %d: it is not used", *saved, *ours)
            state = {}
        parts = {name: x for name, x in state.items() if name != "stage"}
        traffics = self._forward, self._backward
        load(parts, traffics)
        if any(True for traffic in traffics for _ in traffic.transforms()):
            self._neighbours.loaded([shared for traffic in traffics for shared in traffic.shared()])

    def _stage_and_count(self) -> Tensor:
        return torch.tensor([self.stage.stage_index, self.stage.num_stages])

    def detach(self) -> None:
        """Give the stage its own methods back. All stages of the pipeline do so between the same two steps."""
        if getattr(self.stage, _MARK, None) is self:
            for name in (*_REPLACED, _MARK):
                delattr(self.stage, name)


def _with_tensor(operation: dist.P2POp, tensor: Tensor) -> dist.P2POp:
    return dist.P2POp(operation.op, tensor, group=operation.group, tag=operation.tag, group_peer=operation.group_peer)


def compress(
    stage: _PipelineStageBase, forward: str = "thc:4", backward: str = "thc:4", *, delta: bool = False,
    nonfinite: str = "spread", seed: int | None = None, error_every: int = 0, timeout_s: float = 60.0,
) -> StageCompression:  # fmt: skip
    """Send a pipeline stage's activations forward, and their gradients backward, as frames of a codec.

    Call it for every stage of the pipeline, on all ranks, before the first step; codecs must be the same everywhere.
    Neighbouring stages compare their arguments in the first step. All schedules of torch work: GPipe, 1F1B, interleaved
    and zero-bubble ones. Tensors that are passed between two stages of one rank are not compressed.

    Args:
        stage: A ``torch.distributed.pipelining.PipelineStage``, or a stage of a traced ``pipe.build_stage``.
        forward: Codec of activations; one whose frames have a fixed size (``thc``, ``qsgd``, ``shared``, ``uniform``,
            ``sign``, ``bf16``, …), or ``klt:bits``, transform coding, which keeps a basis at both ends. ``none``
            leaves this direction to torch, bit for bit.
        backward: Codec of the gradients of activations.
        delta: Send activations as differences to what the receiver holds of the same sample (AQ-SGD); for data that is
            seen again. ``StageCompression.use_samples`` names the samples.
        nonfinite: What the receiver gets if a value is not finite: ``spread`` (NaN, so that a gradient scaler
            notices), ``skip`` (zeros) or ``raise`` (an error on both stages).
        seed: Decides all rounding; by default the rank, so that replicas of a pipeline round independently.
        error_every: Number of steps between measurements of the encoding error, for ``stats``; 0: never.
        timeout_s: How long the first step waits for the arguments of neighbouring stages, and the first one after
            ``load_state_dict`` for the states of all stages.
    """
    if not isinstance(stage, _PipelineStageBase):
        raise ConfigError(
            f"expected a torch.distributed.pipelining.PipelineStage, got {type(stage).__name__}: pass the stage "
            "before it goes to the schedule"
        )
    if nonfinite not in NONFINITE:
        raise ConfigError(f"nonfinite must be one of {', '.join(NONFINITE)}, got {nonfinite!r}")
    if isinstance(error_every, bool) or not isinstance(error_every, int) or error_every < 0:
        raise ConfigError(f"error_every must be a whole number from 0 on, got {error_every!r}")
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s must be above 0, got {timeout_s}")
    if getattr(stage, _MARK, None) is not None:
        raise ConfigError("the stage is compressed already: detach() its StageCompression first")
    return StageCompression(
        stage, forward, backward, delta=delta, nonfinite=nonfinite, seed=seed, error_every=error_every,
        timeout_s=timeout_s,
    )  # fmt: skip
