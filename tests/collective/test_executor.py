"""ExchangeThread: it ends with its owner, and its errors reach whoever waits."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from laconic.collective.executor import ExchangeThread, Steps
from laconic.errors import LaconicError, NonFiniteError

NAME = "exchange thread of this test"
EXIT_WITH_A_RUNNING_TASK = """
import torch
from laconic.collective.executor import ExchangeThread
thread = ExchangeThread("exchange")
assert thread.submit(lambda: torch.ones(3)).wait().sum() == 3
late = thread.submit(lambda: (__import__("time").sleep(0.3), print("done", flush=True), torch.ones(1))[-1])
"""


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def test_thread_starts_with_the_first_task_and_ends_with_its_owner() -> None:
    owner = ExchangeThread(NAME)
    assert not running()
    assert float(owner.submit(lambda: torch.ones(3)).wait().sum()) == 3 and len(running()) == 1
    owner.close()
    assert not running()
    assert float(owner.submit(lambda: torch.ones(4)).wait().sum()) == 4 and len(running()) == 1
    del owner
    gc.collect()
    assert not running()


def test_task_may_drop_the_last_reference_to_its_owner() -> None:
    owners = [ExchangeThread(NAME)]
    future = owners[0].submit(lambda: (owners.clear(), gc.collect(), torch.ones(2))[-1])
    assert float(future.wait().sum()) == 2
    for thread in running():
        thread.join(5)
    assert not running()


def test_task_is_released_before_its_future_is_done() -> None:
    class Task:
        def __call__(self) -> torch.Tensor:
            assert begun.wait(5)
            return torch.ones(2)

    owner, begun, task = ExchangeThread(NAME), threading.Event(), Task()
    alive, seen = weakref.ref(task), []
    future = owner.submit(task)
    del task
    future.add_done_callback(lambda _: seen.append(alive()))  # called by the exchange thread before any wait returns
    begun.set()
    future.wait()
    owner.close()
    assert seen == [None]


def test_all_tasks_after_an_error_raise_the_same_error() -> None:
    def fails() -> torch.Tensor:
        raise LaconicError("no rank 3")

    owner = ExchangeThread(NAME)
    for task in (fails, lambda: torch.ones(1)):
        with pytest.raises(Exception, match="no rank 3"):
            owner.submit(task).wait()
    owner.close()


def steps_of(name: str, events: list[str], count: int = 2, error: Exception | None = None) -> Steps:
    for step in range(count):
        events.append(f"{name}{step}")
        yield
    if error is not None:
        raise error
    events.append(f"{name} ends")
    return torch.full((1,), float(count))


def test_next_task_in_steps_begins_while_the_first_waits_and_others_run_alone() -> None:
    events: list[str] = []
    owner, begun = ExchangeThread(NAME), threading.Event()
    owner.submit(lambda: torch.ones(1) if begun.wait(30) else None)  # until all tasks are in the queue
    futures = [owner.submit_steps(steps_of(name, events)) for name in "abc"]
    futures.append(owner.submit(lambda: (events.append("alone"), torch.ones(1))[1]))
    futures.append(owner.submit_steps(steps_of("d", events, 0)))
    begun.set()
    assert [float(future.wait()) for future in futures] == [2, 2, 2, 1, 0]
    # At most two are under way, the older one goes first, and one that is not in steps has the thread to itself.
    assert events == ["a0", "b0", "a1", "a ends", "c0", "b1", "b ends", "c1", "c ends", "alone", "d ends"]
    owner.close()


def test_error_in_steps_ends_those_under_way_but_one_of_all_ranks_does_not() -> None:
    for error, later in ((LaconicError("no rank 3"), "no rank 3"), (NonFiniteError("not finite"), None)):
        events: list[str] = []
        owner, begun = ExchangeThread(NAME), threading.Event()
        owner.submit(lambda begun=begun: torch.ones(1) if begun.wait(30) else None)
        futures = [owner.submit_steps(steps_of("a", events, 1, error)), owner.submit_steps(steps_of("b", events, 3))]
        begun.set()
        with pytest.raises(Exception, match=str(error)):
            futures[0].wait()
        if later is None:
            assert float(futures[1].wait()) == 3
        else:
            with pytest.raises(Exception, match=later):
                futures[1].wait()
        assert ("b ends" in events) == (later is None)
        owner.close()


def test_process_exit_waits_for_a_running_task() -> None:
    command = [sys.executable, "-c", EXIT_WITH_A_RUNNING_TASK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
