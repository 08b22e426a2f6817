"""Markdown tables of benchmark and demo Records, by the name of the block that shows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from laconic.errors import FileError
from laconic.records import Record
from laconic.report import compare
from laconic.report.summary import WORDS
from laconic.tables import Table
from laconic.train.methods import METHODS
from laconic_lab.bench.cluster import ClusterTable, tables
from laconic_lab.bench.codec_results import GAUSSIAN, JUDGED_NUMEL, SMALL_LIMIT_US, floors_of
from laconic_lab.bench.ddp import ddp_tables
from laconic_lab.bench.device_tables import device_tables
from laconic_lab.bench.fsdp import fsdp_tables
from laconic_lab.bench.gpt import gpt_tables
from laconic_lab.bench.layers import layer_table

TABLES: dict[str, Callable[[Sequence[Record]], Sequence[ClusterTable]]] = {
    "bench.collective": lambda records: [collective_table(records)],
    "bench.ddp": ddp_tables,
    "bench.device": device_tables,
    "bench.fsdp": fsdp_tables,
    "bench.gpt": gpt_tables,
    "bench.layers": lambda records: [layer_table(records)],
    "cluster.": tables,
}
"""The tables of benchmarks with goals, by the beginning of the kinds of their Records."""
PLAIN = "plain torch"
STOCK = {"zstd level 1 on symbols": "zstd level 1", "constriction ANS": "constriction's ANS"}


def blocks(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return the block names of a file of Records and the Markdown of each."""
    kinds = {record.kind for record in records}
    if "demo.method" in kinds:
        return [("demo", demo_table([record for record in records if record.kind == "demo.method"]))]
    if kinds and all(kind.startswith("faults.replica") for kind in kinds):
        return [replica_table(records)]
    for prefix, tables_of in TABLES.items():
        if kinds and all(kind.startswith(prefix) for kind in kinds):
            return [(table.name, goal_table(table)) for table in tables_of(records)]
    return [("bench", codec_tables(records))]


def replica_table(records: Sequence[Record]) -> tuple[str, str]:
    """Return the block of a campaign against torchft's replicas, or of the times of their steps."""
    first = records[0]
    where = f"{first.machine['cpu']}, {first.machine['cores']} cores, torch {first.versions['torch']}"
    if first.kind == "faults.replica_step":
        plain = next(record.values["step_s"] for record in records if record.values["spec"] == "plain")
        rows = []
        for values in (record.values for record in records):
            codec = "torchft alone" if values["spec"] == "plain" else f"`{values['spec']}`"
            rows.append((codec, f"{1e3 * values['step_s']:.1f}", f"{values['step_s'] / plain:.2f}"))
        table = Table(("codec", "ms a step", "of torchft alone"), rows).to_markdown()
        parameters, specs = first.values["parameters"], ",".join(record.values["spec"] for record in records)
        return "torchft-steps", (
            f"{table}\n\nTwo replicas, {parameters:,} parameters, loopback, {where}. Measured by `laconic lab replicas "
            f"--kills 0 --time '{specs}'`."
        )
    rows = []
    for values in (record.values for record in records):
        equal = values["compared_steps"] - values["differing_steps"]
        balanced, continued = values["balanced_steps"], values["continued"] - values["broken"]
        rows.append((
            f"`{values['spec']}`", str(values["kills"]), f"{values['seconds']:.0f}", f"{values['steps']:,}",
            str(values["discarded"]), f"{equal:,} of {values['compared_steps']:,}",
            f"{balanced:,} of {balanced + values['unbalanced_steps']:,}", str(values["unchecked_steps"]),
            f"{continued:,} of {values['continued']:,}",
        ))  # fmt: skip
    columns = (
        "codec", "kills", "seconds", "steps", "attempts discarded", "steps with equal weights", "balanced steps",
        "not balanced: a killed replica wrote nothing", "residuals continued",
    )  # fmt: skip
    return "torchft-kills", (
        f"{Table(columns, rows).to_markdown()}\n\n{first.values['replicas']} replicas, {where}. Measured by "
        f"`laconic lab replicas --kills {first.values['kills']} --seconds 600`."
    )


def goal_table(table: ClusterTable) -> str:
    """Return a benchmark's table with its notes and the outcome of its goals."""
    goals = [f"- {text[0].upper()}{text[1:]}." for _, text in table.verdicts]
    markdown = Table(table.columns, table.rows, table.words).to_markdown()
    return "\n".join([markdown, "", table.notes, *(["", "Goals:", "", *goals] if goals else [])])


