"""Tables of parameter-server benchmark Records, for the terminal and for pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from laconic.errors import FileError
from laconic.records import Record
from laconic_lab.bench.cluster.profiling import OF_FRAMES, STEPS

__all__ = ["ClusterTable", "tables"]

CPU_TARGETS = {("4", "homomorphic"): 0.25}
"""Goals: processor time of a server round relative to another method's."""
JUDGED = "vgg11"
"""Goals apply to a model of this size; other sizes are not judged."""
RATES = {"unshaped": "unshaped", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}


@dataclass(frozen=True)
class ClusterTable:
    """A table of text cells with ``words`` leading text columns, notes, and the outcome of each goal."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int
    notes: str
    verdicts: tuple[tuple[bool, str], ...] = ()


def tables(records: Sequence[Record]) -> list[ClusterTable]:
    """Return the tables of each part that the Records contain."""
    shown: list[ClusterTable] = []
    by_kind: dict[str, list[Record]] = {}
    for record in records:
        by_kind.setdefault(record.kind, []).append(record)
    if one := by_kind.get("cluster.aggregation"):
        shown += [_aggregation(one[0]), _steps(one[0])]
    if some := by_kind.get("cluster.round"):
        shown.append(_rounds(some, by_kind.get("cluster.link", [])))
        shown += [_processor(split)] if (split := _with_split(some)) else []
    if one := by_kind.get("cluster.load"):
        shown.append(_load(one[0]))
    if not shown:
        raise FileError("expected records of laconic bench cluster, got none")
    return shown


def _about(record: Record) -> str:
    cores = record.machine["cores"]
    return f"{record.machine['cpu']}, {cores} cores, torch {record.versions['torch']}"


def _verdict(met: bool, text: str) -> tuple[bool, str]:
    return met, f"{text}: {'met' if met else 'missed'}"


def _aggregation(record: Record) -> ClusterTable:
    v = record.values
    low, high = v["ratio_quartiles"]
    rows = (
        ("gRPC alone", _mb(v["bare_bytes_per_s"]), _ms(v["bare_s"]), _spread_ms(v["bare_quartiles_s"]), ""),
        (
            "parameter server", _mb(v["bytes_per_s"]), _ms(v["round_s"]), _spread_ms(v["round_quartiles_s"]),
            f"{v['ratio']:.2f} ({low:.2f}-{high:.2f})",
        ),
    )  # fmt: skip
    notes = (
        f"{_about(record)}, loopback, {v['workers']} workers, {v['numel']:,} values per worker (the slots of "
        f"{v['model']}), {v['nbytes_per_round'] / 1e6:.1f} MB per round up and down: medians and quartiles of "
        f"{v['rounds']} rounds of each, in turns. Measured by `{v['command']}`."
    )
    goal = f"{v['ratio']:.2f} of bare gRPC's throughput, at least {v['target']:.2f}"
    goals = (_verdict(v["ratio"] >= v["target"], goal),) if v["model"] == JUDGED else ()
    return ClusterTable("aggregation", ("", "MB/s", "ms a round", "quartiles", "of gRPC alone"), rows, 1, notes, goals)


def _steps(record: Record) -> ClusterTable:
    v = record.values
    steps = {step: v["steps"][step] for step in STEPS if step in v["steps"]}  # in the order of execution
    rows = [(step, _ms(one["wall_s"]), _ms(one["cpu_s"]), f"{one['calls']:.0f}") for step, one in steps.items()]
    wall, cpu = (sum(one[key] for one in steps.values()) for key in ("wall_s", "cpu_s"))
    rows.append(("the rest: gRPC, receiving, sending", "", _ms(v["server_cpu_s"] - cpu), ""))
    notes = (
        f"The server process with both workers, in separate profiled rounds "
        f"({_ms(v['marked_round_s'])} ms per round): {_ms(wall)} ms are our steps, partly concurrent; the "
        f"process took {_ms(v['server_cpu_s'])} ms of processor time per round and touched "
        f"{v['server_faults']:,.0f} pages of fresh memory, with bare gRPC {_ms(v['bare_server_cpu_s'])} ms and "
        f"{v['bare_server_faults']:,.0f}."
    )
    if v["not_clocked"]:
        notes += f" Not profiled, because they no longer exist: {', '.join(v['not_clocked'])}."
    return ClusterTable(
        "steps", ("the server's step", "ms a round", "of processor time", "calls"), tuple(rows), 1, notes
    )


def _rounds(records: Sequence[Record], links: Sequence[Record]) -> ClusterTable:
    rows, goals = [], []
    for record in records:
        v = record.values
        speed_up = "" if v["speed_up"] is None else f"{v['speed_up']:.3g}×"
        if v["target"] is not None and v["model"] == JUDGED:
            what = f"method {v['method']} at {_rate(v['rate'])} {speed_up}, at least {v['target']:g}×"
            goals.append(_verdict(v["valid"] and v["speed_up"] >= v["target"], what))
        rows.append(
            (
                _rate(v["rate"]) + ("" if v["valid"] else " (invalid)"), str(v["method"]), _seconds(v["round_s"]),
                "-".join(map(_seconds, v["round_quartiles_s"])), str(v["every"]), speed_up,
                *(_seconds(v[part]) for part in ("encode_s", "wait_s", "decode_s")),
                _kb(v["sent_nbytes_per_round"] + v["received_nbytes_per_round"]),
                f"{100 * v['link_over_frames']:+.1f} %" + ("" if v["link_agrees"] else " (!)"),
            )
        )  # fmt: skip
    first = records[0]
    if first.values["model"] == JUDGED:  # headers matter for small frames
        agree = all(record.values["link_agrees"] for record in records)
        goals.append(_verdict(agree, "the interface's byte count matches the frames', within 6 %"))
    measured = "; ".join(
        f"{_rate(link.values['rate'])}: "
        + ", ".join(f"{one['goodput'] / 1e6:,.1f} Mbit/s" for one in link.values["links"])
        for link in links
    )
    notes = (
        f"{_about(first)}; a server and {_workers(first)} workers, {first.values['numel']:,} values ({_slots(first)} "
        f"of {first.values['model']}), links emulated by {first.values['made_of']}. Goodput before the rounds, to "
        f"the server and from it: {measured}. A round lasts from the first worker's start of encoding to the "
        f"last worker's end of decoding: medians and quartiles. encode, wait and decode are those of the worker that "
        f"ended last; kB are the frames of all workers in both directions, link is the excess counted by the server's "
        f"interface. Measured by "
        f"`{first.values['command']}`."
    )
    columns = (
        "link", "method", "s a round", "quartiles", "iterations", f"of method {first.values['base']}", "encode", "wait",
        "decode", "kB a round", "link",
    )  # fmt: skip
    name = _name("rounds", first)
    return ClusterTable(name, columns, tuple(rows), 2, notes, tuple(goals))


def _workers(record: Record) -> str:
    count = record.values.get("workers", 2)
    return "two" if count == 2 else str(count)


def _slots(record: Record) -> str:
    return "all tensors as one, those" if record.values.get("slots") == 1 else "the slots"


def _name(part: str, record: Record) -> str:
    """Return the block name: ``rounds`` for two workers without bundling, a longer one otherwise."""
    words = [part, *([] if _workers(record) == "two" else [_workers(record)])]
    return "-".join([*words, *(["bundled"] if record.values.get("slots") == 1 else [])])


def _with_split(records: Sequence[Record]) -> list[Record]:
    """Return the Records of a rate that have the server's profile and a baseline to compare with."""
    split = [one for one in records if one.values.get("server_frames_cpu_s") is not None]
    pairs = {
        one.values["rate"]
        for one in split
        for base, method in CPU_TARGETS
        if one.values["method"] == method
        and any((two.values["rate"], two.values["method"]) == (one.values["rate"], base) for two in split)
    }
    return [one for one in split if one.values["rate"] in pairs]


