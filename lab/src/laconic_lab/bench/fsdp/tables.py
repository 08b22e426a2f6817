"""Tables of FSDP benchmark Records, for the terminal and for pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from laconic.records import Record
from laconic.units import show_bytes
from laconic_lab.bench.cluster.tables import ClusterTable
from laconic_lab.bench.fsdp.settings import Way, way_of
from laconic_lab.bench.gpt.settings import show_link

__all__ = ["fsdp_tables"]

JUDGED_LINK, JUDGED_WAY = "100mbit", "laconic ef|qsgd:4"
SPEED_UP, FEWER_BYTES, COUNTED, ABOVE = 6.0, 50.0, 0.03, 0.01
"""Goals: of the step over the judged link, of local SGD's bytes at HSDP's loss, of the counts of bytes, of losses."""


def fsdp_tables(records: Sequence[Record]) -> list[ClusterTable]:
    """Return a table of steps for each link, and one of losses."""
    timed = [record for record in records if record.kind == "bench.fsdp"]
    links = dict.fromkeys(record.values["link"] for record in timed)
    shown = [_steps([one for one in timed if one.values["link"] == link]) for link in links]
    losses = [record for record in records if record.kind == "bench.fsdp.loss"]
    return [*shown, _losses(losses)] if losses else shown


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


def _losses(records: Sequence[Record]) -> ClusterTable:
    values = [record.values for record in records]
    ways = [way_of(v["way"]) for v in values]
    stock = {way.optimizer: v["loss"] for way, v in zip(ways, values, strict=True) if way.spec is None}
    rows, verdicts = [], []
    for way, v in zip(ways, values, strict=True):
        above = v["loss"] / stock[way.optimizer] - 1 if way.optimizer in stock else None
        rows.append((
            v["title"], f"{v['loss']:.4f}", "" if above is None else f"{100 * above:+.2f}",
            "not reached" if v["reached_step"] is None else str(v["reached_step"]),
            show_bytes(v["node_nbytes_until_goal"]), "" if v["fewer_bytes"] is None else f"1/{v['fewer_bytes']:.0f}",
        ))  # fmt: skip
        # Local SGD is also compared with what most people train by: HSDP with AdamW, for as many steps.
        for optimizer in dict.fromkeys((way.optimizer, "adamw") if way.every else (way.optimizer,)):
            if way.spec is None or optimizer not in stock:
                continue
            above = v["loss"] / stock[optimizer] - 1
            title = Way("", optimizer).title
            text = f"{v['title']} ends {100 * above:+.2f} % above {title}, at most {100 * ABOVE:g} %"
            verdicts.append(_verdict(above <= ABOVE, text))
        if way.every:
            fewer = v["fewer_bytes"] or 0.0
            text = f"{v['title']} sends {fewer:.0f} times fewer bytes at HSDP's loss, at least {FEWER_BYTES:g}"
            verdicts.append(_verdict(fewer >= FEWER_BYTES, text))
    columns = (
        "way", "last loss", "% above HSDP by the same optimizer", "HSDP's loss after steps",
        "sent by a node until then", "bytes",
    )  # fmt: skip
    notes = (
        f"{_setting(records[0])}, {values[0]['steps']} steps. Loss in nats a byte on held-out text; HSDP's loss is "
        f"AdamW's last, plus 0.2 %. HSDP's bytes are those of its all-reduces. By `{values[0]['command']}`."
    )
    return ClusterTable("fsdp-loss", columns, tuple(rows), 1, notes, tuple(verdicts))


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
