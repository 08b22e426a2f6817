"""Rewrite the tables of README and docs/ from the Records behind them: ``python tools/readme_table.py [--check]``.

What the demo measured goes between ``<!-- demo:begin -->`` and ``<!-- demo:end -->``, what ``laconic bench`` did
between ``<!-- bench:begin -->`` and ``<!-- bench:end -->``, and each part of ``laconic bench cluster``, ``laconic bench
layers`` and ``laconic bench ddp`` between markers of its name; a file's Records say what it is. ``--check`` only says,
by its exit code, whether anything would change.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laconic.errors import FileError
from laconic.records import Record, read
from laconic.report import NOTES, compare
from laconic_lab.bench.cluster import ClusterTable, tables
from laconic_lab.bench.ddp import ddp_tables
from laconic_lab.bench.device_tables import device_tables
from laconic_lab.bench.layers import layer_table

ROOT = Path(__file__).resolve().parent.parent
TABLES = (
    ("demo/demo.jsonl", "README.md", None),
    ("bench/codecs.jsonl", "docs/benchmarks.md", None),
    ("bench/codecs-server.jsonl", "docs/benchmarks.md", "server"),
    ("bench/coders.jsonl", "docs/coder-benchmarks.md", None),
    ("cluster/aggregation.jsonl", "docs/cluster-benchmarks.md", None),
    ("cluster/rounds.jsonl", "docs/cluster-benchmarks.md", None),
    ("cluster/sums.jsonl", "docs/cluster-benchmarks.md", None),
    ("cluster/sums-bundled.jsonl", "docs/cluster-benchmarks.md", None),
    ("cluster/load.jsonl", "docs/cluster-benchmarks.md", None),
    ("ddp/links.jsonl", "docs/ddp.md", None),
    ("ddp/lenet5-4ranks.jsonl", "docs/ddp.md", None),
    ("ddp/lenet5-100mbit.jsonl", "docs/ddp.md", None),
    ("ddp/lenet5-100mbit-batch32.jsonl", "docs/ddp.md", "ddp-train-batch32"),
    ("gpu/codecs.jsonl", "docs/gpu.md", None),
    ("gpu/step.jsonl", "docs/gpu.md", None),
    ("layers/cpu.jsonl", "docs/layers.md", None),
)
"""Records, the page that shows them, and the markers' name where it is not what the Records are."""
DEMO, CLUSTER, LAYERS, DDP, DEVICE = "demo.method", "cluster.", "bench.layers", "bench.ddp", "bench.device"
PLAIN = "plain torch"
STOCK = {"zstd level 1 on symbols": "zstd level 1", "constriction ANS": "constriction's ANS"}


def blocks(records: Sequence[Record]) -> list[tuple[str, str]]:
    """The markers' names, and the Markdown between them."""
    runs = [record for record in records if record.kind == DEMO]
    if any(record.kind.startswith(CLUSTER) for record in records):
        return [(found.name, cluster_table(found)) for found in tables(records)]
    if records and all(record.kind == LAYERS for record in records):
        return [("layers", cluster_table(layer_table(records)))]
    if records and all(record.kind.startswith(DDP) for record in records):
        return [(found.name, cluster_table(found)) for found in ddp_tables(records)]
    if records and all(record.kind.startswith(DEVICE) for record in records):
        return [(found.name, cluster_table(found)) for found in device_tables(records)]
    return [("demo", demo_table(runs)) if runs else ("bench", table(records))]


def cluster_table(found: ClusterTable) -> str:
    """One part of the cluster bench, and what became of its goals."""
    lines = _markdown(found.columns, found.rows, found.words)
    goals = [f"- {text[0].upper()}{text[1:]}." for _, text in found.verdicts]
    return "\n".join([*lines, "", found.notes, *(["", "Goals:", "", *goals] if goals else [])])


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> list[str]:
    return [
        f"| {' | '.join(columns)} |",
        f"|{''.join(' --- |' if column < words else ' ---: |' for column in range(len(columns)))}",
        *(f"| {' | '.join(_escaped(cell) for cell in row)} |" for row in rows),
    ]


def demo_table(runs: Sequence[Record]) -> str:
    """Methods of training side by side."""
    found, first = compare(runs), runs[0]
    return "\n".join(
        [
            found.to_markdown(),
            "",
            f"{first.machine['cpu']}, {first.machine['cores']} cores, torch {first.versions['torch']}: "
            f"{first.values['model']} on {first.values['data']}, {first.values['workers']} workers, "
            f"{first.values['iterations']} iterations of each method. {NOTES} Measured by `{first.values['command']}`.",
        ]
    )


