"""Tables of GPU benchmark Records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from laconic.records import Record
from laconic_lab.bench.cluster.tables import ClusterTable

__all__ = ["device_tables"]

DIFFERENCES = ("kernels, ms", "copies, ms", "kernels", "waits")

OTHERS = {"feedback": "error feedback", "sum": "packed sums", "carried": "by an earlier threshold"}


def device_tables(records: Sequence[Record]) -> list[ClusterTable]:
    """Return the tables of codecs, of training steps, of their profiles, also before, and of exchanges by LocalSGD."""
    codecs = [record for record in records if record.kind == "bench.device.codec"]
    steps = [record for record in records if record.kind == "bench.device.step"]
    tables = []
    if codecs:
        tables.append(_codecs(next(record for record in records if record.kind == "bench.device"), codecs))
    if steps:
        tables.append(_steps(steps))
    if profiled := [record for record in steps if "attached_profile" in record.values]:
        tables.append(_profiles(profiled))
    if before := [record for record in records if record.kind == "bench.device.before"]:
        tables.append(_before(before))
    if local := [record for record in records if record.kind == "bench.device.local"]:
        tables.append(_local(local))
    return tables


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
    ratio = values.get(f"{way}_launch_x_copy", values.get(f"{way}_x_copy"))
    return None if ratio is None else float(ratio)


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


def _by_step(records: Sequence[Record]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the values of the runs of each step and codec, in the order of time."""
    runs: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in sorted(records, key=lambda record: record.at):
        runs.setdefault((_workload(record.values), record.values["spec"]), []).append(record.values)
    yield from runs.values()


def _longest(runs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the run of most turns, the latest of those: where the host is slow, a few turns decide nothing."""
    return max(reversed(runs), key=lambda values: values["turns"])


def _steps(records: Sequence[Record]) -> ClusterTable:
    rows, goals = [], []
    for runs in _by_step(records):
        judged = _longest(runs)
        limit, memory = judged.get("limit_percent"), judged.get("added_peak_bytes")
        rows.append((
            _workload(judged), f"`{judged['spec']}`",
            *(" / ".join(f"{1e3 * values[f'{which}_s']:.1f}" for values in runs) for which in ("ddp", "attached")),
            " / ".join(map(_added, runs)), "" if limit is None else f"{limit:g}",
            "" if memory is None else f"{memory / judged['fp32_bytes']:.2f}",
            " / ".join(str(values["turns"]) for values in runs),
        ))  # fmt: skip
        if limit is not None:
            added = judged["attached_added_percent"]
            what = f"{_workload(judged)}, `{judged['spec']}` adds {added:.1f} %, at most {limit:g}"
            goals.append((added <= limit, f"{what}: {'met' if added <= limit else 'missed'}"))
    notes = (
        f"{records[0].machine.get('gpu', 'No GPU')}, torch {records[0].versions['torch']}: a forward and backward pass "
        "in bf16 of DDP in a group of one rank, plain and attached, in turns; medians and quartiles of the percentage. "
        "Several runs, on other machines of this kind, are separated by strokes; a goal is judged by the run of most "
        "turns. *Added memory* is what the codec adds to the peak, in multiples of all gradients in float32. By "
        f"{_commands(records)}."
    )
    columns = ("step", "codec", "plain, ms", "attached, ms", "added, %", "goal, %", "added memory", "turns")
    return ClusterTable("device-step", columns, tuple(rows), 2, notes, tuple(goals))


def _added(values: Mapping[str, Any]) -> str:
    low, high = values["attached_added_percent_quartiles"]
    return f"{values['attached_added_percent']:.1f} ({low:.1f} to {high:.1f})"


def _profiles(records: Sequence[Record]) -> ClusterTable:
    rows = [
        (_workload(values), f"`{values['spec']}`", *_differences(values), *_host_and_step(values))
        for values in map(_longest, _by_step(records))
    ]
    notes = (
        "What an attached step has more than a plain one: milliseconds of kernels and of copies, numbers of kernels "
        "and of waits of the host, milliseconds until the host has launched the step, and milliseconds of the step. "
        "Kernels run beside those of backward, so the step grows by less than their sum."
    )
    columns = ("step", "codec", *DIFFERENCES, "host, ms", "step, ms")
    return ClusterTable("device-profile", columns, tuple(rows), 2, notes)


def _before(records: Sequence[Record]) -> ClusterTable:
    """Return the steps of earlier code; the Records were given a kind of their own."""
    rows = [
        (
            _workload(values), f"`{values['spec']}`", _added(values), *_differences(values), *_host_and_step(values),
            str(values["turns"]),
        )
        for runs in _by_step(records) for values in runs
    ]  # fmt: skip
    columns = ("step", "codec", "added, %", *DIFFERENCES, "host, ms", "step, ms", "turns")
    commits = ", ".join(dict.fromkeys(str(record.commit) for record in records))
    notes = f"Code of commit {commits}, in the same hour and on the same machine as the first runs of its successor."
    return ClusterTable("device-before", columns, tuple(rows), 2, notes)


def _host_and_step(values: Mapping[str, Any]) -> tuple[str, str]:
    """Return how much later the host has launched an attached step, and how much longer the step takes."""
    return (
        f"{1e3 * (values['attached_launched_s'] - values['ddp_launched_s']):.1f}",
        f"{1e3 * (values['attached_s'] - values['ddp_s']):.1f}",
    )


def _differences(values: Mapping[str, Any]) -> list[str]:
    """Return what an attached step has more than a plain one."""
    plain, attached = values["ddp_profile"], values["attached_profile"]
    return [
        *(f"{attached[part]['ms'] - plain[part]['ms']:.1f}" for part in ("kernels", "copies")),
        *(f"{attached[part]['count'] - plain[part]['count']:,.0f}" for part in ("kernels", "waits")),
    ]


def _local(records: Sequence[Record]) -> ClusterTable:
    rows, goals = [], []
    for record in records:
        values = record.values
        low, high = values["exchange_quartiles_s"]
        seconds, limit = values["exchange_s"], values["limit_s"]
        rows.append((
            values["model"], f"`{values['spec']}`", f"{values['values']:,}",
            f"{1e3 * seconds:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})",
        ))  # fmt: skip
        met = seconds < limit
        what = f"`LocalSGD` exchanges {values['values']:,} parameters by `{values['spec']}` in {1e3 * seconds:.1f} ms"
        goals.append((met, f"{what}, below {1e3 * limit:g}: {'met' if met else 'missed'}"))
    notes = f"An exchange of all parameters by `LocalSGD` in a group of one rank. By {_commands(records)}."
    return ClusterTable("device-local", ("model", "codec", "parameters", "exchange, ms"), tuple(rows), 2, notes,
                        tuple(goals))  # fmt: skip


def _workload(values: Mapping[str, Any]) -> str:
    words = [f"{values['model']}, {values.get('examples', str(values['batch']) + ' images')}"]
    words += ["compiled"] if values.get("compiled") else []
    words += [f"{values['accumulate']} backward passes"] if values.get("accumulate", 1) > 1 else []
    words += [f"residuals {values['residuals']}"] if values.get("residuals", "fp32") != "fp32" else []
    return ", ".join(words)


def _commands(records: Sequence[Record]) -> str:
    return ", ".join(f"`{command}`" for command in dict.fromkeys(record.values["command"] for record in records))
