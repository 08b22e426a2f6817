"""Frames do not depend on Python threads, forks or changes of the number of threads."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import laconic
import laws
from laconic.frames import _Scratch

SPECS = ("qsgd:4", "terngrad", "sign", "onebit", "bins:2", "uniform:6", "topk:0.01|qsgd:4", "topk:0.02,approx=true",
         "randk:0.05", "threshold:2.0", "fp16", "none", "adaptive:4.0,tail=0.01", "adaptive:5.0|huffman",
         "uniform:10|rans", "qsgd:4|huffman:auto", "terngrad|rans",
         "topk:0.05|adaptive:5.0,zero=true|rans")  # fmt: skip


def test_concurrent_calls_write_the_same_bytes(threads):
    jobs = [(spec, laws.normal(200_003 + i, seed=i), i) for i, spec in enumerate(SPECS)] * 6
    expected = {i: laconic.encode(x, spec, seed=i) for spec, x, i in jobs}
    values = {i: laws.bytes_of(laconic.decode(frame)) for i, frame in expected.items()}
    start = threading.Barrier(4)

    def work(part):
        torch.set_num_threads(threads)
        start.wait()
        for spec, x, i in jobs[part::4]:
            frame = laconic.encode(x, spec, seed=i)
            assert frame == expected[i], spec
            assert laws.bytes_of(laconic.decode(frame)) == values[i], spec

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, part) for part in range(4)]:
            done.result()


def test_threads_share_no_scratch():
    """Many threads encode small frames of different sizes, which are compared after all have finished."""
    frames_by_thread = {}

    def work(part):
        frames_by_thread[part] = [laconic.encode(torch.full((part + n,), float(n + 1)), "none") for n in range(200)]

    workers = [threading.Thread(target=work, args=(part,)) for part in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for part, frames in frames_by_thread.items():
        for n, frame in enumerate(frames):
            assert torch.equal(laconic.decode(frame), torch.full((part + n,), float(n + 1)))


def test_number_of_threads_may_change_between_calls():
    x = laws.normal(1_100_009)  # three coded chunks
    torch.set_num_threads(1)
    expected = {spec: laconic.encode(x, spec) for spec in SPECS}
    for count in (2, 5, 1, 8):
        torch.set_num_threads(count)
        for spec in SPECS:
            assert laconic.encode(x, spec) == expected[spec], (spec, count)


FORK = """
import os, sys, torch, laconic
torch.set_num_threads(2)
specs = sys.argv[1:]
# Not torch's generator, whose threads do not survive a fork.
x = (torch.arange(600_007) * 2654435761 % 2**32).float() / 2**31 - 1
expected = [laconic.encode(x, spec) for spec in specs]
children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        code = 9
        try:
            code = 0 if [laconic.encode(x, spec) for spec in specs] == expected else 1
        finally:
            os._exit(code)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
assert [laconic.encode(x, spec) for spec in specs] == expected
print(codes)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_thread_pool_works_after_a_fork_and_ends_with_the_process():
    # Only specs that do not use torch's parallel loops, which may hang in a forked child.
    specs = [spec for spec in SPECS if not spec.startswith("adaptive:4.0,tail")]
    done = subprocess.run([sys.executable, "-c", FORK, *specs], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[0, 0]"


def test_buffers_of_many_threads_are_bounded(monkeypatch):
    gc.collect()
    before = _Scratch.kept_by_all
    monkeypatch.setattr(_Scratch, "MAX_KEPT_BY_ALL", before + (5 << 20))
    x, done, most = torch.randn(1 << 18), threading.Barrier(17), []

    def run():
        frame = laconic.encode(x, "none")
        most.append(_Scratch.kept_by_all)
        done.wait(30)
        assert torch.equal(laconic.decode(frame), x)

    threads = [threading.Thread(target=run) for _ in range(16)]
    for thread in threads:
        thread.start()
    done.wait(30)
    for thread in threads:
        thread.join(30)
    assert before + (1 << 20) <= max(most) <= before + (5 << 20)  # 16 threads would have kept 16 MiB
    del thread, threads
    gc.collect()
    assert _Scratch.kept_by_all <= before  # that of a thread that has ended is free
