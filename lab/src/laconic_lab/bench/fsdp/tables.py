"""Tables of FSDP benchmark Records, for the terminal and for pages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from laconic.records import Record
from laconic.units import show_bytes
from laconic_lab.bench.cluster.tables import ClusterTable
from laconic_lab.bench.fsdp.settings import way_of
from laconic_lab.bench.gpt.settings import show_link

__all__ = ["fsdp_tables"]

JUDGED_LINK, JUDGED_WAY = "100mbit", "laconic ef|qsgd:4"
SPEED_UP, FEWER_BYTES, COUNTED, ABOVE = 6.0, 50.0, 0.03, 0.01
"""Goals: of the step over the judged link, of local SGD's bytes at HSDP's loss, of the counts of bytes, of losses."""
_CHOICE = re.compile(r" --(ways ('[^']*'|\S+)|seed \d+)")
"""What differs between the commands of one table."""


def fsdp_tables(records: Sequence[Record]) -> list[ClusterTable]:
    """Return a table of steps for each link, and one of losses for each number of nodes."""
    timed = [record for record in records if record.kind == "bench.fsdp"]
    links = dict.fromkeys(record.values["link"] for record in timed)
    shown = [_steps([one for one in timed if one.values["link"] == link]) for link in links]
    by_nodes: dict[tuple[int, int], list[Record]] = {}
    for record in records:
        if record.kind == "bench.fsdp.loss":
            by_nodes.setdefault((record.values["nodes"], record.values["shards"]), []).append(record)
    return [*shown, *(_losses(one, first=not number) for number, one in enumerate(by_nodes.values()))]


def _steps(records: Sequence[Record]) -> ClusterTable:
    values = [record.values for record in records]
    first = values[0]
    rows = tuple(
        (
            v["title"], f"{1e3 * v['step_s']:.0f}", f"{v['step_speed_up']:.1f}",
            show_bytes(v["node_nbytes_per_step"]) if v["node_nbytes_per_step"] else "",
            "" if v["counted_nbytes_per_step"] is None else show_bytes(v["counted_nbytes_per_step"]),
        )
        for v in values
    )  # fmt: skip
    columns = ("way", "ms a step", "× HSDP", "sent by a node a step", "counted by `stats()`")
    doubt = "" if first["valid"] else " **The link was not what it should be: these times do not count.**"
    notes = f"{_setting(records[0])}, {show_link(first['link'])} between nodes.{doubt} By `{first['command']}`."
    return ClusterTable(
        f"fsdp-{first['link'].replace('+', '-')}", columns, rows, 1, notes, tuple(_step_verdicts(values))
    )


def _step_verdicts(values: Sequence[Mapping[str, Any]]) -> list[tuple[bool, str]]:
    verdicts = []
    for v in values:
        if v["link"] == JUDGED_LINK and v["way"] == JUDGED_WAY:
            text = f"a step of {v['title']} is {v['step_speed_up']:.1f} times as fast as HSDP's, at least {SPEED_UP:g}"
            verdicts.append(_verdict(v["step_speed_up"] >= SPEED_UP, text))
        if v["node_nbytes_per_step"] and v["counted_nbytes_per_step"]:
            error = abs(v["counted_nbytes_per_step"] / v["node_nbytes_per_step"] - 1)
            text = f"{v['title']}: counted bytes within {100 * error:.1f} % of the interface's, at most 3 %"
            verdicts.append(_verdict(error <= COUNTED, text))
    return verdicts


def _losses(records: Sequence[Record], first: bool = True) -> ClusterTable:
    """Return the table of trainings on equal nodes; all but the first are named by them."""
    by_way: dict[str, dict[int, Mapping[str, Any]]] = {}
    for record in records:
        by_way.setdefault(record.values["way"], {})[record.seed or 0] = record.values
    stock = {way.optimizer: by_way[name] for name in by_way if (way := way_of(name)).spec is None}
    rows, equal = [], []
    near: dict[bool, list[str]] = {True: [], False: []}
    small: dict[bool, list[str]] = {True: [], False: []}
    for name, runs in by_way.items():
        way, values = way_of(name), list(runs.values())
        title, same_optimizer = way.title, stock.get(way.optimizer, {})
        above = _above(runs, same_optimizer)
        reached = [v["reached_step"] for v in values if v["reached_step"] is not None]
        fewer = min((v["fewer_bytes"] or 0.0 for v in values), default=0.0)
        rows.append((
            title, f"{fmean(v['loss'] for v in values):.4f}", _percent(above), str(len(values)),
            f"{fmean(reached):.0f}" if len(reached) == len(values) else "not reached",
            show_bytes(fmean(v["node_nbytes_until_goal"] for v in values)), f"1/{fewer:.0f}" if fewer else "",
        ))  # fmt: skip
        if way.spec == "none":
            equal.append(_none_verdict(title, runs, same_optimizer))
        elif way.spec is not None and above:
            near[fmean(above) <= ABOVE].append(title)
        if way.every:
            small[fewer >= FEWER_BYTES].append(title)
    verdicts = [
        *equal,
        *_named(f"at most {100 * ABOVE:g} % above HSDP's loss by the same optimizer", near),
        *_named(f"LocalSGD with at most 1/{FEWER_BYTES:g} of HSDP's bytes until HSDP's loss by AdamW", small),
    ]
    columns = (
        "way", "last loss", "% above HSDP by the same optimizer", "seeds", "HSDP's loss after steps",
        "sent by a node until then", "bytes",
    )  # fmt: skip
    settings = records[0].values
    several = len({record.seed for record in records}) > 1
    seeds = " Seeds (`--seed`) are compared one by one; bytes are those of the worst." if several else ""
    commands = dict.fromkeys(f"`{_CHOICE.sub('', record.values['command'])}`" for record in records)
    notes = (
        f"{_setting(records[0])}, {settings['steps']} steps. Loss in nats a byte on held-out text; HSDP's loss is "
        f"AdamW's last, plus 0.2 %. HSDP's bytes are those of its all-reduces.{seeds} By {', '.join(commands)} with "
        "these `--ways`."
    )
    name = "fsdp-loss" if first else f"fsdp-loss-{settings['nodes']}x{settings['shards']}"
    return ClusterTable(name, columns, tuple(rows), 1, notes, tuple(verdicts))


def _named(goal: str, ways: Mapping[bool, Sequence[str]]) -> list[tuple[bool, str]]:
    """Return a verdict that names the ways that meet a goal, and one that names those that miss it."""
    return [_verdict(met, f"{goal}: {'; '.join(titles)}") for met, titles in ways.items() if titles]


def _none_verdict(
    title: str, runs: Mapping[int, Mapping[str, Any]], stock: Mapping[int, Mapping[str, Any]]
) -> tuple[bool, str]:
    """Judge whether the losses of ``none`` equal torch's."""
    pairs = [
        (ours[1], torchs[1])
        for seed in runs
        if seed in stock
        for ours, torchs in zip(runs[seed]["curve"], stock[seed]["curve"], strict=True)
    ]
    equal = bool(pairs) and all(a == b for a, b in pairs)
    return _verdict(equal, f"{title}: all losses equal those of torch's HSDP")


def _above(runs: Mapping[int, Mapping[str, Any]], stock: Mapping[int, Mapping[str, Any]]) -> list[float]:
    """Return by how much each seed's loss is above that of the same seed by torch's HSDP."""
    return [runs[seed]["loss"] / stock[seed]["loss"] - 1 for seed in runs if seed in stock]


def _percent(above: Sequence[float]) -> str:
    """Format the mean, with the least and the largest of several seeds."""
    if not above:
        return ""
    mean = f"{100 * fmean(above):+.2f}"
    return mean if len(above) == 1 else f"{mean} ({100 * min(above):+.2f} to {100 * max(above):+.2f})"


def _setting(record: Record) -> str:
    v, machine = record.values, record.machine
    training = v["training"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores; {v['nodes']} nodes of {v['shards']} ranks of one thread. A "
        f"byte-level GPT of {v['numel'] / 1e6:.2g} M parameters, {training['batch']} × {training['context']} bytes a "
        "rank and step"
    )


def _verdict(met: bool, text: str) -> tuple[bool, str]:
    return met, f"{text}: {'met' if met else 'missed'}"
