"""Records of benches and fault campaigns as plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from laconic.report.plots import Cell, Data, Mark, Plot
from laconic_lab.studies.homomorphic.plots import step_times

__all__ = ["cluster", "codecs", "ddp", "faults", "layers"]

Values = Mapping[str, Any]
Records = Mapping[str, Sequence[Values]]


def ddp(records: Records) -> list[Plot]:
    """Steps over links, and trainings."""
    found: list[Plot] = []
    steps = [one for one in records.get("bench.ddp", []) if one["failed"] is None]
    if steps:
        rows: list[tuple[Cell, ...]] = [
            (one["rate"], one["way"], 1e3 * one["step_s"], 1e3 * one["exposed_s"], one["step_speed_up"],
             (one["sent_nbytes_per_step"] or 0) / 1e3, one["relative_squared_error"])
            for one in steps
        ]  # fmt: skip
        columns = ("link", "way", "ms a step", "ms exposed", "speed-up", "kB sent", "relative squared error")
        data = Data(columns, rows)
        found += [
            Plot("ddp-steps", "DDP: a step", "Milliseconds of a step over each link.", "bars", data, "ms a step", "way",
                 pick="link", detail=("ms exposed", "speed-up", "kB sent")),
            Plot("ddp-error", "DDP: error against bytes", "What one exchange loses, by what a rank sends.", "points",
                 data, "kB sent", "relative squared error", series="way", pick="link", log="xy"),
        ]  # fmt: skip
    trainings = [one for one in records.get("bench.ddp.train", []) if one["failed"] is None]
    if trainings:
        rows = [
            (f"{one['model']}, {one['ranks']} ranks, {one['rate']}", one["way"], *point)
            for one in trainings
            for point in one["curve"]
        ]
        data = Data(("training", "way", "iteration", "seconds", "accuracy %"), rows)
        found.append(
            Plot("ddp-accuracy-time", "DDP: accuracy against time", "As trained.", "line", data, "seconds",
                 "accuracy %",
                 series="way", pick="training", detail=("iteration",))
        )  # fmt: skip
        sent: list[tuple[Cell, ...]] = [
            (f"{one['model']}, {one['ranks']} ranks, {one['rate']}", one["way"],
             one["sent_nbytes_per_step"] * point[0] * one["ranks"] / 1e6, point[2])
            for one in trainings if one["sent_nbytes_per_step"] is not None
            for point in one["curve"]
        ]  # fmt: skip
        if sent:
            data = Data(("training", "way", "MB sent", "accuracy %"), sent)
            found.append(
                Plot("ddp-accuracy-bytes", "DDP: accuracy against bytes", "MB sent by all ranks.", "line", data,
                     "MB sent", "accuracy %", series="way", pick="training", log="x")
            )  # fmt: skip
    return found


def cluster(records: Records) -> list[Plot]:
    """Rounds over links, and what 64 clients do to a server."""
    found: list[Plot] = []
    rounds = records.get("cluster.round", [])
    if rounds:
        rows: list[tuple[Cell, ...]] = [
            (f"{one['rate']}, {one['workers']} workers{', bundled' if one.get('slots') == 1 else ''}", one["method"],
             1e3 * one["round_s"], one["speed_up"],
             (one["sent_nbytes_per_round"] + one["received_nbytes_per_round"]) / 1e3)
            for one in rounds
        ]  # fmt: skip
        data = Data(("link", "method", "ms a round", "speed-up", "kB a round"), rows)
        found.append(
            Plot("cluster-rounds", "Rounds of a parameter server", "Median milliseconds, nothing computed.", "bars",
                 data,
                 "ms a round", "method", pick="link", detail=("speed-up", "kB a round"))
        )  # fmt: skip
    for one in records.get("cluster.load", [])[:1]:
        rows = [(second, nbytes / 1e6, files) for second, nbytes, files in one["rss_over_time"]]
        data = Data(("seconds", "MB resident", "descriptors"), rows)
        found.append(
            Plot("cluster-load", f"A server with {one['clients']} clients", "Its memory.", "line", data, "seconds",
                 "MB resident", detail=("descriptors",))
        )  # fmt: skip
    return found


def codecs(records: Records) -> list[Plot]:
    """How fast, and how small."""
    rows: list[tuple[Cell, ...]] = [
        (one["spec"], one["bits_per_value"], one["encode_x_memcpy"], one["decode_x_memcpy"],
         one["relative_squared_error"])
        for one in records.get("bench.codec", [])
    ]  # fmt: skip
    if not rows:
        return []
    data = Data(("codec", "bits a value", "encode, × memcpy", "decode, × memcpy", "relative squared error"), rows)
    return [
        Plot("codec-encode", "Codecs: encoding", "Speed over a memcpy's of the same run, by size.", "points", data,
             "bits a value", "encode, × memcpy", series="codec", detail=("relative squared error",), log="x",
             marks=(Mark("y", 1.0, "memcpy"),)),
        Plot("codec-decode", "Codecs: decoding", "Likewise.", "points", data, "bits a value", "decode, × memcpy",
             series="codec", detail=("relative squared error",), log="x", marks=(Mark("y", 1.0, "memcpy"),)),
    ]  # fmt: skip


def layers(records: Records) -> list[Plot]:
    """Return the time of a step with compressed layers."""
    return [step_times("layers-h", records.get("bench.layers", []))]


def faults(records: Records) -> list[Plot]:
    """How long each fault took to get over, and whether a promise broke."""
    scenes = records.get("faults.scene", [])
    if not scenes:
        return []
    kept: dict[tuple[str, str], list[Values]] = {}
    for one in scenes:
        kept.setdefault((one["fault"], one["mode"]), []).append(one)
    rows: list[tuple[Cell, ...]] = [
        (fault, mode, len(some), sum(one["broken"] is not None for one in some), max(one["seconds"] for one in some))
        for (fault, mode), some in kept.items()
    ]
    data = Data(("fault", "mode", "scenes", "promises broken", "seconds, longest"), rows)
    return [
        Plot("faults", "Faults", "The longest scene of each.", "bars", data, "seconds, longest", "fault", series="mode",
             detail=("scenes", "promises broken"))
    ]  # fmt: skip
