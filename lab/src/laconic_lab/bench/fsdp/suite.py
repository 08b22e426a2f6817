"""Runs the FSDP benchmark: nodes with a slow link between them, steps timed over it, losses without it."""

from __future__ import annotations

import json
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from laconic.errors import ConfigError, LaconicError
from laconic.records import Record
from laconic.units import parse_time
from laconic_lab.bench.ddp.links import Links, Namespaces, connected
from laconic_lab.bench.ddp.suite import rank_processes
from laconic_lab.bench.fsdp.settings import PLAIN, FSDPSettings, way_of
from laconic_lab.bench.gpt.settings import link_parts
from laconic_lab.network import Host, Lab, unique_name

__all__ = ["run_fsdp"]

Tell = Callable[[str], None]
START_S, END_S = 180.0, 20.0
AS_GOOD = 0.002
"""Relative difference to HSDP's last loss that counts as equal."""


@contextmanager
def _nodes(link: str, settings: FSDPSettings) -> Iterator[Links]:
    """Provide nodes with a link between them; without a rate all ranks run on loopback."""
    rate, delay = link_parts(link)
    if rate is None:
        with connected(None, settings.nodes * settings.shards, paced=True) as links:
            yield links
        return
    if os.geteuid() != 0:
        raise ConfigError(
            f"link {link!r}: slow links between nodes of several ranks need network namespaces, so run this as root, "
            "or use --links unshaped"
        )
    half = f"{parse_time(delay) / 2:g}s"
    with Lab(unique_name("fsdp"), [Host(rate=rate, delay=half)] * settings.nodes) as lab:
        yield Namespaces(lab, settings.shards)


def run_fsdp(settings: FSDPSettings, tell: Tell = lambda what: None) -> list[Record]:
    """Time all ways over all links, then train by each without a link."""
    records: list[Record] = []
    common = {"training": settings.training(), "command": settings.command()}
    for link in settings.links if settings.timed_steps else ():
        records += [Record("bench.fsdp", common | values, settings.seed) for values in _times(link, settings, tell)]
    if settings.loss_steps:
        records += [Record("bench.fsdp.loss", common | values, settings.seed) for values in _losses(settings, tell)]
    return records


def _times(link: str, settings: FSDPSettings, tell: Tell) -> list[dict[str, Any]]:
    tasks = [{"part": "time", "way": name, "steps": settings.timed(way_of(name))} for name in settings.ways]
    with _nodes(link, settings) as links:
        shaped = link_parts(link)[0] is not None
        before = links.measure() if shaped else []
        results = list(_results(links, settings, tasks, lambda what: tell(f"{link}: {what}")))
        after = links.measure() if shaped else []
    plain = next(result for task, result in results if task["way"] == PLAIN)
    plain_s = sum(plain["seconds"]) / len(plain["seconds"])
    records = []
    for task, result in results:
        step_s = sum(result["seconds"]) / len(result["seconds"])
        records.append({
            "link": link, "way": task["way"], "title": way_of(task["way"]).title, "nodes": settings.nodes,
            "shards": settings.shards, "made_of": links.made_of, "links": [one.values() for one in before],
            "links_after": [one.values() for one in after], "valid": all(one.valid for one in before + after),
            "numel": result["numel"], "steps_timed": len(result["seconds"]), "seconds": result["seconds"],
            "step_s": step_s, "step_speed_up": plain_s / step_s, "node_nbytes_per_step": result["node_nbytes"],
            "counted_nbytes_per_step": result["counted_nbytes"],
        })  # fmt: skip
    return records


def _losses(settings: FSDPSettings, tell: Tell) -> list[dict[str, Any]]:
    tasks = [{"part": "loss", "way": name, "steps": settings.loss_steps} for name in settings.ways]
    with connected(None, settings.nodes * settings.shards, paced=True) as links:
        results = list(_results(links, settings, tasks, lambda what: tell(f"loss: {what}")))
    plain = next(result for task, result in results if task["way"] == PLAIN)
    goal, records = plain["curve"][-1][1] * (1 + AS_GOOD), []
    # torch does not count its bytes: its all-reduces between nodes are those of float32 gradients.
    dense = 4 * plain["numel"] * 2 * (settings.nodes - 1) / settings.nodes * settings.loss_steps
    for task, result in results:
        counted = result["counted_nbytes"]
        reached = next((step for step, loss in result["curve"] if loss <= goal), None)
        nbytes = dense if counted is None else counted
        share = 1.0 if reached is None else reached / settings.loss_steps
        records.append({
            "way": task["way"], "title": way_of(task["way"]).title, "nodes": settings.nodes, "shards": settings.shards,
            "numel": result["numel"], "steps": settings.loss_steps, "curve": result["curve"],
            "loss": result["curve"][-1][1], "goal_loss": goal, "reached_step": reached,
            "node_nbytes": nbytes, "nbytes_counted": counted is not None, "node_nbytes_until_goal": nbytes * share,
            "fewer_bytes": dense / (nbytes * share) if reached else None, "text_sha256": result["text_sha256"],
        })  # fmt: skip
    return records


def _results(
    links: Links, settings: FSDPSettings, tasks: Sequence[dict[str, Any]], tell: Tell
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each task with its result; all run in the same processes."""
    address, port = links.store()
    longest = max(task["steps"] for task in tasks) + 1
    options = settings.training() | {
        "store": f"tcp://{address}:{port}", "interface": links.interface, "tasks": list(tasks), "longest": longest,
        "seed": settings.seed, "data_dir": os.environ.get("LACONIC_DATA"),
    }  # fmt: skip
    left, module = list(tasks), "laconic_lab.bench.fsdp.rank"
    with rank_processes(links, module, options, settings.nodes * settings.shards) as (lines, *others):
        limit, since, label = START_S, time.monotonic(), "starting"
        while True:
            try:
                line = lines.get(timeout=max(0.1, since + limit - time.monotonic()))
            except queue.Empty:
                raise LaconicError(f"{label!r} did not finish in {limit:g} s") from None
            if line is None:
                raise LaconicError(f"a rank ended while measuring {label!r}; its error output is above")
            message = json.loads(line)
            if "end" in message:
                for each in (lines, *others):
                    with suppress(queue.Empty):
                        while each.get(timeout=END_S) is not None:
                            pass
                return
            if "result" in message:
                yield left.pop(0), message["result"]
                limit, since = START_S, time.monotonic()
            elif "begin" in message:
                label = message["begin"]["way"]
                limit, since = settings.limit_s, time.monotonic()
                tell(label)
            elif message["step"] % 10 == 0:
                tell(f"{label}, step {message['step']}")
