"""Records of the DDP bench as tables: the same for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from laconic.bench.cluster.tables import ClusterTable
from laconic.bench.ddp.links import SOCKETS
from laconic.records import Record

__all__ = ["ddp_tables"]

RATES = {"unshaped": "unshaped", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
JUDGED = "vgg11"
EXCHANGE = {"laconic qsgd:4": 6.0, "laconic ef|thc:4": 4.0, "laconic ef|topk:0.01|qsgd:4": 30.0}
"""Times as fast as plain DDP, per exchange, at 100 Mbit/s."""
AT_GIGABIT = 3.0
NONE_COSTS = 1.05


def ddp_tables(records: Sequence[Record]) -> list[ClusterTable]:
    """One a rate; of training runs another one."""
    found = []
    trained = [record for record in records if record.kind == "bench.ddp.train"]
    for key in dict.fromkeys((record.values["rate"], record.values["ranks"]) for record in trained):
        found.append(_trained(key, [one for one in trained if (one.values["rate"], one.values["ranks"]) == key]))
    records = [record for record in records if record.kind == "bench.ddp"]
    for rate in dict.fromkeys(record.values["rate"] for record in records):
        found.append(_table(rate, [record for record in records if record.values["rate"] == rate]))
    return found


def _trained(key: tuple[str, int], records: Sequence[Record]) -> ClusterTable:
    rows, by_way = [], {record.values["way"]: record.values for record in records}
    for way, v in by_way.items():
        sent, reached = v["sent_nbytes_per_step"], v["reached_s"]
        rows.append(
            (
                way, f"{v['accuracy']:.2f}", f"{v['accuracy'] - v['plain_accuracy']:+.2f}", f"{v['train_s']:.1f}",
                "" if reached is None else f"{reached:.1f}", "" if sent is None else f"{sent / 1e3:.3g}",
            )
        )  # fmt: skip
    v = records[0].values
    links = _links(v)
    notes = (
        f"{records[0].machine['cpu']}, {records[0].machine['cores']} cores; {v['model']} on {v['data']}, {key[1]} "
        f"ranks, {v['epochs']} epochs in {v['iterations']} steps of {v['batch']} examples a rank, one seed; links as "
        f"measured: {links}.{_doubt(v)} The time is that of training alone, and of the first test within 0.3 points "
        f"of plain DDP's last. By `{v['command']}`."
    )
    goals = []
    for way, v in by_way.items():
        if way.startswith("laconic ef|"):
            off = v["accuracy"] - v["plain_accuracy"]
            goals.append(_verdict(off >= -0.3, f"`{way}` ends {off:+.2f} points from plain DDP, at most 0.3 below"))
    stock = {way: v for way, v in by_way.items() if not way.startswith(("laconic", "local")) and v["reached_s"]}
    ours = {way: v for way, v in by_way.items() if way.startswith(("laconic", "local")) and v["reached_s"]}
    if len(stock) > 1 and ours:
        best, mine = min(stock, key=lambda w: stock[w]["reached_s"]), min(ours, key=lambda w: ours[w]["reached_s"])
        gain = stock[best]["reached_s"] / ours[mine]["reached_s"]
        text = f"`{mine}` is {gain:.2f} times as fast to that accuracy as `{best}`, the best of torch's, at least 2"
        goals.append(_verdict(gain >= 2, text))
    columns = ("way", "accuracy, %", "points from ddp", "training, s", "as good as ddp after, s", "kB a step")
    return ClusterTable(f"ddp-train-{key[0]}-{key[1]}", columns, tuple(rows), 1, notes, tuple(goals))


def _table(rate: str, records: Sequence[Record]) -> ClusterTable:
    rows = []
    for record in records:
        v = record.values
        if v["failed"]:
            rows.append((v["way"], "hung" if v["failed"] == "hung" else "fails", "", "", "", "", ""))
            continue
        low, high = v["step_quartiles_s"]
        rows.append(
            (
                v["way"], _ms(v["step_s"]), f"{_ms(low)} to {_ms(high)}", _ms(v["exposed_s"]),
                f"{v['exchange_speed_up']:.2f}", f"{v['sent_nbytes_per_step'] / 1e6:.3g}",
                f"{v['relative_squared_error']:.2g}",
            )
        )  # fmt: skip
    v = records[0].values
    links = _links(v)
    notes = (
        f"{records[0].machine['cpu']}, {records[0].machine['cores']} cores, torch {records[0].versions['torch']}; "
        f"{v['ranks']} ranks of one thread, {v['numel']:,} values (the parameters of {v['model']}); a step without an "
        f"exchange takes {_ms(v['compute_s'])} ms. Medians and quartiles in milliseconds of steps in turns; link as "
        f"measured: {links}.{_doubt(v)} By `{v['command']}`."
    )
    columns = ("way", "step", "quartiles", "exchange", "× ddp, exchange", "MB sent a rank", "squared error")
    return ClusterTable(f"ddp-{rate}", columns, tuple(rows), 1, notes, tuple(_verdicts(rate, records)))


def _verdicts(rate: str, records: Sequence[Record]) -> list[tuple[bool, str]]:
    by_way = {record.values["way"]: record.values for record in records if not record.values["failed"]}
    if records[0].values["model"] != JUDGED:
        return []
    found = []
    if rate == "100mbit":
        for way, goal in EXCHANGE.items():
            if way in by_way:
                gain = by_way[way]["exchange_speed_up"]
                found.append(_verdict(gain >= goal, f"`{way}` exchanges {gain:.1f} times as fast, at least {goal:g}"))
    if rate == "1gbit" and (best := _best(by_way, "laconic ")):
        gain = by_way[best]["exchange_speed_up"]
        found.append(_verdict(gain >= AT_GIGABIT, f"`{best}` exchanges {gain:.1f} times as fast, at least 3"))
    if rate == "unshaped" and "laconic none" in by_way:
        cost = by_way["laconic none"]["step_s"] / by_way["ddp"]["step_s"]
        found.append(_verdict(cost < NONE_COSTS, f"`none` takes {cost:.3f} of a plain step, less than {NONE_COSTS:g}"))
    return found


def _links(v: Mapping[str, Any]) -> str:
    measured = ", ".join(f"{link['goodput'] / 1e6:.4g} Mbit/s" for link in v["links"]) or "loopback"
    return measured + (f" ({SOCKETS})" if v.get("made_of") == SOCKETS else "")


def _doubt(v: Mapping[str, Any]) -> str:
    return "" if v.get("valid", True) else " **The link was not what it should be: these figures do not count.**"


def _best(by_way: Mapping[str, Mapping[str, Any]], prefix: str) -> str | None:
    ways = [way for way in by_way if way.startswith(prefix)]
    return max(ways, key=lambda way: by_way[way]["exchange_speed_up"]) if ways else None


def _verdict(met: bool, text: str) -> tuple[bool, str]:
    return met, f"{text}: {'met' if met else 'missed'}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"