def _processor(records: Sequence[Record]) -> ClusterTable:
    """Return the table of the server's processor time."""
    rows = []
    for record in records:
        v = record.values
        nbytes = v["sent_nbytes_per_round"] + v["received_nbytes_per_round"]
        moved = v["server_cpu_s"] - v["server_frames_cpu_s"]
        rows.append(
            (
                _rate(v["rate"]), str(v["method"]), _ms(v["server_cpu_s"]),
                *(_ms(v["server_steps_cpu_s"][step]) for step in OF_FRAMES), _ms(v["server_frames_cpu_s"]), _ms(moved),
                _kb(nbytes), f"{1e9 * moved / nbytes:.2f}",
            )
        )  # fmt: skip
    notes = (
        f"The server's processor time of a round with {_workers(records[0])} workers, {_slots(records[0])} of "
        f"{records[0].values['model']}, ms, in separate profiled "
        f"rounds with one thread per step: work on frames, and the rest, which moves bytes (gRPC, TLS "
        f"where links are network namespaces, the kernel's share), also in ns per byte. Measured by "
        f"`{records[0].values['command']}`."
    )
    columns = ("link", "method", "all", *OF_FRAMES, "with frames", "moving bytes", "kB a round", "ns a byte")
    name = _name("processor", records[0])
    goals = tuple(_processor_goals(records)) if records[0].values["model"] == JUDGED else ()
    return ClusterTable(name, columns, tuple(rows), 2, notes, goals)


