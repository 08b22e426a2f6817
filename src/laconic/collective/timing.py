"""Program of one rank that times attached DDP steps on this machine, for ``laconic calibrate``.

Rank 0 prints a JSON object: for each reduction the seconds of an exchange with almost no values, of each further slot,
and of each byte that a rank sends. Backward alone, without an exchange, is subtracted. One rank alone exchanges with
itself: then the times are those of the codecs' launches and of the backend's calls, without a network.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.collective.attaching import attach

__all__ = ["main"]

WAYS = {"twoshot": "qsgd:4", "sum": "ef|thc:4"}
"""A codec of each compressed reduction."""
PAIR, MANY = 2, 16
"""Numbers of slots just large enough to be compressed."""
WIDTH, LARGE, BATCH = 64, 1024, 8
WARM_UP = 3


def _exchange_s(layers: int, width: int, spec: str, turns: int, device: torch.device) -> float:
    """Return the seconds that the exchange adds to backward: the lower quartile, as others only ever add to it."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)), nn.Linear(width, 10)).to(device)
    ddp = DistributedDataParallel(model)
    attach(ddp, spec)
    x = torch.ones(BATCH, width, device=device)

    def seconds(exchanges: bool) -> float:
        times = []
        for _ in range(WARM_UP + turns):
            dist.barrier()
            begin = _now(device)
            with nullcontext() if exchanges else ddp.no_sync():
                torch.autograd.backward(ddp(x).sum())
            times.append(_now(device) - begin)
        return statistics.quantiles(times[WARM_UP:], n=4, method="inclusive")[0]

    return max(0.0, seconds(True) - seconds(False))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main(rank: int, ranks: int, store: str, turns: int, device: str = "cpu") -> None:
    """Time exchanges with the other ranks, which the file ``store`` brings together.

    Args:
        turns: Exchanges of each kind that count.
        device: ``cpu``, by gloo, or ``cuda``, by NCCL with a GPU for each rank.
    """
    torch.set_num_threads(1)
    where = torch.device("cpu")
    if device == "cuda":
        where = torch.device("cuda", rank)
        torch.cuda.set_device(where)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    plain, large = (_exchange_s(1, width, "none", turns, where) for width in (WIDTH, LARGE))
    sent = 2 * (max(2, ranks) - 1) / max(2, ranks)  # of a message; one rank is timed as if it sent like two
    byte_s = max(0.0, large - plain) / (sent * 4 * LARGE * LARGE)
    costs = {"none": {"exchange_s": plain, "slot_s": 0.0, "byte_s": byte_s}}
    for way, spec in WAYS.items():
        pair, many = (_exchange_s(layers, WIDTH, spec, turns, where) for layers in (PAIR, MANY))
        slot_s = max(0.0, (many - pair) / (MANY - PAIR))
        costs[way] = {"exchange_s": pair, "slot_s": slot_s, "byte_s": byte_s}
    if rank == 0:
        sys.stdout.write(json.dumps(costs) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
