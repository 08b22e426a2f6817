"""One replica of a torchft training that is killed at random: it trains, and writes down what happens to residuals.

torchft is imported when a replica starts, so that this module can be imported without it.
"""

from __future__ import annotations

import json
import time
import zlib
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

import laconic.torchft

__all__ = ["Attempt", "ReplicaOptions", "read_attempts", "run_replica"]

GLOO_TIMEOUT = timedelta(seconds=10)
MANAGER_TIMEOUT = timedelta(seconds=20)
QUORUM_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class ReplicaOptions:
    """Options of one replica process.

    Args:
        spec: The codec; ``plain`` is torchft without laconic.
        folder: Where it writes its attempts, and where the file ``stop`` names the last step.
        life: Counts the processes of this replica.
        min_replicas: The smallest quorum that trains.
    """

    lighthouse: str
    folder: str
    name: str
    life: int
    spec: str
    width: int
    min_replicas: int = 2
    record: bool = True


@dataclass(frozen=True)
class Attempt:
    """One step that a replica tried to take. Sums are over all values of all slots."""

    name: str
    life: int
    step: int
    quorum: int
    size: int
    committed: bool
    exchanged: bool
    """Whether the codec was used: a quorum of one replica exchanges nothing."""
    inputs: float
    """Sum of this replica's gradients; 0 while it does not take part."""
    delivered: float
    """Sum of the sums that came back."""
    sent_before: float
    mean_before: float
    sent_after: float
    """Residuals as a sender; ``mean_…``: as an owner of means."""
    mean_after: float
    weights: int
    """Checksum after the step."""
    seconds: float


def read_attempts(folder: Path) -> list[Attempt]:
    """Return the attempts of all replicas; a line that a kill has cut short is left out."""
    attempts = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                attempts.append(Attempt(**json.loads(line)))
            except json.JSONDecodeError:
                continue
    return attempts


class _Recorder:
    """Sums of what goes into an attempt and what comes out."""

    def __init__(self, manager: Any, model: nn.Module, attachment: Any) -> None:
        self.manager, self.model, self.attachment = manager, model, attachment
        self._all_reduce = manager.allreduce
        manager.allreduce = self.allreduce
        self.clear()

    def clear(self) -> None:
        self.inputs, self.before, self.exchanged = 0.0, (0.0, 0.0), False

    def allreduce(self, tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        total = float(tensor.double().sum())
        work = self._all_reduce(tensor, *arguments, **options)  # the exchange begins when the work is waited for
        if self.manager.errored() is None and self.manager.is_participating():
            self.inputs += total
        if not self.exchanged and self.attachment is not None and self.attachment._memory._attempt is not None:
            self.exchanged, self.before = True, self.residuals()
        return work

    def residuals(self) -> tuple[float, float]:
        """Return the sums of residuals as they are now, also in the middle of an attempt."""
        memory = self.attachment._memory if self.attachment is not None else None
        if memory is None or memory.exchange is None:
            return 0.0, 0.0
        sums = {"there": 0.0, "back": 0.0}
        for key, x in memory.exchange.portable_state(list(memory._slots.items())).items():
            direction = key.partition("//")[2].partition("/")[0]
            sums[direction] += float(x.double().sum())
        return sums["there"], sums["back"]

    def delivered(self) -> float:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return sum(float(x.double().sum()) for x in gradients) * int(self.manager.num_participants())


def network(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def checksum(model: nn.Module) -> int:
    value = 0
    for parameter in model.parameters():
        value = zlib.crc32(parameter.detach().numpy().tobytes(), value)
    return value


def run_replica(options: ReplicaOptions) -> None:
    """Train until the step in the file ``stop``."""
    torchft = import_module("torchft")
    torch.set_num_threads(1)
    model = network(options.width)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    parts: dict[str, Any] = {"model": model, "optimizer": sgd}
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=GLOO_TIMEOUT), min_replica_size=options.min_replicas,
        replica_id=f"{options.name}_{options.life}",
        state_dict=lambda: {key: part.state_dict() for key, part in parts.items()},
        load_state_dict=lambda saved: [part.load_state_dict(saved[key]) for key, part in parts.items()],
        store_addr="localhost", store_port=store.port, rank=0, world_size=1, lighthouse_addr=options.lighthouse,
        timeout=MANAGER_TIMEOUT, quorum_timeout=QUORUM_TIMEOUT,
    )  # fmt: skip
    ddp, optimizer = torchft.DistributedDataParallel(manager, model), torchft.Optimizer(manager, sgd)
    attachment = None if options.spec == "plain" else laconic.torchft.attach(manager, options.spec, ddp)
    recorder = _Recorder(manager, model, attachment) if options.record else None
    generator = torch.Generator().manual_seed(zlib.crc32(f"{options.name} {options.life}".encode()))
    stop, folder = Path(options.folder) / "stop", Path(options.folder)
    with (folder / f"{options.name}-{options.life}.jsonl").open("a", encoding="utf-8", buffering=1) as log:
        while not stop.exists() or manager.current_step() < int(stop.read_text() or 1 << 60):
            began = time.perf_counter()
            if recorder is not None:
                recorder.clear()
            x = torch.randn(32, 64, generator=generator)
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(ddp(x), x[:, :10].argmax(1)))
            step, delivered = manager.current_step(), 0.0 if recorder is None else recorder.delivered()
            optimizer.step()
            committed = manager.current_step() > step
            before, after = (recorder.before, recorder.residuals()) if recorder else ((0.0, 0.0), (0.0, 0.0))
            attempt = Attempt(
                options.name, options.life, step, manager._quorum_id, manager._pg.size(), committed,
                bool(recorder and recorder.exchanged),
                recorder.inputs if recorder else 0.0, delivered, *before, *after, checksum(model),
                time.perf_counter() - began,
            )  # fmt: skip
            log.write(json.dumps(asdict(attempt)) + "\n")
    manager.shutdown(wait=False)
