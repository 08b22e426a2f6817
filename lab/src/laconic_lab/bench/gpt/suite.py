"""Runs the GPT benchmark: loss by step without a link, time by step over each link, and Records of both together."""

from __future__ import annotations

import json
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from laconic.errors import LaconicError
from laconic.records import Record
from laconic.units import parse_time
from laconic_lab.bench.ddp.links import Links, connected
from laconic_lab.bench.ddp.suite import rank_processes
from laconic_lab.bench.gpt.compose import composed, curve, reached
from laconic_lab.bench.gpt.methods import METHODS, steps_of
from laconic_lab.bench.gpt.settings import PLAIN, GPTSettings, link_parts
from laconic_lab.network import Link

__all__ = ["run_gpt"]

START_S, END_S = 180.0, 20.0
SAME_LOSS = 1e-3
"""Relative difference between the losses of the same training over two links; DDP's sums may be rounded otherwise."""
AS_GOOD = 0.002
"""Relative difference to plain DDP's last loss that counts as equal: the rounding of fp16 alone changes the loss."""
ROUND_TRIP = 0.9
"""A link is valid if its measured round trip has at least this share of twice the delay."""

Progress = Callable[[str, int, int], None]


@dataclass
class _Run:
    """A benchmark in progress: Records so far, and where they are saved after each method."""

    settings: GPTSettings
    records: list[Record]
    save: Callable[[Sequence[Record]], None]
    progress: Progress
    done: int = 0
    total: int = field(init=False)

    def __post_init__(self) -> None:
        s = self.settings
        self.total = len(s.ranks) * (1 + len(s.methods) * (1 + len(s.timed_links)))

    def find(self, kind: str, **values: Any) -> Record | None:
        """Return the finished Record of the same work, if there is one."""
        wanted = {"training": self.settings.training(), **values}
        for record in reversed(self.records):
            same = record.kind == kind and record.seed == self.settings.seed
            if same and all(record.values.get(name) == value for name, value in wanted.items()):
                return record
        return None

    def add(self, kind: str, **values: Any) -> None:
        common = {"training": self.settings.training(), "command": self.settings.command()}
        self.records.append(Record(kind, common | values, self.settings.seed))
        self.save(self.records)
        self.done += 1

    def tell(self, what: str) -> None:
        self.progress(what, self.done, self.total)


def run_gpt(
    settings: GPTSettings, progress: Progress = lambda what, done, total: None, *,
    finished: Sequence[Record] = (), save: Callable[[Sequence[Record]], None] = lambda records: None,
) -> list[Record]:  # fmt: skip
    """Measure all methods over all links; return the finished Records and the new ones.

    Args:
        progress: Called with the current step, the number of finished measurements and of all.
        finished: Records of an earlier run with the same settings, which is continued.
        save: Is given all Records after each measurement.
    """
    run = _Run(settings, list(finished), save, progress)
    for ranks in settings.ranks:
        _losses(run, ranks)
        for link in settings.timed_links:
            _times(run, ranks, link)
    return run.records


def _losses(run: _Run, ranks: int) -> None:
    """Check LocalSGD against DDP, then train by each method over loopback."""
    tasks = []
    if run.find("bench.gpt.check", ranks=ranks) is None:
        tasks.append({"part": "check", "method": "LocalSGD beside DDP"})
    tasks += [
        {"part": "loss", "method": method}
        for method in run.settings.methods
        if run.find("bench.gpt.loss", ranks=ranks, method=method) is None
    ]
    run.done += 1 + len(run.settings.methods) - len(tasks)
    if not tasks:
        return
    with connected(None, ranks, paced=True) as links:
        for task, result in _results(run, links, ranks, tasks, "loss by step"):
            failed = "failed" in result
            if task["part"] == "check":
                if failed:
                    raise LaconicError(f"the check of LocalSGD beside DDP failed: {result['failed']}")
                run.add("bench.gpt.check", ranks=ranks, **result)
                continue
            if failed and task["method"] == PLAIN:
                raise LaconicError(f"plain DDP failed: {result['failed']}")
            title = METHODS[task["method"]].title
            run.add("bench.gpt.loss", ranks=ranks, method=task["method"], title=title, **({"failed": None} | result))


