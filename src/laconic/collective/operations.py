"""Collectives of one tensor by a codec, in the form of torch's own functions. They have no memory between calls."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.codecs import parse
from laconic.collective.collectives import Collectives, Op
from laconic.collective.exchange import EXACT
from laconic.collective.point_to_point import PointToPoint
from laconic.collective.work import CodecWork
from laconic.errors import ConfigError
from laconic.policy import Policy

__all__ = ["all_gather", "all_reduce", "recv", "reduce_scatter", "send"]

_COMPRESS_ALL = Policy(min_numel=0, exempt_1d=False)


def all_reduce(
    tensor: Tensor, spec: str, group: dist.ProcessGroup | None = None, *, op: Op = "mean", seed: int = 0,
    nonfinite: str = "spread", async_op: bool = False,
) -> CodecWork | None:  # fmt: skip
    """Replace a tensor by its mean or sum over the ranks of a group, the same bits on each.

    Args:
        tensor: A float tensor of any shape and stride.
        spec: Any codec without memory: ``qsgd:4``, ``thc:4``, ``topk:0.01``; ``none`` is torch's own all-reduce. In a
            training loop use ``Collectives``, which can keep residuals and compares the arguments of ranks only once.
        group: The ranks; all of them by default.
        op: ``mean`` or ``sum``.
        seed: The same on all ranks. Use another one in each call, so that stochastic rounding differs.
        nonfinite: ``spread`` (NaN), ``skip`` (leave out the contribution) or ``raise`` if a value is not finite.
        async_op: Return at once a ``Work`` to wait for.
    """
    return _once("all_reduce", spec, group, seed, nonfinite).all_reduce([("", tensor)], op=op, async_op=async_op)


def reduce_scatter(
    output: Tensor, input: Tensor, spec: str, group: dist.ProcessGroup | None = None, *, op: Op = "mean",  # noqa: A002
    seed: int = 0, nonfinite: str = "spread", async_op: bool = False,
) -> CodecWork | None:  # fmt: skip
    """Write this rank's shard of the input's mean or sum over ranks to the output.

    Args:
        output: A shard, such as (n, m).
        input: The shards of all ranks in their order: (ranks * n, m) or (ranks, n, m). It is not changed.
        spec, group, op, seed, nonfinite, async_op: See ``all_reduce``.
    """
    return _once("reduce_scatter", spec, group, seed, nonfinite).reduce_scatter(
        [("", output, input)], op=op, async_op=async_op
    )


def all_gather(
    output: Tensor, input: Tensor, spec: str, group: dist.ProcessGroup | None = None, *, seed: int = 0,  # noqa: A002
    nonfinite: str = "spread", async_op: bool = False,
) -> CodecWork | None:  # fmt: skip
    """Write the inputs of all ranks to the output, the same bits on all ranks, this rank's own shard included.

    Args:
        output: The shards of all ranks in their order: (ranks * n, m) or (ranks, n, m).
        input: A shard, such as (n, m).
        spec, group, seed, nonfinite, async_op: See ``all_reduce``.
    """
    return _once("all_gather", spec, group, seed, nonfinite).all_gather([("", output, input)], async_op=async_op)


def send(
    tensor: Tensor, dst: int, spec: str, group: dist.ProcessGroup | None = None, *, seed: int = 0,
    nonfinite: str = "spread", async_op: bool = False,
) -> dist.Work | None:  # fmt: skip
    """Send a tensor to a rank, which receives it by ``recv``.

    Args:
        tensor: A float tensor of any shape and stride.
        dst: The receiver's global rank, as in torch.
        spec, group, seed, nonfinite, async_op: See ``all_reduce``. Only the two ranks take part, so their specs are
            compared when the message arrives.
    """
    _require_no_memory(spec)
    messages = PointToPoint(spec, group, policy=_COMPRESS_ALL, nonfinite=nonfinite, seed=seed)
    return messages.send([("", tensor)], dst, async_op=async_op)


def recv(
    tensor: Tensor, src: int, spec: str, group: dist.ProcessGroup | None = None, *, nonfinite: str = "spread",
    async_op: bool = False,
) -> dist.Work | None:  # fmt: skip
    """Replace a tensor by the one that a rank sends by ``send``, of the same shape and dtype.

    Args:
        src: The sender's global rank, as in torch.
        spec, group, nonfinite, async_op: See ``all_reduce``.
    """
    _require_no_memory(spec)
    messages = PointToPoint(spec, group, policy=_COMPRESS_ALL, nonfinite=nonfinite)
    return messages.recv([("", tensor)], src, async_op=async_op)


def _require_no_memory(spec: str) -> None:
    if parse(spec)[0]:
        raise ConfigError(
            f"{spec!r} keeps memory between calls, which a function does not have: use Collectives or PointToPoint"
        )


def _once(call: str, spec: str, group: dist.ProcessGroup | None, seed: int, nonfinite: str) -> Collectives:
    _require_no_memory(spec)
    collectives = Collectives(spec, group, policy=_COMPRESS_ALL, nonfinite=nonfinite)
    rounds = {} if spec == EXACT else {f"{call}/{spec}///round": torch.tensor(seed)}
    collectives.load_state_dict(collectives.state_dict() | rounds)
    return collectives
