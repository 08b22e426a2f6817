"""Loss and bytes by codec, and step times over links."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from laconic_lab.bench.gpt.settings import show_link
from laconic_lab.studies.pipeline.experiments import LARGE, TRANSFORM
from laconic_lab.studies.pipeline.results import Results
from laconic_lab.studies.tables import Table, make_table

__all__ = ["make_tables"]

KINDS = ("samples", LARGE)
"""Parts in which samples are of several kinds."""

TITLES = {
    "bits": "Both directions by bits", "directions": "One direction, roundings and buckets",
    "samples": "Differences to the receiver's copy", "bottleneck": "Trained projections",
    TRANSFORM: "Transform coding, three seeds", LARGE: "Larger model, three seeds",
}  # fmt: skip


def make_tables(results: Results) -> list[Table]:
    """Return all tables but the one of claims."""
    return [*(_losses(results, part, title) for part, title in TITLES.items()), _times(results)]


def _losses(results: Results, part: str, title: str) -> Table:
    rows: list[Sequence[str]] = []
    for row in sorted(
        results.of(part), key=lambda row: tuple(row.values[name] for name in ("size", "stages", "samples"))
    ):
        values, above = row.values, results.above(row)
        rows.append((
            values["method"], *((values["samples"],) if part in KINDS else ()), values["size"],
            str(values["stages"]), f"{row.loss:.4f}", "–" if above is None else f"{above:+.2f}",
            f"{row.mean('compressed_loss'):.4f}", str(len(row.runs)), f"{row.mean('ratio'):.2f}",
        ))  # fmt: skip
    columns = (
        "forward / backward", *(("samples",) if part in KINDS else ()), "model", "stages", "loss", "% above none",
        "validation loss, compressed", "seeds", "times fewer bytes",
    )  # fmt: skip
    return make_table(title, columns, rows)


def _times(results: Results) -> Table:
    rows: list[Sequence[str]] = []
    for time in results.times:
        gain = results.speed_up(time)
        rows.append((
            time["codec"], time["model"], show_link(time["link"]), str(time["stages"]),
            f"{1e3 * median(time['seconds']):,.0f}", "–" if gain is None else f"{gain:.2f}",
            f"{time['sent_nbytes'] / 1e6:.2f}", f"{1e3 * time['encode_s']:.1f}", f"{1e3 * time['decode_s']:.1f}",
            "" if time["valid"] else "the link was not what it should be",
        ))  # fmt: skip
    columns = (
        "both ways", "activations", "link", "stages", "ms a step", "× none", "MB a step", "ms encoding, all ranks",
        "ms decoding, all ranks", "notes",
    )  # fmt: skip
    return make_table("Step times", columns, rows)
