"""Exchanges that stay on the device between ranks that are threads of one process: as with NCCL, without several GPUs.

torch's threaded group hands the tensors of all ranks over in memory. The device path is the one that NCCL serves, so on
a machine with one GPU several ranks of it run there; without a GPU the kernels are interpreted.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import test_device_rounds as rounds
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton_support import INTERPRETED, MARKS, no_compile_fallback  # noqa: F401

import ranks
from laconic.residual_storage import ResidualStorage

pytestmark = [*MARKS, pytest.mark.usefixtures("no_compile_fallback")]


@pytest.fixture(autouse=True)
def _one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter, whose state belongs to the process, run one kernel at a time."""
    if INTERPRETED:
        lock, run = threading.RLock(), InterpretedFunction.run

        def locked(*args: Any, **kwargs: Any) -> Any:
            with lock:
                return run(*args, **kwargs)

        monkeypatch.setattr(InterpretedFunction, "run", locked)


ALL = [
    (4, "ef|thc:4", torch.float32), (2, "ef|qsgd:4,bucket=128", torch.bfloat16),
    (2, "ef|topk:0.05|qsgd:4,bucket=128", torch.bfloat16), (4, "ef:0.9|qsgd:8,bucket=256", torch.float32),
    (4, "ef|powersgd:2", torch.bfloat16), (2, "ef|sign:256", torch.float32), (4, "topk:0.1", torch.float32),
    (2, "shared:8", torch.float32), (4, "fp16", torch.float32),
]  # fmt: skip
QUICK = 2


@pytest.mark.parametrize(
    "world, spec, dtype", [*ALL[:QUICK], *(pytest.param(*each, marks=pytest.mark.slow) for each in ALL[QUICK:])]
)
def test_ranks_as_threads_give_the_bits_of_the_host(world: int, spec: str, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)  # each rank is a thread
    with rounds.recorded_calls() as calls:
        compare = partial(rounds.compare_means, spec, 3, ResidualStorage(dtype), calls)
        results = ranks.run_threads(compare, world)
    for result in results:
        assert result["means"] and result["state"]
        assert result["counts"][0] == result["counts"][1]
        assert result["nan"] > 0
    rounds.calls_fit([{"calls": calls[rank]} for rank in range(world)])
