"""Sections about parts of laconic: the parameter server, codecs, layers, and faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from laconic.report.plots import Cell, Data, DataTable, Mark, Plot, Question, Section
from laconic.tables import Table
from laconic_lab.studies.homomorphic.plots import step_times

__all__ = ["cluster", "codecs", "device", "faults", "layers"]

Values = Mapping[str, Any]
Records = Mapping[str, Sequence[Values]]
Rows = list[tuple[Cell, ...]]


def bars_by_link(ident: str, title: str, about: str, columns: tuple[str, ...], rows: Rows) -> Plot:
    """Return bars of the third column by the second, for the link that the reader picks; the others are details."""
    link, series, value, *rest = columns
    return Plot(ident, title, about, "bars", Data(columns, rows), value, series, pick=link, detail=tuple(rest))


def cluster(records: Records) -> Section:
    """Return the rounds over links, and the memory of a server with many clients."""
    section = Section("cluster", "Parameter server", question=Question.SERVER)
    rows: Rows = [
        (f"{one['rate']}, {one['workers']} workers{', bundled' if one.get('slots') == 1 else ''}", one["method"],
         1e3 * one["round_s"], one["speed_up"],
         (one["sent_nbytes_per_round"] + one["received_nbytes_per_round"]) / 1e3)
        for one in records.get("cluster.round", [])
        if one.get("valid", True)
    ]  # fmt: skip
    if rows:
        columns = ("link", "method", "ms a round", "speed-up", "kB a round")
        note = "Median milliseconds without computation."
        section.plots.append(bars_by_link("cluster-rounds", "Rounds of a parameter server", note, columns, rows))
    for load in [one for one in records.get("cluster.load", []) if one.get("rss_over_time")][:1]:
        rows = [(second, nbytes / 1e6, files) for second, nbytes, files in load["rss_over_time"]]
        data = Data(("seconds", "MB resident", "descriptors"), rows)
        section.plots.append(
            Plot("cluster-load", f"A server with {load['clients']} clients", "Its memory.", "line", data, "seconds",
                 "MB resident", detail=("descriptors",))
        )  # fmt: skip
    return section


def codecs(records: Records) -> Section:
    """Return the speed of codecs by their size, beside that of other libraries."""
    rows: Rows = [
        ("laconic", codec["spec"], codec["bits_per_value"], codec["encode_x_memcpy"], codec["decode_x_memcpy"],
         codec["relative_squared_error"])
        for codec in records.get("bench.codec", [])
    ]  # fmt: skip
    rows += [
        ("other libraries", peer["name"], peer["bits_per_value"], peer.get("encode_x_memcpy"),
         peer.get("decode_x_memcpy"), peer["relative_squared_error"])
        for peer in records.get("bench.peer", [])
    ]  # fmt: skip
    data = Data(
        ("whose", "codec", "bits a value", "encode, × memcpy", "decode, × memcpy", "relative squared error"), rows
    )
    about = "Speed over that of a memcpy in the same run, by size."
    plots = [
        Plot(f"codec-{verb}", f"Codecs: {verb}", about, "points", data, "bits a value", f"{verb}, × memcpy",
             series="whose", detail=("codec", "relative squared error"), log="xy", marks=(Mark("y", 1.0, "memcpy"),))
        for verb in ("encode", "decode")
    ]  # fmt: skip
    return Section("bench-codec", "Codecs", plots=plots if rows else [])


def device(records: Records) -> Section:
    """Return the speed of codecs on a GPU, and what they add to a step."""
    section = Section("bench-device", "Codecs on a GPU")
    rows: Rows = [
        (codec["spec"], codec["bits_per_value"], codec["encode_x_copy"], codec["decode_x_copy"])
        for codec in records.get("bench.device.codec", [])
    ]
    data = Data(("codec", "bits a value", "encode, × copy", "decode, × copy"), rows)
    about = "Speed over that of a copy on the device in the same run."
    section.plots += [
        Plot(f"device-{verb}", f"On a GPU: {verb}", about, "bars", data, f"{verb}, × copy", "codec",
             detail=("bits a value",), marks=(Mark("x", 1.0, "copy"),))
        for verb in ("encode", "decode") if rows
    ]  # fmt: skip
    steps = {  # of several runs the last one
        (step["spec"], _step_name(step)): (step["attached_added_percent"], 1e3 * step["ddp_s"])
        for step in records.get("bench.device.step", [])
    }
    if steps:
        rows = [(*key, *figures) for key, figures in steps.items()]
        data = Data(("codec", "model", "% added to a step", "ms a step of DDP"), rows)
        section.plots.append(
            Plot("device-steps", "On a GPU: what attach adds", "Percent of plain DDP's step, on one device.", "bars",
                 data, "% added to a step", "codec", pick="model", detail=("ms a step of DDP",))
        )  # fmt: skip
    return section


def _step_name(step: Mapping[str, Any]) -> str:
    words = [f"{step['model']}, batch {step['batch']}", *(["compiled"] if step.get("compiled") else [])]
    words += [f"{step['accumulate']} passes"] if step.get("accumulate", 1) > 1 else []
    return ", ".join(words)


def layers(records: Records) -> Section:
    """Return the time of a step with compressed layers."""
    return Section("bench-layers", "Layers", plots=[step_times("layers-h", records.get("bench.layers", []))])


def faults(records: Records) -> Section:
    """Return the longest scenario of each fault, how many invariants were broken, and the kills of replicas."""
    by_fault: dict[tuple[str, str], list[Values]] = {}
    for scenario in records.get("faults.scene", []):
        by_fault.setdefault((scenario["fault"], scenario["mode"]), []).append(scenario)
    rows: Rows = [
        (fault, mode, len(scenarios), sum(one["broken"] is not None for one in scenarios),
         max(one["seconds"] for one in scenarios))
        for (fault, mode), scenarios in by_fault.items()
    ]  # fmt: skip
    section = Section("faults", "Faults", tables=_campaigns(records))
    if rows:
        data = Data(("fault", "mode", "scenarios", "invariants broken", "seconds, longest"), rows)
        section.plots.append(
            Plot("faults", "Faults", "The longest scenario of each fault.", "bars", data, "seconds, longest", "fault",
                 series="mode", detail=("scenarios", "invariants broken"))
        )  # fmt: skip
    return section


def _campaigns(records: Records) -> list[DataTable]:
    """Return one row for each campaign: what was run, its faults, and how many invariants broke."""
    scenes = records.get("faults.scene", [])
    rows: Rows = []
    if scenes:
        broken = sum(one["broken"] is not None for one in scenes)
        rows.append(("scenarios of a server", len(scenes), broken, sum(one["seconds"] for one in scenes)))
    random = records.get("faults.scenarios", [])
    if random:
        counts = (sum(one["count"] for one in random), sum(len(one["broken"]) for one in random))
        rows.append(("random scenarios of a server", *counts, sum(one["seconds"] for one in random)))
    kills = records.get("faults.kills", [])
    if kills:
        killed = sum(sum(one["killed"].values()) for one in kills)
        rows.append(("runs killed while they write", killed, sum(one["broken"] is not None for one in kills), None))
    rows += [
        (f"a server for {one['exchanges']:,} exchanges", one["faults"], int(one["broken"] is not None), one["seconds"])
        for one in records.get("faults.soak", [])
    ]
    rows += [
        (f"{one['replicas']} replicas of torchft, {one['spec']}, {one['steps']:,} steps", one["kills"],
         one["broken"] + one["differing_steps"] + one["unbalanced_steps"], one["seconds"])
        for one in records.get("faults.replicas", [])
    ]  # fmt: skip
    if not rows:
        return []
    columns = ("campaign", "faults", "invariants broken", "seconds")
    cells = [
        (str(name), f"{count:,}", f"{broken:,}", "" if seconds is None else f"{seconds:,.0f}")
        for name, count, broken, seconds in rows
    ]
    return [DataTable("campaigns", Table(columns, cells, title="Fault campaigns"), Data(columns, rows))]