DEMO_COLUMNS = (WORDS, "accuracy %", "kB per iteration", "total s")
"""Columns of README's table; the demo itself prints more than fit a page."""


def demo_table(runs: Sequence[Record]) -> str:
    """Return the training methods of a demo side by side, with the present descriptions of these methods."""
    described = [replace(run, values={**run.values, "what": _description(run)}) for run in runs]
    first, table = described[0], compare(described)
    of_baseline = next(column for column in table.columns if column.startswith("of method"))
    wanted = [column for column in (*DEMO_COLUMNS[:-1], of_baseline, DEMO_COLUMNS[-1]) if column in table.columns]
    places = [list(table.columns).index(column) for column in wanted]
    rows = [[row[place] for place in places] for row in table.rows]
    columns = ["bytes of the first" if column == of_baseline else column for column in wanted]
    return (
        f"{Table(columns, rows, 1).to_markdown()}\n\n{first.machine['cpu']}, {first.machine['cores']} cores, torch "
        f"{first.versions['torch']}: {first.values['model']} on {first.values['data']}, {first.values['workers']} "
        f"workers, {first.values['iterations']} iterations of each method. kB are the frames of all workers, sent and "
        "received; seconds are those of the slowest worker. One run each: small differences are chance. Measured by "
        f"`{first.values['command']}`."
    )


def _description(run: Record) -> Any:
    """Return what a run's method does: a Record keeps the words of its time."""
    return METHODS[run.values["method"]][0] if run.values["method"] in METHODS else run.values["what"]


def codec_tables(records: Sequence[Record]) -> str:
    """Return the tables of codecs and entropy coders of one run of ``laconic bench``."""
    machines = [record for record in records if record.kind == "bench.machine"]
    codecs = [record.values for record in records if record.kind == "bench.codec"]
    peers = [record.values for record in records if record.kind == "bench.peer"]
    if len(machines) != 1 or not codecs:
        raise FileError(
            f"expected the Records of one run with codecs, got {len(machines)} runs and {len(codecs)} codecs: "
            "write them with laconic bench --records"
        )
    run, source = machines[0].values, machines[0]
    coders = [values for values in codecs if "entropy_bits_per_symbol" in values]
    others = [values for values in codecs if "entropy_bits_per_symbol" not in values]
    note = (
        f"{source.machine['cpu']} ({source.machine['vector']}), torch {source.versions['torch']}, "
        f"{run['numel']:,} gaussian float32, {run['threads']} thread{'s' if run['threads'] > 1 else ''}. Speeds are "
        f"multiples of the same run's memcpy ({run['memcpy_gb_per_s']:.1f} GB/s; a pass that only reads runs at "
        f"{run['read_x_memcpy']:.2f}, one that only writes at {run['write_x_memcpy']:.2f}): medians, encode / decode "
        f"where there are two. Measured by `{run['command']}`."
    )
    plain = {values["of"]: values for values in peers if values["name"] == PLAIN}
    parts = []
    if others:
        columns = ("codec", "bits per value", "encode, × memcpy", "decode, × memcpy", "1,000 values, µs",
                   "the same in plain torch", "speed-up")  # fmt: skip
        rows = [_codec_row(values, plain.get(values["spec"])) for values in others]
        parts.append(Table(columns, rows).to_markdown())
    parts.append(note)
    if coders:
        parts += _coder_parts(coders, peers)
    if goals := _codec_goals(codecs) if run["threads"] == 1 and run["numel"] >= JUDGED_NUMEL else []:
        parts += ["Goals:", "\n".join(f"- {goal}." for goal in goals)]
    return "\n\n".join(parts)


def _codec_goals(codecs: Sequence[Any]) -> list[str]:
    """Return the outcome of each goal, for gaussian data."""
    judged = [values for values in codecs if values.get("data", GAUSSIAN) == GAUSSIAN]
    goals = []
    for values in judged:
        for way, floor in zip(("encode", "decode"), floors_of(values["codec"]), strict=True):
            if floor is not None:
                speed = values[f"{way}_x_memcpy"]
                goals.append(f"`{values['spec']}` {way}: {_outcome(speed, floor)}")
    slow = [
        f"`{values['spec']}` ({values['small_encode_us']:.0f} / {values['small_decode_us']:.0f})"
        for values in judged
        if max(values["small_encode_us"], values["small_decode_us"]) >= SMALL_LIMIT_US
    ]
    small = f"1,000 values under {SMALL_LIMIT_US:.0f} µs each way"
    return [*goals, f"{small}: missed by {', '.join(slow)}" if slow else f"{small}: met by all"]


