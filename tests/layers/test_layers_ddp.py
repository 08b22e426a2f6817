"""Two processes under DDP: the same bits on both, and the dense weights travel once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, torch, laconic
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, file = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
for scheme in sys.argv[3:]:
    torch.manual_seed(rank)  # DDP makes them equal
    model = nn.Sequential(nn.Linear(100, 120), nn.Tanh(), nn.Linear(120, 100), nn.Tanh(), nn.Linear(100, 4))
    small = laconic.compress(model, scheme, init="fresh", seed=5)
    small(torch.randn(2, 100))
    ddp = DistributedDataParallel(small)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(7):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        F.mse_loss(ddp(torch.randn(8, 100)), torch.randn(8, 4)).backward()
        optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in laconic.expand(small).parameters()])
    other = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(other, flat)
    assert torch.equal(*other), (scheme, (other[0] - other[1]).abs().max())
    assert sum(buffer.numel() for buffer in small.buffers()) <= 4  # DDP sends them before each step
dist.destroy_process_group()
"""


def test_ranks_stay_equal(tmp_path: Path) -> None:
    schemes = ("subspace:0.1,T=3", "hashed:0.2", "monarch:0.2")
    commands = [[sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store"), *schemes] for rank in (0, 1)]
    processes = [subprocess.Popen(c, stderr=subprocess.PIPE, text=True) for c in commands]
    told = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
