"""Tables of GPU benchmark Records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from laconic.records import Record
from laconic_lab.bench.cluster.tables import ClusterTable

__all__ = ["device_tables"]

STEP_ADDS = 5.0
"""Goal: percent of a bf16 step that encoding and decoding all gradients may add."""

OTHERS = {"feedback": "error feedback", "sum": "packed sums", "carried": "by an earlier threshold"}


def device_tables(records: Sequence[Record]) -> list[ClusterTable]:
    """Return the table of codecs and the table of training steps."""
    codecs = [record for record in records if record.kind == "bench.device.codec"]
    steps = [record for record in records if record.kind == "bench.device.step"]
    found = []
    if codecs:
        found.append(_codecs(next(record for record in records if record.kind == "bench.device"), codecs))
    if steps:
        found.append(_steps(steps))
    return found


def _codecs(device: Record, records: Sequence[Record]) -> ClusterTable:
    v = device.values
    rows = tuple(_row(record.values) for record in records)
    notes = (
        f"{device.machine.get('gpu', 'No GPU')}, torch {device.versions['torch']}, {v['numel']:,} gaussian float32, "
        f"median of {v['repeat']} rounds, each between two copies; in multiples of the copy's "
        f"{v['copy_payload_gb_per_s']:,.0f} GB/s of payload. A cast to fp16 runs at "
        f"{v['cast_to_fp16_x_copy']:.2f} and one from it at {v['cast_from_fp16_x_copy']:.2f}. Where sizes are fixed "
        "the launches alone are timed, as a CUDA graph holds them; else all that must be waited for. The last column "
        f"is a call for 4 MB; a launch by itself takes {v['launch_floor_us']:.0f} µs there. By `{v['command']}`."
    )
    goals = tuple(goal for record in records for goal in _goals(record.values))
    columns = (
        "codec", "bits per value", "encode", "decode", "add", "× plain torch, encode", "4 MB, encode / decode, µs",
    )  # fmt: skip
    return ClusterTable("device", columns, rows, 1, notes, goals)


def _judged(values: Mapping[str, Any], way: str) -> float | None:
    found = values.get(f"{way}_launch_x_copy", values.get(f"{way}_x_copy"))
    return None if found is None else float(found)


def _row(values: Mapping[str, Any]) -> tuple[str, ...]:
    speeds = [_judged(values, way) for way in ("encode", "decode", "accumulate")]
    plain = values.get("encode_x_plain_torch")
    small = [values.get(f"small_{way}_launch_us", values[f"small_{way}_us"]) for way in ("encode", "decode")]
    return (
        f"`{values['spec']}`",
        f"{values['bits_per_value']:.3f}",
        *("" if speed is None else f"{speed:.2f}" for speed in speeds),
        "" if plain is None else f"{plain:.1f}",
        " / ".join(f"{us:.0f}" for us in small),
    )


def _goals(values: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    for way in ("encode", "decode", "accumulate", *OTHERS):
        goal, speed = values.get(f"{way}_floor_x_copy"), _judged(values, way)
        if goal is not None and speed is not None:
            met = speed >= goal
            what = {"accumulate": "decode and add", **OTHERS}.get(way, way)
            yield met, f"`{values['spec']}` {what}: {speed:.2f} of {goal:g}, {'met' if met else 'missed'}"


def _steps(records: Sequence[Record]) -> ClusterTable:
    rows, goals, v = [], [], records[0].values
    for record in records:
        values = record.values
        cells = [f"`{values['spec']}`"]
        for step, way, added in (("step_bf16", "compressed", "added"), ("ddp", "attached", "attached_added")):
            low, high = values[f"{added}_percent_quartiles"]
            cells += [f"{1e3 * values[f'{step}_s']:.1f}", f"{1e3 * values[f'{way}_s']:.1f}",
                      f"{values[f'{added}_percent']:.1f} ({low:.1f} to {high:.1f})"]  # fmt: skip
        rows.append(tuple(cells))
        for added, how in (("added", "in place"), ("attached_added", "attached")):
            percent = values[f"{added}_percent"]
            met = percent < STEP_ADDS
            what = f"`{values['spec']}` {how} adds {percent:.1f} %, below {STEP_ADDS:g}: {'met' if met else 'missed'}"
            goals.append((met, what))
    notes = (
        f"{records[0].machine.get('gpu', 'No GPU')}: a step of {v['model']} in bf16 with {v['batch']} images, and the "
        f"same with all {v['values']:,} gradients encoded and decoded in place in {v['buckets']} buckets; then a step "
        "of DDP in a group of one rank, and the same attached: a frame of each slot, on the host and back. In "
        f"turns, {v['repeat']} of each; medians and quartiles. By `{v['command']}`."
    )
    columns = ("codec", "step, ms", "in place, ms", "added, %", "DDP's step, ms", "attached, ms", "added, %")
    return ClusterTable("device-step", columns, tuple(rows), 1, notes, tuple(goals))
