"""One rank of the DDP benchmark; a program whose argument is JSON. Rank 0 prints JSON lines.

The steps of all exchanges alternate, so that other load affects them equally. A step lasts until the slowest rank has
all gradients.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collective import differing
from laconic.errors import WrongResultError
from laconic_lab.bench.ddp.exchanges import DDPExchange, make_exchange
from laconic_lab.bench.ddp.synthetic import PregeneratedGradients, Synthetic
from laconic_lab.network.paced_sockets import paced_bytes

__all__ = ["main"]

SLOW_S = 2.0
LOSSLESS = {"ddp": 1e-10, "laconic none": 1e-10, "bf16": 1e-3, "fp16": 1e-3, "laconic bf16": 1e-3}
LOSSY = 1.5
"""Largest allowed relative squared error of a mean; one step of error feedback may exceed it."""


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank, ranks = options["rank"], options["ranks"]
    dist.init_process_group("gloo", init_method=options["store"], rank=rank, world_size=ranks)
    bench = Bench(options)
    for name in options["ways"]:
        _tell(rank, {"begin": name})
        bench.prepare(name)
    for turn in range(options["steps"]):
        bench.compute()
        for name in options["ways"]:
            if turn < bench.count(name):
                _tell(rank, {"begin": name})
                bench.step(name)
    bench.check_paced()
    results = [bench.result(name) for name in options["ways"]]
    dist.barrier()
    dist.destroy_process_group()
    _tell(rank, {"results": results})  # last, because the reader then ends all ranks


def _tell(rank: int, what: dict[str, Any]) -> None:
    if rank == 0:
        print(json.dumps(what), flush=True)


class Bench:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.rank, self.ranks = int(options["rank"]), int(options["ranks"])
        self.model = str(options["model"])
        numel = Synthetic(self.model).numel
        self.all_gradients = [PregeneratedGradients(numel, int(options["seed"]) + rank) for rank in range(self.ranks)]
        self.gradients = self.all_gradients[self.rank]
        self.exchanges: dict[str, DDPExchange] = {}
        self.seconds: dict[str, list[float]] = {}
        self.nbytes: dict[str, list[int]] = {}
        self.slow: set[str] = set()
        self.errors: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self.base: list[float] = []
        self.turns: dict[str, int] = {}

    def prepare(self, name: str) -> None:
        way = self.exchanges[name] = make_exchange(name, Synthetic(self.model))
        self.turns[name], self.seconds[name], self.nbytes[name] = 0, [], []
        took = 0.0
        try:
            for _ in range(way.warmup):
                took = self._step(way)
        except RuntimeError as error:
            if way.attachment is not None:
                raise
            self.failed[name] = str(error).strip().splitlines()[0][:300]  # torch's hook fails on all ranks alike
            return
        self._check(name, way)
        if took > SLOW_S:
            self.slow.add(name)

    def count(self, name: str) -> int:
        if name in self.failed:
            return 0
        return int(self.options["slow_steps"] if name in self.slow else self.options["steps"])

    def step(self, name: str) -> None:
        sent = self._sent_bytes()
        self.seconds[name].append(self._step(self.exchanges[name]))
        self.nbytes[name].append(self._sent_bytes() - sent)

    def compute(self) -> None:
        """Time a step without an exchange."""
        way = self.exchanges["ddp"]
        with way.module.no_sync():
            self.base.append(self._step(way))

    def _step(self, way: DDPExchange) -> float:
        gradients = self.gradients.at(self.turns[way.name])
        self.turns[way.name] += 1
        way.module.zero_grad()
        dist.barrier()
        began = time.perf_counter()
        way.module(gradients).backward()
        took = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return float(took)

    def _sent_bytes(self) -> int:
        """Return the bytes this rank has sent: by paced sockets, its host's interface, or its share of a common one."""
        if (paced := paced_bytes()) is not None:
            return paced
        interface = str(self.options["interface"])
        for line in Path("/proc/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == interface:
                return int(numbers.split()[8]) // (self.ranks if interface == "lo" else 1)
        return 0

    def _check(self, name: str, way: DDPExchange) -> None:
        """Raise ``WrongResultError`` unless the gradients are right and equal on all ranks."""
        step = self.turns[name] - 1
        by_name = {key: _gradient(p) for key, p in way.module.named_parameters()}
        if differ := differing(by_name):
            raise WrongResultError(f"{name}: gradients differ between ranks: {differ[0]}")
        wanted = torch.stack([gradients.at(step) for gradients in self.all_gradients]).mean(0)
        flat = torch.cat([x.reshape(-1) for x in by_name.values()])
        error = float((flat - wanted).square().sum() / wanted.square().sum())
        if not error <= LOSSLESS.get(name, LOSSY):
            raise WrongResultError(f"{name}: the relative squared error of the mean is {error:g}")
        self.errors[name] = error

    def check_paced(self) -> None:
        """Raise unless the paced sockets carried the bytes that plain DDP must send."""
        least = 0.9 * 2 * (self.ranks - 1) / self.ranks * 4 * self.gradients.numel
        if paced_bytes() is not None and min(self.nbytes["ddp"]) < least:
            raise WrongResultError(
                f"paced sockets carried {min(self.nbytes['ddp'])} bytes in a step, plain DDP sends at least "
                f"{least:.0f}: this torch uses system calls that are not paced"
            )

    def result(self, name: str) -> dict[str, Any]:
        way = self.exchanges[name]
        if name in self.failed:
            return {"way": name, "failed": self.failed[name]}
        stats = way.attachment.stats() if way.attachment is not None else None
        return {
            "way": name, "seconds": self.seconds[name], "compute": self.base, "sent_nbytes": self.nbytes[name],
            "relative_squared_error": self.errors[name], "numel": self.gradients.numel,
            "stats": None if stats is None else {key: value for key, value in stats.items() if key not in _LONG},
        }  # fmt: skip


_LONG = ("exempt", "errors")


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    os.environ["GLOO_SOCKET_IFNAME"] = given["interface"]
    main(given)
