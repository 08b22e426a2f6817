"""SlotNames: names for the tensors of torchft's all-reduces, which come without any.

A residual belongs to a name, so names must mean the same tensor in every step and on all replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import ConfigError

__all__ = ["SlotNames"]

Layout = list[tuple[str, torch.Size]]
"""Names and shapes of the gradients in a DDP bucket, in the order of its memory."""


class SlotNames:
    """Names by DDP bucket, by fragment of DiLoCo, or by order, shape and dtype within a step."""

    def __init__(self) -> None:
        self._buckets: list[Layout] = []
        self._next_bucket = 0
        self._prefix, self._given = "", list[str]()
        self._calls = 0

    def begin_step(self) -> None:
        """Count from the first all-reduce of a step again."""
        self._next_bucket = self._calls = 0

    def use_ddp(self, module: DistributedDataParallel) -> None:
        """Name the gradients in the buckets of torchft's DDP module, which never change, by their parameters."""
        names = {id(parameter): name for name, parameter in module.module.named_parameters()}
        self._buckets = []
        for bucket in module.reducer._get_zeros_like_grad_buckets():
            gradients = [_in_memory_order(gradient) for gradient in bucket.gradients()]
            layout = [
                (names[id(parameter)], gradient.shape)
                for parameter, gradient in zip(bucket.parameters(), gradients, strict=True)
            ]
            if sum(shape.numel() for _, shape in layout) != bucket.buffer().numel():  # complex parameters
                layout = [(f"bucket{bucket.index()}", torch.Size((1, bucket.buffer().numel())))]
            self._buckets.append(layout)

    def slots(self, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Return the named parts of the next tensor of this step, as views of it."""
        bucket = self._buckets[self._next_bucket % len(self._buckets)] if self._buckets else []
        if bucket and tensor.dim() == 1 and tensor.numel() == sum(shape.numel() for _, shape in bucket):
            self._next_bucket += 1
            parts = torch.split(tensor, [shape.numel() for _, shape in bucket])
            return [(name, part.view(shape)) for (name, shape), part in zip(bucket, parts, strict=True)]
        call, self._calls = self._calls, self._calls + 1
        if call < len(self._given):
            return [(f"{self._prefix}.{self._given[call]}", tensor)]
        # A flat tensor without a name is a buffer of many: the exemption of one-dimensional tensors is not for it.
        flat = tensor.view(1, -1) if tensor.dim() == 1 and tensor.is_contiguous() else tensor
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        return [(f"{self._prefix or 'tensor'}[{call}]:{shape}:{str(tensor.dtype).removeprefix('torch.')}", flat)]

    @contextmanager
    def fragment(self, prefix: str, names: Sequence[str]) -> Iterator[None]:
        """Name the next all-reduces by a fragment of the model, and by its parameters if there is one for each."""
        self._prefix, self._given, self._calls = prefix, list(names), 0
        try:
            yield
        finally:
            self._prefix, self._given, self._calls = "", [], 0


def fragments_of(source: Any) -> list[Any]:
    """Return the fragments of a torchft DiLoCo; an empty list for anything else."""
    fragments = getattr(source, "_fragments", None)
    valid = isinstance(fragments, list) and all(hasattr(each, "prepare_sync") for each in fragments)
    return fragments if valid and fragments is not None else []


def require_supported(source: Any) -> None:
    """Raise ``ConfigError`` unless names can be taken from a DDP module or from DiLoCo."""
    if isinstance(source, DistributedDataParallel) or fragments_of(source):
        return
    if type(source).__name__ == "LocalSGD":
        raise ConfigError(
            "names must be a torchft DDP module or a DiLoCo, got a LocalSGD: it averages parameters, which a lossy "
            "codec would damage. Use DiLoCo with the outer optimizer torch.optim.SGD(…, lr=1.0): the same mean, as "
            "changes"
        )
    raise ConfigError(f"names must be a torchft DistributedDataParallel or DiLoCo, got {type(source).__name__}")


def _in_memory_order(gradient: Tensor) -> Tensor:
    if gradient.is_contiguous():
        return gradient
    return gradient.permute(sorted(range(gradient.dim()), key=gradient.stride, reverse=True))