def _outcome(value: float, goal: float) -> str:
    return f"{value:.2f} of {goal:g}, {'met' if value >= goal else 'missed'}"


def collective_table(records: Sequence[Record]) -> ClusterTable:
    """Return the means over processes of one host, beside plain all-reduces."""
    first = records[0]
    rows = tuple(
        (
            f"`{values['name']}`" if ":" in values["name"] else values["name"],
            f"{1e3 * values['median_s']:.1f}", f"{values['speedup_fp32']:.2f}", f"{values['speedup_fp32_best']:.2f}",
            f"{values['nbytes'] / 1e6:.1f}", f"{values['relative_squared_error']:.2g}",
        )
        for values in (record.values for record in records)
    )  # fmt: skip
    verdicts = []
    for values in (record.values for record in records):
        if (goal := COLLECTIVE_GOALS.get(values["name"])) is not None:
            met = values["speedup_fp32"] >= goal
            verdicts.append((met, f"`{values['name']}`, × fp32: {_outcome(values['speedup_fp32'], goal)}"))
    columns = ("mean by", "ms", "× fp32", "× fp32, best", "MB a rank", "squared error")
    notes = (
        f"{first.machine['cpu']}, {first.machine['cores']} cores, torch {first.versions['torch']}: "
        f"{first.values['numel']:,} values, {first.values['ranks']} single-threaded processes on gloo over loopback, "
        f"medians of {first.values['repeat']} rounds. Measured by `{first.values['command']}`."
    )
    return ClusterTable("collective", columns, rows, 1, notes, tuple(verdicts))


COLLECTIVE_GOALS = {"shared:8": 2.5}
"""Goals for means over two processes, in multiples of the speed of torch's all-reduce of float32."""


def _codec_row(values: Any, plain: Any) -> Sequence[str]:
    ours = [values["encode_x_memcpy"], values["decode_x_memcpy"]]
    small = f"{values['small_encode_us']:.0f} / {values['small_decode_us']:.0f}"
    cells = [f"`{values['spec']}`", f"{values['bits_per_value']:.2f}", *map(_figure, ours), small]
    if plain is None:
        return (*cells, "", "")
    theirs = [plain["encode_x_memcpy"], plain["decode_x_memcpy"]]
    speed_up = " / ".join(f"{_figure(mine / other)}×" for mine, other in zip(ours, theirs, strict=True))
    return (*cells, f"{_speeds(plain)} ({plain['bits_per_value']:.2f} bits)", speed_up)


def _coder_parts(coders: Sequence[Any], peers: Sequence[Any]) -> list[str]:
    """Return the table of entropy coders on each kind of data, and its note."""
    stock = {(values["of"], values["data"], values["name"]): values for values in peers if values["name"] in STOCK}
    rows = []
    for values in coders:
        scaling = [values[f"{way}_scaling_2_threads"] for way in ("encode", "decode")]
        cells = [
            f"`{values['spec']}`", values["data"], f"{values['coded_bits_per_symbol']:.3f}", _overhead(values),
            _figure(values["encode_x_memcpy"]), _figure(values["decode_x_memcpy"]),
            " / ".join(_figure(value) for value in scaling if value is not None),
        ]  # fmt: skip
        for name in STOCK:
            peer = stock.get((values["spec"], values["data"], name))
            cells.append("" if peer is None else f"{_speeds(peer)} (+{_overhead(peer)})")
        rows.append(cells)
    columns = ("entropy coder", "data", "bits per symbol", "over entropy", "encode", "decode", "two threads, × one",
               *(f"{name} on the symbols" for name in STOCK.values()))  # fmt: skip
    return [
        Table(columns, rows, 2).to_markdown(),
        "Our coders take and return floats, stock coders symbols; those stand beside the first codec of a quantizer. "
        "Entropy is the zero-order entropy of the symbols; the excess is code tables and the code's own loss. Data: "
        "gaussian; weights are Laplace-distributed; grads are gaussian in rows of log-normal scale.",
    ]


def _overhead(values: Any) -> str:
    percent = values["over_entropy_percent"]
    return "" if percent is None else f"{percent:.2f} %"


def _speeds(values: Any) -> str:
    return " / ".join(_figure(values[f"{way}_x_memcpy"]) for way in ("encode", "decode"))


def _figure(value: float) -> str:
    """Format with two or three significant digits."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2f}" if value >= 0.0995 else f"{value:.2g}"
