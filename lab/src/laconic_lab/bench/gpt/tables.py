"""Tables of GPT benchmark Records, for the terminal and for pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from laconic.records import Record
from laconic.units import show_bytes, show_time
from laconic_lab.bench.cluster.tables import ClusterTable
from laconic_lab.bench.ddp.links import SOCKETS
from laconic_lab.bench.gpt.methods import METHODS
from laconic_lab.bench.gpt.settings import PLAIN, GPTSettings, show_link

__all__ = ["gpt_tables"]

JUDGED_LINK = "100mbit+50ms"
SPEED_UP, WAITING, CONFIRMED = 10.0, 0.05, 0.10
"""Goals: times as fast to plain DDP's loss as the best of torch's ways; share of waiting; error of composed times."""
COLUMNS = (
    "method", "steps", "loss", "training, s", "ms a step", "waiting", "plain DDP's loss after, s", "× plain DDP",
    "sent a rank", "received", "bytes",
)  # fmt: skip


def gpt_tables(records: Sequence[Record]) -> list[ClusterTable]:
    """Return one table per number of ranks and link."""
    shown = []
    measured = [record for record in records if record.kind == "bench.gpt"]
    for key in dict.fromkeys((record.values["ranks"], record.values["link"]) for record in measured):
        chosen = {one.values["method"]: one for one in measured if (one.values["ranks"], one.values["link"]) == key}
        shown.append(_table(*key, list(chosen.values())))  # the last Record of each method
    return shown


def _table(ranks: int, link: str, records: Sequence[Record]) -> ClusterTable:
    by_method = {record.values["method"]: record.values for record in records if not record.values["failed"]}
    plain = by_method.get(PLAIN)
    rows = tuple(_row(record.values, plain) for record in records)
    name = f"gpt-{ranks}-{link.replace('+', '-')}"
    return ClusterTable(name, COLUMNS, rows, 1, _notes(records), tuple(_verdicts(link, by_method)))


def _row(v: Mapping[str, Any], plain: Mapping[str, Any] | None) -> tuple[str, ...]:
    title = METHODS[v["method"]].title if v["method"] in METHODS else v["method"]
    if v["failed"]:
        return (title, "", "fails", *[""] * (len(COLUMNS) - 3))
    speed_up, share = "", ""
    if plain is not None:
        if v["reached_s"] is not None and plain["reached_s"]:
            speed_up = f"{plain['reached_s'] / v['reached_s']:.1f}"
        if v["sent_nbytes"]:
            ratio = plain["sent_nbytes"] / v["sent_nbytes"]
            share = f"1/{ratio:.0f}" if ratio >= 1.5 else f"{1 / ratio:.2f}"
    nbytes = [show_bytes(v[name]) if v[name] else "" for name in ("sent_nbytes", "received_nbytes")]
    return (
        title, str(v["steps"]), f"{v['loss']:.3f}", f"{v['train_s']:.0f}", f"{1e3 * v['step_s']:.0f}",
        f"{100 * v['waiting_share']:.1f} %", "not reached" if v["reached_s"] is None else f"{v['reached_s']:.1f}",
        speed_up, *nbytes, share,
    )  # fmt: skip


def _notes(records: Sequence[Record]) -> str:
    machine, v = records[0].machine, records[0].values
    done = [record.values for record in records if not record.values["failed"]]
    training = v["training"]
    numel = f"{done[0]['numel'] / 1e6:.2g} M parameters" if done else "a GPT"
    confirmed = [one for one in done if one["real_s"] is not None and one["steps_timed"] > one["composed_from"]]
    timed = "; ".join(f"{METHODS[one['method']].title}: {one['steps_timed']}" for one in done)
    doubt = "" if v.get("valid", True) else " **The link was not what it should be: these times do not count.**"
    return (
        f"{machine['cpu']}, {machine['cores']} cores; {v['ranks']} ranks of one thread over {show_link(v['link'])}"
        f"{_measured(v)}.{doubt} A byte-level GPT of {numel}, {training['batch']} × {training['context']} "
        "bytes a rank and step. Loss in nats a byte on held-out text; the loss by step was measured without the link, "
        "which does not change it, the time by step over it. Plain DDP's loss is its last, plus 0.2 %. "
        f"Steps timed, of which the rest repeats the mean: {timed}. Evaluations are not timed. "
        + ("".join(f"{METHODS[one['method']].title}: {_deviation(one)}. " for one in confirmed))
        + f"By `{v['command']}`."
    )


def _measured(v: Mapping[str, Any]) -> str:
    measured = [
        f"{link['goodput'] / 1e6:.4g} Mbit/s, round trip {show_time(link['round_trip'])}" for link in v["links"][:1]
    ]
    kind = f"{SOCKETS}; " if v["made_of"] == SOCKETS else ""
    return f" ({kind}measured: {measured[0]})" if measured else ""


def _deviation(v: Mapping[str, Any]) -> str:
    error = v["composed_s"] / v["real_s"] - 1
    return f"composed {v['composed_s']:.0f} s, all {v['steps']} steps timed {v['real_s']:.0f} s ({100 * error:+.1f} %)"


def _verdicts(link: str, by_method: Mapping[str, Mapping[str, Any]]) -> list[tuple[bool, str]]:
    verdicts = []
    ours = {name: v for name, v in by_method.items() if v["ours"]}
    any_one = next(iter(by_method.values()), None)
    if any_one is None or any_one["training"] != GPTSettings().training():
        return []  # another model or too few steps
    fast = {name: v["reached_s"] for name, v in ours.items() if v["reached_s"] is not None}
    stock = {
        name: v["reached_s"]
        for name, v in by_method.items()
        if not (METHODS[name].every or METHODS[name].ours) and v["reached_s"] is not None
    }
    if link == JUDGED_LINK and ours and stock:
        best = min(stock, key=stock.__getitem__)
        mine = min(fast, key=fast.__getitem__, default=None)
        gain = 0.0 if mine is None else stock[best] / fast[mine]
        text = f"ours reaches plain DDP's loss {gain:.1f} times as fast as {METHODS[best].title}, at least {SPEED_UP:g}"
        verdicts.append(_verdict(gain >= SPEED_UP, text))
    for name, v in ours.items():
        if not METHODS[name].every:
            continue  # who exchanges gradients in every step waits for them
        text = f"{v['title']} waits {100 * v['waiting_share']:.1f} % of the time, under {100 * WAITING:g} %"
        verdicts.append(_verdict(v["waiting_share"] < WAITING, text))
    for v in by_method.values():
        if v["real_s"] is not None and v["steps_timed"] > v["composed_from"]:
            error = abs(v["composed_s"] / v["real_s"] - 1)
            text = f"{v['title']}: the composed time is within {100 * error:.1f} % of the real one, at most 10 %"
            verdicts.append(_verdict(error <= CONFIRMED, text))
    return verdicts


def _verdict(met: bool, text: str) -> tuple[bool, str]:
    return met, f"{text}: {'met' if met else 'missed'}"