def table(records: Sequence[Record]) -> str:
    """Codecs and coders, timed."""
    machines = [record for record in records if record.kind == "bench.machine"]
    codecs = [record.values for record in records if record.kind == "bench.codec"]
    plain = {
        record.values["of"]: record.values
        for record in records
        if record.kind == "bench.peer" and record.values["name"] == PLAIN
    }
    if len(machines) != 1 or not codecs:
        raise FileError(
            f"expected the records of one run with codecs, got {len(machines)} runs and {len(codecs)} codecs: "
            "write them with laconic bench --records"
        )
    run, about = machines[0].values, machines[0]
    coders = [values for values in codecs if "entropy_bits_per_symbol" in values]
    others = [values for values in codecs if "entropy_bits_per_symbol" not in values]
    lines = [
        f"{about.machine['cpu']} ({about.machine['vector']}), torch {about.versions['torch']}, "
        f"{run['numel']:,} gaussian float32, {run['threads']} thread{'s' if run['threads'] > 1 else ''}. Speeds are "
        f"multiples of the same run's memcpy ({run['memcpy_gb_per_s']:.1f} GB/s; a pass that only reads runs at "
        f"{run['read_x_memcpy']:.2f}, one that only writes at {run['write_x_memcpy']:.2f}): medians, encode / decode "
        f"where there are two. Measured by `{run['command']}`.",
    ]
    if others:
        lines = [
            "| codec | bits per value | encode, × memcpy | decode, × memcpy | the same in plain torch | speed-up |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
            *(_row(values, plain.get(values["spec"])) for values in others),
            "",
            *lines,
        ]
    if coders:
        lines += ["", *_coder_lines(coders, [record.values for record in records if record.kind == "bench.peer"])]
    return "\n".join(lines)


def _coder_lines(coders: Sequence[Any], peers: Sequence[Any]) -> list[str]:
    """Entropy coders, on each kind of data."""
    stock = {(values["of"], values["data"], values["name"]): values for values in peers if values["name"] in STOCK}
    lines = [
        "| entropy coder | data | bits per symbol | over entropy | encode | decode | two threads, × one | "
        f"{' | '.join(f'{name} on the symbols' for name in STOCK.values())} |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |" + " ---: |" * len(STOCK),
    ]
    for values in coders:
        cells = [f"`{_escaped(values['spec'])}`", values["data"], f"{values['coded_bits_per_symbol']:.3f}"]
        cells += [_overhead(values), *(_figure(values[f"{way}_x_memcpy"]) for way in ("encode", "decode"))]
        scaling = [values[f"{way}_scaling_2_threads"] for way in ("encode", "decode")]
        cells.append(" / ".join(_figure(value) for value in scaling if value is not None))
        for name in STOCK:
            found = stock.get((values["spec"], values["data"], name))
            cells.append("" if found is None else f"{_speeds(found)} (+{_overhead(found)})")
        lines.append(f"| {' | '.join(cells)} |")
    return [
        *lines,
        "",
        "Ours take and give floats, stock coders symbols; those stand beside the first codec of a quantizer. "
        "Entropy is that of the symbols one by one; over it lie code tables and what a code loses. Data: gaussian; "
        "weights are Laplace's; grads are gaussian in rows of log-normal scale.",
    ]


def _overhead(values: Any) -> str:
    found = values["over_entropy_percent"]
    return "" if found is None else f"{found:.2f} %"


def _speeds(values: Any) -> str:
    return " / ".join(_figure(values[f"{way}_x_memcpy"]) for way in ("encode", "decode"))


def _escaped(spec: str) -> str:
    return spec.replace("|", "\\|")


def _row(values: Any, plain: Any) -> str:
    ours = [values["encode_x_memcpy"], values["decode_x_memcpy"]]
    cells = [f"`{_escaped(values['spec'])}`", f"{values['bits_per_value']:.2f}", *(_figure(speed) for speed in ours)]
    if plain is None:
        return f"| {' | '.join([*cells, '', ''])} |"
    theirs = [plain["encode_x_memcpy"], plain["decode_x_memcpy"]]
    cells.append(f"{_speeds(plain)} ({plain['bits_per_value']:.2f} bits)")
    cells.append(" / ".join(f"{_figure(mine / other)}×" for mine, other in zip(ours, theirs, strict=True)))
    return f"| {' | '.join(cells)} |"


def _figure(value: float) -> str:
    """Two or three digits that matter."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2f}" if value >= 0.0995 else f"{value:.2g}"


def rewritten(page: str, name: str, text: str) -> str:
    first, last = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    begin, end = page.find(first), page.find(last)
    if begin < 0 or end < begin:
        raise FileError(f"the page has no block to fill: add the lines {first} and {last}, in this order")
    return f"{page[:begin]}{first}\n{text}\n{page[end:]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fill tables of README and docs/ from the Records behind them.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when a table is stale")
    parser.add_argument("--records", type=Path, help="by default all that pages show")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="with --records: or another page")
    args = parser.parse_args(argv)
    shown: Sequence[tuple[Path, Path, str | None]] = [
        (ROOT / "results" / records, ROOT / page, name) for records, page, name in TABLES
    ]
    if args.records:
        shown = [(args.records, args.readme, None)]
    before: dict[Path, str] = {}
    after: dict[Path, str] = {}
    for records, page, name in shown:
        try:
            if page not in before:
                before[page] = after[page] = page.read_text(encoding="utf-8")
            for found, text in blocks(read(records)):
                after[page] = rewritten(after[page], name or found, text)
        except (OSError, KeyError) as error:
            reason = f"{records} lacks {error}: write it again" if isinstance(error, KeyError) else error
            print(f"readme_table: {reason}", file=sys.stderr)
            return 1
    stale = [page for page in before if after[page] != before[page]]
    for page in before if not args.check else []:
        if page in stale:
            page.write_text(after[page], encoding="utf-8")
        print(f"{page}: {'rewritten' if page in stale else 'up to date'}")
    for page in stale if args.check else []:
        print(f"readme_table: {page} is stale: run python tools/readme_table.py", file=sys.stderr)
    return int(bool(args.check and stale))


if __name__ == "__main__":
    sys.exit(main())
