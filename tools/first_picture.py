"""README's picture: a GPT until plain DDP's loss, and a step of DDP, both over 100 Mbit/s, with the bytes sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from ddp_records import steps, values_of
from links_picture import STYLE

from laconic.units import show_bytes

GPT_LINK, GPT_RANKS = "100mbit+50ms", 2
GPT_SHOWN = {
    "ddp": "AdamW, plain DDP", "fp16": "AdamW, torch's fp16 hook", "powersgd": "AdamW, torch's PowerSGD, rank 4",
    "diloco": "DiLoCo: AdamW, every 20, float32", "laconic-topk": "LocalSGD: Muon, every 20, ef|topk:0.1|sign",
    "laconic-adamw-8": "LocalSGD: AdamW, every 8, ef|sign",
    "laconic-adamw-16": "LocalSGD: AdamW, every 16, ef|sign, mean × 1.8",
}  # fmt: skip
DDP_SHOWN = {
    "ddp": "plain DDP, float32", "fp16": "torch's fp16 hook", "powersgd:1": "torch's PowerSGD, rank 1",
    "laconic ef|thc:4": "attach: ef|thc:4", "laconic qsgd:4": "attach: qsgd:4", "laconic ef|sign": "attach: ef|sign",
    "laconic ef|topk:0.01|qsgd:4": "attach: ef|topk:0.01|qsgd:4",
}  # fmt: skip
LABEL, BARS, LINE, TOP = 310, 310, 24, 60
WIDTH = LABEL + BARS + 200


class Bar(NamedTuple):
    name: str
    length: float | None
    words: str
    kind: str


def _kind(way: str) -> str:
    return "plain" if way == "ddp" else "ours" if way.startswith("laconic") else "stock"


def _gpt() -> tuple[list[Bar], Mapping[str, Any]]:
    by_method = {
        one["method"]: one
        for one in values_of("bench/gpt.jsonl")
        if one.get("link") == GPT_LINK and one["ranks"] == GPT_RANKS and one["failed"] is None and one["valid"]
    }
    bars = []
    for method, name in GPT_SHOWN.items():
        seconds, sent = by_method[method]["reached_s"], show_bytes(by_method[method]["sent_nbytes"])
        words = f"{seconds:,.0f} s, {sent}" if seconds else f"not reached, {sent}"
        bars.append(Bar(name, seconds, words, _kind(method)))
    return bars, by_method["ddp"]


def _ddp() -> tuple[list[Bar], Mapping[str, Any]]:
    by_way = {step["way"]: step for step in steps("100mbit")}
    bars = [
        Bar(name, by_way[way]["step_s"], f"{1e3 * by_way[way]['step_s']:,.0f} ms, "
            f"{show_bytes(by_way[way]['sent_nbytes_per_step'])}", _kind(way))
        for way, name in DDP_SHOWN.items()
    ]  # fmt: skip
    return bars, by_way["ddp"]


def first_picture() -> str:
    """Return an SVG with both measurements, for light and dark pages."""
    (gpt_bars, gpt), (ddp_bars, ddp) = _gpt(), _ddp()
    parts: list[str] = []
    bottom = _panel(
        parts, 0, f"A GPT until plain DDP's loss: {GPT_RANKS} ranks, 100 Mbit/s, 50 ms",
        f"seconds, and what a rank sent in the whole training; {gpt['numel'] / 1e6:.1f} M parameters, one seed",
        gpt_bars,
    )  # fmt: skip
    bottom = _panel(
        parts, bottom + 14, f"A step of DDP: {ddp['ranks']} ranks, 100 Mbit/s",
        f"milliseconds, and what a rank sends; {ddp['numel']:,} gradients", ddp_bars,
    )  # fmt: skip
    below = (
        "Grey: plain DDP. Yellow: other methods. Blue: laconic. The last line suits SGD without momentum only.",
        "Records: results/bench/gpt.jsonl and results/ddp/links.jsonl; drawn by make docs.",
    )
    height = bottom + 56
    parts += [
        f'<text class="quiet" x="16" y="{bottom + 22 + 20 * row}">{escape(words)}</text>'
        for row, words in enumerate(below)
    ]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title">',
        '<title id="title">Time and bytes of a GPT and of a DDP step over 100 Mbit/s, by method</title>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        *parts, "</svg>", "",
    ])  # fmt: skip


def _panel(parts: list[str], top: int, title: str, about: str, bars: Sequence[Bar]) -> int:
    """Append a panel of bars and return where it ends."""
    parts.append(f'<text class="head" x="16" y="{top + 28}">{escape(title)}</text>')
    parts.append(f'<text class="quiet" x="16" y="{top + 47}">{escape(about)}</text>')
    longest = max(bar.length for bar in bars if bar.length)
    for row, bar in enumerate(bars):
        y, length = top + TOP + LINE * row, max(2.0, BARS * (bar.length or 0.0) / longest)
        parts.append(f'<text x="16" y="{y + 15}">{escape(bar.name)}</text>')
        if bar.length:
            parts.append(f'<rect class="{bar.kind}" x="{LABEL}" y="{y + 2}" width="{length:.1f}" height="16" rx="2"/>')
        start = LABEL + (length if bar.length else 0.0)
        parts.append(f'<text x="{start + 6:.1f}" y="{y + 15}">{escape(bar.words)}</text>')
    return top + TOP + LINE * len(bars)
