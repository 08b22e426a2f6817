"""Plots of benchmarks and fault campaigns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from laconic.report.plots import Cell, Data, Mark, Plot
from laconic_lab.studies.homomorphic.plots import step_times

__all__ = ["cluster", "codecs", "ddp", "faults", "gpt", "layers"]

Values = Mapping[str, Any]
Records = Mapping[str, Sequence[Values]]
Rows = list[tuple[Cell, ...]]


def ddp(records: Records) -> list[Plot]:
    """Return the steps over links, and the trainings."""
    plots: list[Plot] = []
    steps = [step for step in records.get("bench.ddp", []) if step["failed"] is None]
    if steps:
        rows: Rows = [
            (step["rate"], step["way"], 1e3 * step["step_s"], 1e3 * step["exposed_s"], step["step_speed_up"],
             (step["sent_nbytes_per_step"] or 0) / 1e3, step["relative_squared_error"])
            for step in steps
        ]  # fmt: skip
        columns = ("link", "way", "ms a step", "ms exposed", "speed-up", "kB sent", "relative squared error")
        data = Data(columns, rows)
        plots += [
            Plot("ddp-steps", "DDP: time of a step", "Milliseconds of a step over each link.", "bars", data,
                 "ms a step", "way", pick="link", detail=("ms exposed", "speed-up", "kB sent")),
            Plot("ddp-error", "DDP: error by bytes", "Error of one exchange by the bytes that a rank sends.", "points",
                 data, "kB sent", "relative squared error", series="way", pick="link", log="xy"),
        ]  # fmt: skip
    trainings = [training for training in records.get("bench.ddp.train", []) if training["failed"] is None]
    if trainings:
        plots += _ddp_trainings(trainings)
    return plots


def _ddp_trainings(trainings: Sequence[Values]) -> list[Plot]:
    by_time: Rows = []
    by_bytes: Rows = []
    for training in trainings:
        name = f"{training['model']}, {training['ranks']} ranks, {training['rate']}"
        per_step = training["sent_nbytes_per_step"]
        for iteration, seconds, accuracy in training["curve"]:
            by_time.append((name, training["way"], iteration, seconds, accuracy))
            if per_step is not None:
                sent = per_step * iteration * training["ranks"] / 1e6
                by_bytes.append((name, training["way"], sent, accuracy))
    data = Data(("training", "way", "iteration", "seconds", "accuracy %"), by_time)
    plots = [
        Plot("ddp-accuracy-time", "DDP: accuracy by time", "As trained.", "line", data, "seconds", "accuracy %",
             series="way", pick="training", detail=("iteration",))
    ]  # fmt: skip
    if by_bytes:
        data = Data(("training", "way", "MB sent", "accuracy %"), by_bytes)
        plots.append(
            Plot("ddp-accuracy-bytes", "DDP: accuracy by bytes", "MB sent by all ranks.", "line", data, "MB sent",
                 "accuracy %", series="way", pick="training", log="x")
        )  # fmt: skip
    return plots


def gpt(records: Records) -> list[Plot]:
    """Return the loss of a GPT by time over each link, and the bytes that it took."""
    trainings = [one for one in records.get("bench.gpt", []) if one["failed"] is None]
    if not trainings:
        return []
    rows: Rows = []
    totals: Rows = []
    marks = []
    for one in trainings:
        name = f"{one['ranks']} ranks, {one['link']}"
        rows += [(name, one["title"], seconds, loss, step) for step, seconds, loss in one["curve"]]
        totals.append((name, one["title"], one["sent_nbytes"] / 1e6, one["loss"], 100 * one["waiting_share"]))
        if one["method"] == "ddp":
            marks.append(one["goal_loss"])
    data = Data(("training", "method", "seconds", "loss", "step"), rows)
    # The last losses of plain DDP differ between numbers of ranks; a line for one of several would mislead.
    goal = (Mark("y", marks[0], "plain DDP's last loss"),) if len(set(marks)) == 1 else ()
    plots = [
        Plot("gpt-loss-time", "GPT: loss by time", "Nats a byte on held-out text; evaluations are not timed.", "line",
             data, "seconds", "loss", series="method", pick="training", detail=("step",), log="x", marks=goal)
    ]  # fmt: skip
    if any(sent for _, _, sent, _, _ in totals):
        data = Data(("training", "method", "MB sent", "loss", "waiting %"), totals)
        plots.append(
            Plot("gpt-loss-bytes", "GPT: last loss by bytes", "MB that a rank sends.", "points", data, "MB sent",
                 "loss", series="method", pick="training", detail=("waiting %",), log="x")
        )  # fmt: skip
    return plots


def cluster(records: Records) -> list[Plot]:
    """Return the rounds over links, and the memory of a server with many clients."""
    plots: list[Plot] = []
    rows: Rows = [
        (f"{one['rate']}, {one['workers']} workers{', bundled' if one.get('slots') == 1 else ''}", one["method"],
         1e3 * one["round_s"], one["speed_up"],
         (one["sent_nbytes_per_round"] + one["received_nbytes_per_round"]) / 1e3)
        for one in records.get("cluster.round", [])
    ]  # fmt: skip
    if rows:
        data = Data(("link", "method", "ms a round", "speed-up", "kB a round"), rows)
        plots.append(
            Plot("cluster-rounds", "Rounds of a parameter server", "Median milliseconds without computation.", "bars",
                 data, "ms a round", "method", pick="link", detail=("speed-up", "kB a round"))
        )  # fmt: skip
    for load in records.get("cluster.load", [])[:1]:
        rows = [(second, nbytes / 1e6, files) for second, nbytes, files in load["rss_over_time"]]
        data = Data(("seconds", "MB resident", "descriptors"), rows)
        plots.append(
            Plot("cluster-load", f"A server with {load['clients']} clients", "Its memory.", "line", data, "seconds",
                 "MB resident", detail=("descriptors",))
        )  # fmt: skip
    return plots


def codecs(records: Records) -> list[Plot]:
    """Return the speed of codecs by their size."""
    rows: Rows = [
        (codec["spec"], codec["bits_per_value"], codec["encode_x_memcpy"], codec["decode_x_memcpy"],
         codec["relative_squared_error"])
        for codec in records.get("bench.codec", [])
    ]  # fmt: skip
    if not rows:
        return []
    data = Data(("codec", "bits a value", "encode, × memcpy", "decode, × memcpy", "relative squared error"), rows)
    about = "Speed over that of a memcpy in the same run, by size."
    return [
        Plot(f"codec-{verb}", f"Codecs: {verb}", about, "points", data, "bits a value", f"{verb}, × memcpy",
             series="codec", detail=("relative squared error",), log="x", marks=(Mark("y", 1.0, "memcpy"),))
        for verb in ("encode", "decode")
    ]  # fmt: skip


def layers(records: Records) -> list[Plot]:
    """Return the time of a step with compressed layers."""
    return [step_times("layers-h", records.get("bench.layers", []))]


def faults(records: Records) -> list[Plot]:
    """Return the longest scenario of each fault, and how many invariants were broken."""
    by_fault: dict[tuple[str, str], list[Values]] = {}
    for scenario in records.get("faults.scene", []):
        by_fault.setdefault((scenario["fault"], scenario["mode"]), []).append(scenario)
    rows: Rows = [
        (fault, mode, len(scenarios), sum(one["broken"] is not None for one in scenarios),
         max(one["seconds"] for one in scenarios))
        for (fault, mode), scenarios in by_fault.items()
    ]  # fmt: skip
    if not rows:
        return []
    data = Data(("fault", "mode", "scenarios", "invariants broken", "seconds, longest"), rows)
    return [
        Plot("faults", "Faults", "The longest scenario of each fault.", "bars", data, "seconds, longest", "fault",
             series="mode", detail=("scenarios", "invariants broken"))
    ]  # fmt: skip
