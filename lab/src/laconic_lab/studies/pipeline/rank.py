"""One rank of the step times: a program whose argument is JSON. Rank 0 prints a line of JSON for each task."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from laconic.packet import TensorSpec
from laconic.pipeline import compress
from laconic.pipeline.transform import layout_of, transform_bits
from laconic_lab.network.paced_sockets import paced_bytes
from laconic_lab.studies.pipeline.model import SIZES, build_stages

__all__ = ["main"]

WARMUP = 2
"""Steps that are not timed: torch prepares buffers in the first. Transform coding has more, until it has a basis."""


class _Pause(torch.autograd.Function):
    """Returns its input; forward takes some time, and backward twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Stand(nn.Module):
    """A stage whose computing is a pause."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.scale, self.seconds = nn.Parameter(torch.ones(width)), seconds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Pause.apply(x * self.scale, self.seconds)  # type: ignore[no-untyped-call]
        return y


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank, ranks = int(options["rank"]), int(options["ranks"])
    dist.init_process_group("gloo", init_method=options["store"], rank=rank, world_size=ranks)
    for task in options["tasks"]:
        result = measure(task, options["models"][task["model"]], int(options["micro_batches"]), rank, ranks)
        if rank == 0:
            print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure(task: dict[str, Any], model: dict[str, Any], micro_batches: int, rank: int, ranks: int) -> dict[str, Any]:
    """Return the seconds of each step, from barrier to barrier, and the bytes of all ranks a step."""
    generator, windows = torch.Generator().manual_seed(0), int(model["windows"])
    total = windows * micro_batches
    if "pause_s" in model:
        module: nn.Module = Stand(int(model["width"]), 2 * float(model["pause_s"]) / ranks)
        x = torch.randn(total, int(model["context"]), int(model["width"]), generator=generator)
        target = torch.zeros(total, 1)
        activations = TensorSpec((windows, *x.shape[1:]), torch.float32)
        loss = lambda y, _: y.square().mean()  # noqa: E731
    else:
        module = build_stages(str(model["size"]), ranks, 0)[rank]
        text = torch.randint(256, (total, SIZES[str(model["size"])].context + 1), generator=generator)
        x, target = text[:, :-1], text[:, 1:]
        activations = TensorSpec((windows, x.shape[1], SIZES[str(model["size"])].width), torch.float32)
        loss = lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten())  # noqa: E731
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
    compression = compress(stage, task["codec"], task["codec"])
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=loss)
    seconds, sent, coded = [], 0, torch.zeros(2, dtype=torch.float64)
    warm_up = WARMUP + _steps_without_basis(task["codec"], activations, micro_batches)
    for step in range(warm_up + int(task["steps"])):
        module.zero_grad()
        dist.barrier()
        stats = compression.stats()
        before, coded_before, began = _bytes(stats), _coding_s(stats), time.perf_counter()
        at_socket = paced_bytes()
        schedule.step(*((x,) if rank == 0 else ()), target=target if rank == ranks - 1 else None)
        mine = time.perf_counter() - began
        dist.barrier()
        if step >= warm_up:
            seconds.append(mine)
            stats = compression.stats()
            sent = _bytes(stats) - before
            coded += _coding_s(stats) - coded_before
    figures = torch.tensor([
        float(sent), float(-1 if at_socket is None else (paced_bytes() or 0) - at_socket),
        *(coded / len(seconds)).tolist(),
    ], dtype=torch.float64)  # fmt: skip
    dist.all_reduce(figures)
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    sent_nbytes, socket_nbytes, encode_s, decode_s = figures.tolist()
    return {
        "seconds": slowest.tolist(), "sent_nbytes": sent_nbytes,
        "socket_nbytes": None if at_socket is None else socket_nbytes, "encode_s": encode_s, "decode_s": decode_s,
    }  # fmt: skip


def _steps_without_basis(codec: str, activations: TensorSpec, micro_batches: int) -> int:
    """Return in how many steps transform coding has no basis yet; 0 for other codecs."""
    bits = transform_bits(codec)
    layout = "" if bits is None else layout_of(bits, activations)
    return 0 if isinstance(layout, str) else math.ceil(2 * layout.period / micro_batches)


def _bytes(stats: dict[str, Any]) -> int:
    return sum(int(stats[way]["bytes_sent"]) for way in ("forward", "backward"))


def _coding_s(stats: dict[str, Any]) -> Tensor:
    """Return the seconds of encoding and of decoding so far."""
    totals = [sum(stats[way][name] for way in ("forward", "backward")) for name in ("encode_s", "decode_s")]
    return torch.tensor(totals, dtype=torch.float64)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    os.environ["GLOO_SOCKET_IFNAME"] = given["interface"]
    main(given)
