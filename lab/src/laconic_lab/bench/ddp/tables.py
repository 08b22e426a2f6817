"""Tables of DDP benchmark Records, for the terminal and for pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from statistics import fmean, median, median_high
from typing import Any, NamedTuple

from laconic.records import Record
from laconic_lab.bench.cluster.tables import ClusterTable
from laconic_lab.bench.ddp.links import SOCKETS

__all__ = ["ddp_tables"]

RATES = {"unshaped": "unshaped", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
JUDGED = "vgg11"
EXCHANGE = {"laconic qsgd:4": 6.0, "laconic ef|thc:4": 4.0, "laconic ef|topk:0.01|qsgd:4": 30.0}
"""Goals: speed-up of an exchange over plain DDP at 100 Mbit/s."""
AT_GIGABIT = 3.0
NONE_COSTS = 1.05


def ddp_tables(records: Sequence[Record]) -> list[ClusterTable]:
    """Return one table per rate, and one per set of training runs."""
    shown = []
    trained = [record for record in records if record.kind == "bench.ddp.train"]
    for key in dict.fromkeys((record.values["rate"], record.values["ranks"]) for record in trained):
        shown.append(_trained(key, [one for one in trained if (one.values["rate"], one.values["ranks"]) == key]))
    records = [record for record in records if record.kind == "bench.ddp"]
    for rate in dict.fromkeys(record.values["rate"] for record in records):
        shown.append(_table(rate, [record for record in records if record.values["rate"] == rate]))
    return shown


class _Trained(NamedTuple):
    """Training with one exchange, over seeds."""

    accuracy: float
    points: float
    """Mean difference to plain DDP in points, seed by seed."""
    train_s: float
    reached_s: float
    """Infinite where fewer than half of the seeds reached the accuracy."""
    sent: float | None

    @classmethod
    def of(cls, runs: Sequence[Mapping[str, Any]]) -> _Trained:
        reached = [inf if v["reached_s"] is None else v["reached_s"] for v in runs]
        return cls(
            fmean(v["accuracy"] for v in runs), fmean(v["accuracy"] - v["plain_accuracy"] for v in runs),
            median(v["train_s"] for v in runs), median_high(reached), runs[0]["sent_nbytes_per_step"],
        )  # fmt: skip


def _trained(key: tuple[str, int], records: Sequence[Record]) -> ClusterTable:
    ways = dict.fromkeys(record.values["way"] for record in records)
    runs = {way: _Trained.of([one.values for one in records if one.values["way"] == way]) for way in ways}
    rows = tuple(
        (
            way, f"{run.accuracy:.2f}", f"{run.points:+.2f}", f"{run.train_s:.1f}",
            "" if run.reached_s == inf else f"{run.reached_s:.1f}", "" if run.sent is None else f"{run.sent / 1e3:.3g}",
        )
        for way, run in runs.items()
    )  # fmt: skip
    seeds = sorted({record.seed for record in records})
    v = records[0].values
    doubts = "".join(dict.fromkeys(_doubt(record.values) for record in records))
    notes = (
        f"{records[0].machine['cpu']}, {records[0].machine['cores']} cores; {v['model']} on {v['data']}, {key[1]} "
        f"ranks, {v['epochs']} epochs in {v['iterations']} steps of {v['batch']} examples a rank, "
        f"{'one seed' if len(seeds) == 1 else f'mean accuracy and median times of {len(seeds)} seeds'}; links as "
        f"measured: {_links(v)}.{doubts} The time is that of training alone, and of the first test within 0.3 points "
        f"of plain DDP's last. By `{v['command']}`{_further(seeds[1:])}."
    )
    goals = []
    for way, run in runs.items():
        if way.startswith("laconic ef|"):
            text = f"`{way}` ends {run.points:+.2f} points from plain DDP, at most 0.3 below"
            goals.append(_verdict(run.points >= -0.3, text))
    ours = {way: run.reached_s for way, run in runs.items() if way.startswith(("laconic", "local"))}
    stock = {way: run.reached_s for way, run in runs.items() if way not in ours and run.reached_s < inf}
    if len(stock) > 1 and min(ours.values(), default=inf) < inf:
        best, mine = min(stock, key=stock.__getitem__), min(ours, key=ours.__getitem__)
        gain = stock[best] / ours[mine]
        text = f"`{mine}` is {gain:.2f} times as fast to that accuracy as `{best}`, the best of torch's, at least 2"
        goals.append(_verdict(gain >= 2, text))
    columns = ("way", "accuracy, %", "points from ddp", "training, s", "as good as ddp after, s", "kB a step")
    return ClusterTable(f"ddp-train-{key[0]}-{key[1]}", columns, rows, 1, notes, tuple(goals))


def _further(seeds: Sequence[int | None]) -> str:
    return f", and with --seed {', '.join(map(str, seeds))}" if seeds else ""


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
    verdicts = []
    if rate == "100mbit":
        for way, goal in EXCHANGE.items():
            if way in by_way:
                gain = by_way[way]["exchange_speed_up"]
                verdicts.append(
                    _verdict(gain >= goal, f"`{way}` exchanges {gain:.1f} times as fast, at least {goal:g}")
                )
    if rate == "1gbit" and (best := _best(by_way, "laconic ")):
        gain = by_way[best]["exchange_speed_up"]
        verdicts.append(_verdict(gain >= AT_GIGABIT, f"`{best}` exchanges {gain:.1f} times as fast, at least 3"))
    if rate == "unshaped" and "laconic none" in by_way:
        cost = by_way["laconic none"]["step_s"] / by_way["ddp"]["step_s"]
        verdicts.append(
            _verdict(cost < NONE_COSTS, f"`none` takes {cost:.3f} of a plain step, less than {NONE_COSTS:g}")
        )
    return verdicts


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