def _processor_goals(records: Sequence[Record]) -> Iterator[tuple[bool, str]]:
    by_name = {(one.values["rate"], one.values["method"]): one.values for one in records}
    for (base, method), most in CPU_TARGETS.items():
        for rate in dict.fromkeys(rate for rate, _ in by_name):
            mine, others = by_name.get((rate, method)), by_name.get((rate, base))
            if mine is None or others is None:
                continue
            for key, what in (("server_cpu_s_per_round", "all"), ("server_frames_cpu_s", "work on frames")):
                share = mine[key] / others[key]
                text = (
                    f"the server's processor time by {method} at {_rate(rate)}, {what}: {share:.2f} of method {base}'s"
                )
                yield _verdict(share <= most, f"{text}, at most {most:g}")


def _load(record: Record) -> ClusterTable:
    v = record.values
    rows = (
        ("clients", f"{v['clients']}"),
        ("pushes acknowledged", f"{v['pushes']:,} ({v['pushes_per_s']:.0f} a second)"),
        ("pushes of one client", f"{v['pushes_of_a_client'][0]} to {v['pushes_of_a_client'][1]}"),
        ("errors", f"{len(v['errors'])}"),
        ("acknowledgement, median", f"{_ms(v['median_s'])} ms"),
        ("90 %, 99 %, longest", " / ".join(_ms(v[key]) for key in ("p90_s", "p99_s", "longest_s")) + " ms"),
        ("99 % over median", f"{v['p99_over_median']:.2f}"),
        ("memory at first, most, at last", " / ".join(f"{n / 1e6:,.0f}" for n in v["rss_nbytes"]) + " MB"),
        ("its trend after warm-up", f"{100 * v['rss_slope']:+.1f} %"),
        ("file descriptors, the same", " / ".join(map(str, v["descriptors"]))),
    )
    notes = (
        f"{_about(record)}, loopback, mode async, {v['seconds']:g} s of pushes of {v['push_nbytes']:,} bytes, each "
        f"answered with as many; clients are threads of {v['processes']} processes without torch, each with its "
        f"own connection, and share the machine's cores with the server. Measured by `{v['command']}`."
    )
    goals = (
        _verdict(not v["errors"], "no error"),
        _verdict(v["flat"], "memory and file descriptors grow by no more than 5 % after warm-up"),
        _verdict(v["p99_over_median"] <= v["target"], f"99 % within {v['target']:g} medians"),
    )
    return ClusterTable("load", ("", "measured"), rows, 1, notes, goals)


def _rate(rate: str) -> str:
    return RATES.get(rate, rate)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def _spread_ms(quartiles: Sequence[float]) -> str:
    return "-".join(map(_ms, quartiles))


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 1 else f"{seconds:.2f}"


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.0f}"


def _kb(nbytes: float) -> str:
    return f"{nbytes / 1e3:,.0f}"
