"""The thread that exchanges: it ends with whoever it works for, and its errors are heard."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from laconic.collective.executor import ExchangeThread
from laconic.errors import LaconicError

EXITS = """
import torch
from laconic.collective.executor import ExchangeThread
worker = ExchangeThread("exchange")
assert worker.submit(lambda: torch.ones(3)).wait().sum() == 3
late = worker.submit(lambda: (__import__("time").sleep(0.3), print("done", flush=True), torch.ones(1))[-1])
"""


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "a worker of this test"]


def test_a_thread_ends_with_its_worker() -> None:
    worker = ExchangeThread("a worker of this test")
    assert not threads()
    assert float(worker.submit(lambda: torch.ones(3)).wait().sum()) == 3 and len(threads()) == 1
    worker.close()
    assert not threads()
    assert float(worker.submit(lambda: torch.ones(4)).wait().sum()) == 4 and len(threads()) == 1  # and begins anew
    del worker
    gc.collect()
    assert not threads()


def test_a_task_of_its_own_may_drop_it() -> None:
    kept = [ExchangeThread("a worker of this test")]
    found = kept[0].submit(lambda: (kept.clear(), gc.collect(), torch.ones(2))[-1])
    assert float(found.wait().sum()) == 2
    for thread in threads():
        thread.join(5)
    assert not threads()


def test_who_waits_for_a_task_finds_it_gone() -> None:
    class Task:
        def __call__(self) -> torch.Tensor:
            assert begun.wait(5)
            return torch.ones(2)

    worker, begun, task = ExchangeThread("a worker of this test"), threading.Event(), Task()
    alive, found = weakref.ref(task), []
    future = worker.submit(task)
    del task
    future.add_done_callback(lambda _: found.append(alive()))  # called by the worker's thread, before any wait returns
    begun.set()
    future.wait()
    worker.close()
    assert found == [None]


def test_the_first_error_is_that_of_all_later_tasks() -> None:
    def fails() -> torch.Tensor:
        raise LaconicError("no rank 3")

    worker = ExchangeThread("a worker of this test")
    for task in (fails, lambda: torch.ones(1)):
        with pytest.raises(Exception, match="no rank 3"):
            worker.submit(task).wait()
    worker.close()


def test_a_process_that_ends_waits_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
