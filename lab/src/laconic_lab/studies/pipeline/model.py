"""A GPT cut into stages, and the boundaries between them in one process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn

from laconic.errors import ConfigError
from laconic.packet import TensorSpec
from laconic.pipeline.ends import make_receiver, make_sender
from laconic.pipeline.messages import Position, Receiver, Sender
from laconic.train.models import GPT, GPTConfig, seeded

__all__ = ["SIZES", "Boundary", "GPTStage", "build_stages", "chain", "stages_of"]

SIZES: Final = {
    "small": GPTConfig(context=64, width=64, layers=4, heads=4),
    "1m": GPTConfig(),
    "7m": GPTConfig(context=256, width=384, layers=4, heads=6),
}


class GPTStage(nn.Module):
    """Consecutive blocks of a GPT; the first stage embeds bytes, the last one returns logits.

    Args:
        index, count: Which stage of how many.
        bottleneck: Width to which a trained matrix projects activations before they are sent; 0: all of it.
        reads_tokens: Whether a later stage embeds the bytes, too, and adds that to what it receives. A rank of a
            pipeline reads them like the targets (``schedule.step(tokens=…)``), so they cost no message.
    """

    def __init__(self, gpt: GPT, index: int, count: int, bottleneck: int = 0, *, reads_tokens: bool = False) -> None:
        super().__init__()
        config = gpt.config
        width, layers = config.width, config.layers
        if not 1 <= count <= layers:
            raise ConfigError(f"a GPT of {layers} layers has 1 to {layers} stages, got {count}")
        first, last = index == 0, index == count - 1
        self.first, self.reads_tokens = first, reads_tokens and not first
        self.embedding = gpt.embedding if first else nn.Embedding(config.vocabulary, width) if reads_tokens else None
        self.position = gpt.position if first else nn.Embedding(config.context, width) if reads_tokens else None
        self.blocks = gpt.blocks[layers * index // count : layers * (index + 1) // count]
        self.norm = gpt.norm if last else None
        self.head = gpt.head if last else None
        self.up = nn.Linear(bottleneck, width, bias=False) if bottleneck and not first else None
        self.down = nn.Linear(width, bottleneck, bias=False) if bottleneck and not last else None
        for layer in (self.up, self.down):
            if layer is not None:
                nn.init.orthogonal_(layer.weight)

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        embedded = None
        if self.embedding is not None and self.position is not None:
            known = tokens if self.reads_tokens else x
            assert known is not None
            embedded = self.embedding(known) + self.position.weight[: known.shape[1]]
        if self.first:
            assert embedded is not None
            x = embedded
        else:
            x = x if self.up is None else self.up(x)
            x = x if embedded is None else x + embedded
        x = self.blocks(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x if self.down is None else self.down(x)


def stages_of(gpt: GPT, count: int, bottleneck: int = 0, *, reads_tokens: bool = False) -> list[GPTStage]:
    """Cut a GPT into stages, which share its parameters.

    At first the two matrices of a bottleneck project onto a common subspace, and a stage that reads the tokens adds
    what their embedding has outside of it: only what the blocks have added outside of it is lost.
    """
    stages = [GPTStage(gpt, index, count, bottleneck, reads_tokens=reads_tokens) for index in range(count)]
    for before, after in pairwise(stages):
        if before.down is None or after.up is None:
            continue
        with torch.no_grad():
            subspace = before.down.weight
            after.up.weight.copy_(subspace.T)
            for ours, first in ((after.embedding, gpt.embedding), (after.position, gpt.position)):
                if ours is not None:
                    ours.weight.copy_(first.weight - first.weight @ subspace.T @ subspace)
    return stages


def build_stages(
    size: str, count: int, seed: int, bottleneck: int = 0, *, reads_tokens: bool = False
) -> list[GPTStage]:
    """Build the stages of a GPT whose weights depend on the seed alone."""
    if size not in SIZES:
        raise ConfigError(f"size must be one of {', '.join(SIZES)}, got {size!r}")
    with seeded(seed):
        return stages_of(GPT(SIZES[size]), count, bottleneck, reads_tokens=reads_tokens)


class Boundary:
    """What a stage and the next one send each other, in one process.

    The messages are those of ``laconic.pipeline.compress`` where each stage has the rank of its index.
    """

    def __init__(self, stage: int, forward: str, backward: str, delta: bool) -> None:
        self.forward_sender = make_sender(forward, "forward", stage, seed=stage, delta=delta, error_every=20)
        self.forward_receiver = make_receiver(forward, "forward", stage + 1, delta=delta)
        self.backward_sender = make_sender(backward, "backward", stage + 1, seed=stage + 1, error_every=20)
        self.backward_receiver = make_receiver(backward, "backward", stage)

    def cross(self, x: Tensor, micro_batch: int, sample: int | None = None) -> Tensor:
        """Return the activations that the next stage receives; backward, the gradient that this stage receives."""
        crossed: Tensor = _Cross.apply(x, self, Position(micro_batch, 0), sample)  # type: ignore[no-untyped-call]
        return crossed

    def evaluate(self, x: Tensor) -> Tensor:
        """Return activations as they are received in an evaluation."""
        return _sent(self.forward_sender, self.forward_receiver, x, Position(0, 0), None, training=False)


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, boundary: Boundary, position: Position, sample: int | None) -> Tensor:
        ctx.boundary, ctx.position = boundary, position
        return _sent(boundary.forward_sender, boundary.forward_receiver, x, position, sample)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        boundary = ctx.boundary
        received = _sent(boundary.backward_sender, boundary.backward_receiver, gradients[0], ctx.position, None)
        return received, None, None, None


def _sent(
    sender: Sender, receiver: Receiver, x: Tensor, position: Position, sample: int | None, *, training: bool = True
) -> Tensor:
    receiver.expected_nbytes(TensorSpec.of(x), position, training=training)
    message = sender.message(x, position, sample=sample, training=training)
    if message is None:
        return x.clone()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    receiver.read(message, out, position, sample=sample, training=training)
    return out


def chain(stages: Sequence[nn.Module], boundaries: Sequence[Boundary], x: Tensor) -> Tensor:
    """Return the output of all stages as in an evaluation of the pipeline; without boundaries, uncompressed."""
    tokens = x
    for number, stage in enumerate(stages):
        x = stage(x, tokens)
        if number < len(boundaries):
            x = boundaries[number].evaluate(x)
    return x
