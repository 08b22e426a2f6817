"""Runs the DDP benchmark: sets up links, starts ranks, and returns Records."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from laconic.errors import LaconicError
from laconic.records import Record
from laconic_lab.bench.ddp.links import Links, connected
from laconic_lab.bench.ddp.settings import DDPSettings
from laconic_lab.bench.timing import quartiles

__all__ = ["rank_processes", "run_ddp"]

Tell = Callable[[str], None]
START_S = 180.0
HUNG = "hung"
TRAINING_S = 3600.0
SAME_POINTS = 0.3
"""Difference in accuracy, in points, that counts as equal."""


def run_ddp(settings: DDPSettings, tell: Tell = lambda what: None) -> list[Record]:
    """Measure all exchanges at all rates; an exchange that hangs gets a Record that says so and is left out."""
    records: list[Record] = []
    for rate in settings.rates:
        records += _measure(rate, settings, lambda what, rate=rate: tell(f"{rate}: {what}"))  # type: ignore[misc]
    return records


def _measure(rate: str, settings: DDPSettings, tell: Tell) -> list[Record]:
    with connected(None if rate == "unshaped" else rate, settings.ranks, paced=settings.paced) as links:
        tell("measuring the link")
        before = links.measure()
        results, hung = _all_ways(rate, links, settings, tell)
        after = links.measure()
    common = {
        "rate": rate, "ranks": settings.ranks, "model": settings.model, "made_of": links.made_of,
        "valid": all(link.valid for link in before + after), "links": [link.values() for link in before],
        "links_after": [link.values() for link in after], "command": settings.command(),
    }  # fmt: skip
    if settings.train:
        return _trained(results, common, settings)
    base = next(one for one in results if one["way"] == "ddp")
    records = [
        Record("bench.ddp", common | (one if "failed" in one else _values(one, base)), settings.seed) for one in results
    ]
    return records + [Record("bench.ddp", common | {"way": name, "failed": HUNG}, settings.seed) for name in hung]


def _all_ways(rate: str, links: Links, settings: DDPSettings, tell: Tell) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the results of each exchange and those that hung."""
    left, measured, hung = list(settings.ways), [], []
    while left:
        results, stuck = _ranks(links, left, settings, tell)
        measured += results
        if stuck is None:
            break
        if settings.train:
            raise LaconicError(f"training with {stuck!r} did not finish")
        if stuck == "ddp":
            raise LaconicError(f"plain DDP did not finish a step in {settings.limit_s:g} s at {rate}")
        hung.append(stuck)
        left.remove(stuck)
    return measured, hung


def _trained(results: list[dict[str, Any]], common: dict[str, Any], settings: DDPSettings) -> list[Record]:
    common |= {"data": settings.data, "batch": settings.batch, "lr": settings.lr, "epochs": settings.epochs}
    plain = next(one for one in results if one["way"] == "ddp")["curve"][-1][2]
    records = []
    for one in results:
        _, seconds, accuracy = one["curve"][-1]
        reached = [at for _, at, reached_accuracy in one["curve"] if reached_accuracy >= plain - SAME_POINTS]
        values = {
            "way": one["way"], "accuracy": accuracy, "plain_accuracy": plain, "train_s": seconds, "failed": None,
            "reached_s": reached[0] if reached else None, "curve": one["curve"], "iterations": one["iterations"],
            "sent_nbytes_per_step": one["sent"], "median_step_s": one["median_step_s"],
        }  # fmt: skip
        records.append(Record("bench.ddp.train", common | values, settings.seed))
    return records


def _values(one: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    first, middle, third = quartiles(tuple(one["seconds"]))
    compute = quartiles(tuple(one["compute"]))[1]
    plain = quartiles(tuple(base["seconds"]))[1]
    return {
        "way": one["way"], "failed": None, "numel": one["numel"], "steps": len(one["seconds"]), "step_s": middle,
        "step_quartiles_s": [first, third], "compute_s": compute, "exposed_s": max(0.0, middle - compute),
        "step_speed_up": plain / middle, "exchange_speed_up": (plain - compute) / max(1e-9, middle - compute),
        "sent_nbytes_per_step": quartiles(tuple(one["sent_nbytes"]))[1],
        "relative_squared_error": one["relative_squared_error"], "stats": one["stats"],
    }  # fmt: skip


def _ranks(
    links: Links, ways: Sequence[str], settings: DDPSettings, tell: Tell
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the results of the ranks, or the exchange in which they hang."""
    address, port = links.store()
    options = {
        "ranks": settings.ranks, "store": f"tcp://{address}:{port}", "ways": list(ways), "model": settings.model,
        "steps": settings.steps, "slow_steps": settings.slow_steps, "seed": settings.seed,
        "interface": links.interface, "data": settings.data, "batch": settings.batch,
        "data_dir": os.environ.get("LACONIC_DATA"), "epochs": settings.epochs, "lr": settings.lr,
        "test_every": settings.test_every, "program": "training" if settings.train else "rank",
    }  # fmt: skip
    module = f"laconic_lab.bench.ddp.{options['program']}"
    with rank_processes(links, module, options, settings.ranks) as (lines, *_):
        current, since = "starting", time.monotonic()
        while True:
            limit = START_S if current == "starting" else TRAINING_S if settings.train else settings.limit_s
            try:
                line = lines.get(timeout=max(0.1, since + limit - time.monotonic()))
            except queue.Empty:
                return [], current
            if line is None:
                raise LaconicError(f"a rank ended while measuring {current!r}; its error output is above")
            message = json.loads(line)
            if "results" in message:
                results: list[dict[str, Any]] = message["results"]
                return results, None
            current, since = message["begin"], time.monotonic()
            tell(current)


@contextmanager
def rank_processes(
    links: Links, module: str, options: dict[str, Any], ranks: int
) -> Iterator[list[queue.SimpleQueue[str | None]]]:
    """Provide for each rank a queue of the lines that it prints, ended by None; the block ends the processes.

    Args:
        module: A program whose argument is its options as JSON, ``rank`` among them.
    """
    # Namespaces have no name server, about which torch would warn.
    quiet = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    processes: list[subprocess.Popen[str]] = []
    threads: list[threading.Thread] = []
    queues: list[queue.SimpleQueue[str | None]] = []

    def read(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
        with stream:
            for line in stream:
                lines.put(line)
        lines.put(None)

    try:
        for rank in range(ranks):
            program = [sys.executable, "-m", module, json.dumps(options | {"rank": rank})]
            process = links.popen(rank, program, stdout=subprocess.PIPE, text=True, start_new_session=True, env=quiet)
            processes.append(process)
            queues.append(queue.SimpleQueue())
            threads.append(threading.Thread(target=read, args=(process.stdout, queues[-1]), daemon=True))
            threads[-1].start()
        yield queues
    finally:
        for process in processes:  # all at once: a rank that outlives another prints a traceback about its connection
            process.kill()
        for process in processes:
            process.wait()
        for thread in threads:
            thread.join()