def _times(run: _Run, ranks: int, link: str) -> None:
    """Time the steps of each method over a link."""
    settings = run.settings
    everything = ranks == settings.ranks[0] and link == settings.links[0]
    tasks = []
    for method in settings.methods:
        loss = run.find("bench.gpt.loss", ranks=ranks, method=method)
        assert loss is not None
        wanted = settings.timed(method, everything=everything)
        record = run.find("bench.gpt", ranks=ranks, link=link, method=method)
        if record is not None and (record.values["failed"] or record.values["steps_timed"] >= wanted):
            run.done += 1
        elif loss.values["failed"]:
            run.add("bench.gpt", ranks=ranks, link=link, method=method, failed=loss.values["failed"])
        else:
            tasks.append({"part": "time", "method": method, "steps_timed": wanted})
    if not tasks:
        return
    rate, delay = link_parts(link)
    with connected(rate, ranks, paced=settings.paced or rate is None, delay=delay) as links:
        run.tell(f"{ranks} ranks, {link}: measuring the link")
        before = links.measure() if rate is not None else []
        common = {"ranks": ranks, "link": link, "made_of": links.made_of, "links": [one.values() for one in before]}
        first = len(run.records)
        for task, result in _results(run, links, ranks, tasks, link):
            values = _values(run, ranks, task, result)
            run.add("bench.gpt", **common, valid=_valid(before, delay), method=task["method"], **values)
        after = links.measure() if rate is not None else []
    for index in range(first, len(run.records)):
        more = {"links_after": [one.values() for one in after], "valid": _valid(before + after, delay)}
        run.records[index] = replace(run.records[index], values={**run.records[index].values, **more})
    run.save(run.records)


def _valid(links: Sequence[Link], delay: str) -> bool:
    least = ROUND_TRIP * 2 * parse_time(delay)
    return all(link.valid and link.round_trip >= least for link in links)


def _values(run: _Run, ranks: int, task: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a method over a link: its loss by step with the time by step."""
    if "failed" in result:
        return {"failed": result["failed"]}
    settings, name = run.settings, task["method"]
    plain = run.find("bench.gpt.loss", ranks=ranks, method=PLAIN)
    loss = run.find("bench.gpt.loss", ranks=ranks, method=name)
    assert plain is not None and loss is not None
    losses = loss.values["curve"]
    result = result | {"composed_from": settings.timed(name, everything=False)}
    steps = steps_of(name, settings.steps, settings.stretch)
    values = composed(name, result, steps)
    clock, whole = values.pop("clock"), values["real_s"] is not None
    if whole and not abs(result["loss"] - losses[-1][1]) <= SAME_LOSS * losses[-1][1]:
        raise LaconicError(
            f"{METHODS[name].title} ends at a loss of {result['loss']:.5f} over the link and of {losses[-1][1]:.5f} "
            "without it, but the loss by step must not depend on the link"
        )
    points = curve(losses, clock, values["train_s"])
    goal = plain.values["curve"][-1][1] * (1 + AS_GOOD)
    when = reached(points, goal)
    first = f"the first {values['steps_timed']} steps were timed over the link; the rest repeat their mean period"
    return {
        "failed": None, "title": METHODS[name].title, "ours": METHODS[name].ours, "steps": steps,
        "numel": result["numel"], "curve": points, "loss": losses[-1][1], "goal_loss": goal,
        "reached_s": None if when is None else when[0], "reached_step": None if when is None else when[1],
        "compute_s": result["compute_s"], "finish_s": result["finish_s"], **values,
        "how": "loss by step without a link, which does not change it; "
        + ("all steps were timed over the link" if whole else first),
    }  # fmt: skip


def _results(
    run: _Run, links: Links, ranks: int, tasks: list[dict[str, Any]], where: str
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each task with its result; a task that hangs or fails is given up, the others run in new processes."""
    left = list(tasks)
    while left:
        for result in _in_processes(run, links, ranks, left, where):
            yield left.pop(0), result


def _in_processes(
    run: _Run, links: Links, ranks: int, tasks: list[dict[str, Any]], where: str
) -> Iterator[dict[str, Any]]:
    """Yield the results of tasks in order, until all are done or one fails."""
    address, port = links.store()
    options = run.settings.training() | {
        "ranks": ranks, "store": f"tcp://{address}:{port}", "interface": links.interface, "tasks": list(tasks),
        "seed": run.settings.seed, "data_dir": os.environ.get("LACONIC_DATA"),
    }  # fmt: skip
    module = "laconic_lab.bench.gpt.rank"
    with rank_processes(links, module, options, ranks) as (lines, *others):
        limit, since, label = START_S, time.monotonic(), "starting"
        while True:
            try:
                line = lines.get(timeout=max(0.1, since + limit - time.monotonic()))
            except queue.Empty:
                yield {"failed": f"did not finish in {limit:g} s"}
                return
            if line is None:
                yield {"failed": "a rank ended; its error output is above"}
                return
            message = json.loads(line)
            if "end" in message:
                _wait_for_end([lines, *others])
                return
            if "result" in message:
                yield message["result"]
                limit, since = START_S, time.monotonic()
            elif "begin" in message:
                label = f"{ranks} ranks, {where}: {message['begin']['method']}"
                limit, since = run.settings.limit_s, time.monotonic()
                run.tell(label)
            elif message["step"] % 10 == 0:
                run.tell(f"{label}, step {message['step']}")


def _wait_for_end(lines: Sequence[queue.SimpleQueue[str | None]]) -> None:
    """Wait until all ranks have ended: what the first one sent last may still be on its way to the others."""
    for one in lines:
        with suppress(queue.Empty):
            while one.get(timeout=END_S) is not None:
                pass
