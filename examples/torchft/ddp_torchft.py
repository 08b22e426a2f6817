"""torchft: two replicas train, one is killed and started again; gradients travel by a codec, residuals survive.

python examples/torchft/ddp_torchft.py      (pip install 'laconic[torchft]')
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta

import torch
import torchft
from torch import nn
from torchft.coordination import LighthouseServer

import laconic.torchft
from laconic.train import build_task

STEPS, KILLED_AT = 120, 40


def replica(lighthouse: str, name: str) -> None:
    torch.set_num_threads(1)
    task = build_task("lenet5", "digits", seed=0)
    sgd = torch.optim.SGD(task.model.parameters(), lr=0.05, momentum=0.9)
    parts = {"model": task.model, "optimizer": sgd}
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=10)), min_replica_size=2, replica_id=name,
        state_dict=lambda: {key: part.state_dict() for key, part in parts.items()},
        load_state_dict=lambda saved: [part.load_state_dict(saved[key]) for key, part in parts.items()],
        store_addr="localhost", store_port=store.port, rank=0, world_size=1, lighthouse_addr=lighthouse,
        quorum_timeout=timedelta(minutes=5),
    )  # fmt: skip
    model, optimizer = torchft.DistributedDataParallel(manager, task.model), torchft.Optimizer(manager, sgd)
    attachment = laconic.torchft.attach(manager, "ef|qsgd:4", model)  # the only new line
    while manager.current_step() < STEPS:
        if name == "short-lived" and manager.current_step() == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        batch = task.batch(torch.randint(task.num_train, (32,)))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
        optimizer.step()
    stats, weights = attachment.stats(), sum(float(x.double().sum()) for x in task.model.state_dict().values())
    print(f"{name}: {stats['wire_bytes']:,} bytes, {stats['quorums']} quorums, "
          f"accuracy {task.evaluate()['accuracy']:.1f} %, weights {weights:.12f}", flush=True)  # fmt: skip
    manager.shutdown(wait=False)


def main() -> None:
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=1000)
    start = [sys.executable, __file__, lighthouse.address()]
    first, second = subprocess.Popen([*start, "first"]), subprocess.Popen([*start, "short-lived"])
    print(f"the second replica ends with {second.wait()} and is started again", flush=True)
    assert subprocess.run([*start, "second"]).returncode == first.wait() == 0


if __name__ == "__main__":
    replica(*sys.argv[1:]) if sys.argv[1:] else main()
