"""One rank of the FSDP benchmark; a program whose argument is JSON. Rank 0 prints JSON lines.

A task is ``time``: take some steps, time each and count the bytes that leave the node; or ``loss``: take all steps and
evaluate on the way. Every way starts from the same weights and reads the same windows.
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
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from laconic.collective import Attachment, LocalSGD, attach, differing
from laconic.errors import WrongResultError
from laconic_lab.bench.fsdp.settings import Way, way_of
from laconic_lab.bench.gpt.methods import CLIP, evaluate, loss_of, optimizers_of, rate, update
from laconic_lab.bench.gpt.rank import TextRank, run_tasks
from laconic_lab.bench.gpt.settings import build_gpt

__all__ = ["main"]

HEADER = 14 + 20 + 32
"""Bytes of the headers of a packet: Ethernet, IPv4, and TCP with timestamps."""


def main(options: dict[str, Any]) -> None:
    run_tasks(Rank, options, int(options["nodes"]) * int(options["shards"]))


class Trainer:
    """One rank that trains a GPT by a way, sharded inside its node."""

    def __init__(self, way: Way, options: dict[str, Any], mesh: DeviceMesh, steps: int) -> None:
        self.way, self.nodes = way, mesh.size(0)
        self.model: Any = build_gpt(options)
        self.numel = sum(parameter.numel() for parameter in self.model.parameters())
        # "none" takes torch's whole mesh over, as HSDP has it, so that Muon's sums over shards are the same.
        native = way.spec in (None, "none") and not way.every
        inside = mesh if native else mesh["shard"]
        for block in self.model.blocks:
            fully_shard(block, mesh=inside)
        fully_shard(self.model, mesh=inside)
        rates = (way.rates * float(options[name]) for name in ("lr", "muon_lr"))
        self.optimizers = optimizers_of(way.optimizer, self.model, *rates)
        self.attachment: Attachment | None = None
        self.local: LocalSGD | None = None
        if way.every:
            assert way.spec is not None
            replicate = mesh["replicate"].get_group()
            self.local = LocalSGD(
                self.model, self.optimizers, every=way.every, codec=way.spec, outer=way.outer, fragments=way.fragments,
                group=replicate,
            )  # fmt: skip
        elif way.spec is not None:
            self.attachment = attach(self.model, way.spec, replicate=None if native else mesh["replicate"])
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(each, lambda step: rate(step, steps)) for each in self.optimizers
        ]

    def step(self, windows: Tensor) -> None:
        self.model.zero_grad()
        torch.autograd.backward(loss_of(self.model, windows))
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        update(self.local, self.optimizers, self.schedules)

    def exchanged_nbytes(self) -> float | None:
        """Return the bytes that this rank has sent to other nodes by laconic's counts; None without laconic."""
        stats = self.attachment.stats() if self.attachment is not None else None
        if self.local is not None:
            stats = self.local.stats(residual_norms=False)
        if stats is None:
            return None
        return float(stats["bytes_sent"] + stats["bytes_reduced"] * 2 * (self.nodes - 1) / self.nodes)

    def finish(self) -> None:
        if self.local is not None:
            self.local.finish()


class Rank(TextRank):
    def __init__(self, options: dict[str, Any]) -> None:
        shape = int(options["nodes"]), int(options["shards"])
        super().__init__(options, shape[0] * shape[1], int(options["longest"]))
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))

    def run(self, task: dict[str, Any]) -> dict[str, Any]:
        way = way_of(task["way"])
        return self.measure(way, task["steps"]) if task["part"] == "time" else self.train(way, task["steps"])

    def measure(self, way: Way, steps: int) -> dict[str, Any]:
        """Take steps over the link; return their seconds and the bytes that left a node, all after the first step."""
        trainer = Trainer(way, self.options, self.mesh, max(steps + 1, int(self.options["loss_steps"])))
        trainer.step(self.windows(0))
        dist.barrier()
        sent, counted, seconds = self.node_nbytes(), trainer.exchanged_nbytes(), []
        began = time.perf_counter()
        for step in range(1, steps + 1):
            trainer.step(self.windows(step))
            seconds.append(time.perf_counter() - began)
            self.tell({"step": step})
        if trainer.exchanged_nbytes() is not None and counted is not None:
            counted = float(trainer.exchanged_nbytes() or 0.0) - counted
        dist.barrier()
        sent = self.node_nbytes() - sent
        slowest = torch.tensor([*seconds], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        # Both ranks of a node see its interface; the bytes that ranks count add up to those of the node.
        totals = torch.tensor([sent / self.ranks, (counted or 0.0) / int(self.options["nodes"])], dtype=torch.float64)
        dist.all_reduce(totals)
        self.require_equal(trainer)
        return {
            "seconds": torch.diff(slowest, prepend=torch.zeros(1, dtype=torch.float64)).tolist(),
            "node_nbytes": float(totals[0]) / steps,
            "counted_nbytes": None if counted is None else float(totals[1]) / steps,
            "numel": trainer.numel,
        }

    def train(self, way: Way, steps: int) -> dict[str, Any]:
        """Take all steps; return [step, loss] of the model that all nodes share."""
        trainer = Trainer(way, self.options, self.mesh, steps)
        curve = self.loss_curve(trainer, steps, lambda: self.loss(trainer))
        self.require_equal(trainer)
        curve.append([steps, self.loss(trainer)])
        counted = torch.tensor([trainer.exchanged_nbytes() or 0.0], dtype=torch.float64)
        dist.all_reduce(counted)
        nbytes = None if way.spec is None else float(counted) / int(self.options["nodes"])
        return {"curve": curve, "numel": trainer.numel, "counted_nbytes": nbytes, "text_sha256": self.text.digest}

    def loss(self, trainer: Trainer) -> float:
        if trainer.local is None:
            return evaluate(trainer.model, self.held_out, self.rank, self.ranks)
        with trainer.local.global_model() as model:
            return evaluate(model, self.held_out, self.rank, self.ranks)

    def require_equal(self, trainer: Trainer) -> None:
        """Raise ``WrongResultError`` unless all replicas have the same bits; local SGD only has them at its end."""
        trainer.finish()
        trainer.model.reshard()
        shards = {name: p.to_local().detach() for name, p in trainer.model.named_parameters() if hasattr(p, "to_local")}
        if differ := differing(shards, self.mesh["replicate"].get_group()):
            raise WrongResultError(f"{trainer.way.title}: nodes ended with different parameters: {differ[0]}")

    def node_nbytes(self) -> int:
        """Return the bytes that this rank's node has sent to others, without headers; 0 on loopback."""
        interface = str(self.options["interface"])
        for line in Path("/proc/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == interface != "lo":
                sent, packets = map(int, numbers.split()[8:10])
                return sent - HEADER * packets
        return 0


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    os.environ["GLOO_SOCKET_IFNAME"] = given["interface"]
    main(given)
