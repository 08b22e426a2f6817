"""Rewrite the generated tables and pictures of README and docs/ from results/: ``make docs``.

``python tools/refresh_pages.py --check`` changes nothing and exits with 1 when a page is stale. The pages of the
studies have a script of their own, docs/studies/refresh.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import architecture
import badges
import internet_table
import plan_evidence
import plan_promises
import recipe_evidence
from bench_tables import blocks
from choosing_tables import ServerRuns, choosing_blocks, first_table
from fault_tables import heap_block, throughput_block, tier_block
from first_picture import first_picture
from gpt_tables import gpt_table, gradients_table, time_table
from links_picture import picture
from page_blocks import RESULTS, ROOT, fill, update
from picks_table import picks_table

from laconic.errors import LaconicError
from laconic.records import read

COMMAND = "python tools/refresh_pages.py"
BENCHMARKS = {
    "README.md": ("demo/demo",),
    "docs/benchmarks.md": ("bench/codecs", "bench/codecs-server", "bench/collective"),
    "docs/coder-benchmarks.md": ("bench/coders",),
    "docs/cluster-benchmarks.md": tuple(
        f"cluster/{part}" for part in ("aggregation", "rounds", "sums", "sums-bundled", "load")
    ),
    "docs/ddp.md": ("ddp/links", "ddp/lenet5-4ranks", "ddp/lenet5-100mbit", "ddp/lenet5-100mbit-batch32"),
    "docs/engines.md": ("faults/torchft-kills", "faults/torchft-steps"),
    "docs/fsdp.md": ("bench/fsdp", "bench/fsdp-loss"),
    "docs/gpt-benchmarks.md": ("bench/gpt",),
    "docs/gpu.md": ("gpu/codecs", "gpu/step", "gpu/step-before"),
    "docs/layers.md": ("layers/cpu",),
}
"""Pages and the Records that they show."""
UNPUBLISHED = {"bench/collective", "bench/fsdp-loss", "bench/gpt"}
"""Records that may be missing: their pages say so until they are measured."""
BLOCKS = {"bench/codecs-server": "server", "ddp/lenet5-100mbit-batch32": "ddp-train-batch32"}
"""The name of a page's block where the Records do not give it."""


def wanted_pages(benchmarks: Iterable[tuple[Path, Path, str | None]]) -> dict[Path, str]:
    """Return the text of each page with the tables of these Records filled in."""
    pages: dict[Path, str] = {}
    for records, page, block in benchmarks:
        text = pages.get(page) or page.read_text(encoding="utf-8")
        for name, markdown in blocks(read(records)):
            text = fill(text, block or name, markdown)
        pages[page] = text
    return pages


def wanted_files() -> dict[Path, str]:
    """Return every generated file and every page with generated blocks, as they should be."""
    pages = wanted_pages(
        (RESULTS / f"{records}.jsonl", ROOT / page, BLOCKS.get(records))
        for page, shown in BENCHMARKS.items()
        for records in shown
        if records not in UNPUBLISHED or (RESULTS / f"{records}.jsonl").exists()
    )
    server, readme, choosing = ServerRuns(), ROOT / "README.md", ROOT / "docs" / "choosing.md"
    pages[readme] = fill(fill(pages[readme], "first", first_table(server)), "gpt", gpt_table())
    picks = picks_table()
    pages[readme] = fill(pages[readme], "picks", picks)
    pages[choosing] = fill(choosing.read_text(encoding="utf-8"), "picks", picks)
    for name, markdown in choosing_blocks(server).items():
        pages[choosing] = fill(pages[choosing], name, markdown)
    faults = ROOT / "docs" / "faults.md"
    text = fill(faults.read_text(encoding="utf-8"), "tier3", tier_block(read(RESULTS / "faults" / "tier3.jsonl")))
    text = fill(text, "heap", heap_block(read(RESULTS / "faults" / "heap.jsonl")))
    pages[faults] = fill(text, "throughput", throughput_block(read(RESULTS / "faults" / "throughput.jsonl")))
    transformers = ROOT / "docs" / "transformers.md"
    text = fill(transformers.read_text(encoding="utf-8"), "optimizers", choosing_blocks(server)["optimizers"])
    pages[transformers] = fill(fill(text, "time", time_table()), "gradients", gradients_table())
    local_sgd, evidence = ROOT / "docs" / "local-sgd.md", recipe_evidence.all_evidence()
    pages[transformers] = fill(pages[transformers], "recipes", recipe_evidence.evidence_table(evidence))
    pages[local_sgd] = fill(local_sgd.read_text(encoding="utf-8"), "recipes", recipe_evidence.evidence_table(evidence))
    pages[recipe_evidence.FILE] = recipe_evidence.evidence_file(evidence)
    pages[plan_evidence.FILE] = plan_evidence.evidence_file()
    planner = ROOT / "docs" / "planner.md"
    text = fill(planner.read_text(encoding="utf-8"), "internet", internet_table.table())
    text = fill(text, "utilisation", plan_promises.utilisation_table())
    pages[planner] = fill(text, "promises", plan_promises.promise_table())
    pages[architecture.PAGE] = architecture.page()
    pictures = {"badges": badges.badges(), "first": first_picture(), "links": picture()}
    return (
        pages
        | {architecture.PICTURE: architecture.draw()}
        | {ROOT / "docs" / f"{name}.svg": text for name, text in pictures.items()}
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Rewrite the generated parts of README and docs/ from results/.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when a page is stale")
    check = parser.parse_args(arguments).check
    try:
        return update(wanted_files(), check=check, command=COMMAND)
    except LaconicError as error:
        print(f"refresh_pages: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
