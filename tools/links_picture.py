"""The picture of docs/ddp.md: step times of DistributedDataParallel by codec and link, from results/ddp/links.jsonl."""

from __future__ import annotations

from xml.sax.saxutils import escape

from ddp_records import LINKS, steps

SHOWN = ("ddp", "fp16", "powersgd:1", "laconic qsgd:4", "laconic ef|thc:4", "laconic ef|sign",
         "laconic ef|topk:0.01|qsgd:4")  # fmt: skip
STYLE = """
  .page { fill: #ffffff; stroke: #d0d7de } text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .quiet { fill: #59636e } .head { font-weight: 600 }
  .plain { fill: #8c959f } .stock { fill: #bf8700 } .ours { fill: #0969da }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; stroke: #3d444d } text { fill: #f0f6fc } .quiet { fill: #9198a1 }
    .plain { fill: #656c76 } .stock { fill: #d29922 } .ours { fill: #4493f8 }
  }
"""


def picture() -> str:
    """Return an SVG with the step times of DDP by codec on three links, for light and dark pages."""
    label, panel, gap, line, top = 190, 190, 32, 26, 62
    height = top + line * len(SHOWN) + 60
    width = label + 3 * panel + 2 * gap + 28
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-labelledby="title">',
        '<title id="title">Time of a DDP step by codec on three links, beside plain DDP</title>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        '<text class="head" x="16" y="28">A step of DistributedDataParallel, ms</text>',
    ]
    for row, way in enumerate(SHOWN):
        name = {"ddp": "plain DDP, float32", "fp16": "torch's fp16 hook", "powersgd:1": "torch's PowerSGD, rank 1"}
        words = name.get(way, way.removeprefix("laconic "))
        parts.append(f'<text x="16" y="{top + line * row + 16}">{escape(words)}</text>')
    for column, (rate, link) in enumerate(LINKS.items()):
        left = label + 16 + column * (panel + gap)
        by_way = {values["way"]: values for values in steps(rate)}
        longest = max(by_way[way]["step_s"] for way in SHOWN)
        parts.append(f'<text class="quiet" x="{left}" y="{top - 10}">{escape(link)}</text>')
        for row, way in enumerate(SHOWN):
            step = by_way[way]["step_s"]
            bar = max(2.0, (panel - 48) * step / longest)
            kind = "plain" if way == "ddp" else "ours" if way.startswith("laconic") else "stock"
            y = top + line * row
            parts.append(f'<rect class="{kind}" x="{left}" y="{y + 3}" width="{bar:.1f}" height="17" rx="2"/>')
            parts.append(f'<text x="{left + bar + 6:.1f}" y="{y + 16}">{1e3 * step:,.0f}</text>')
    first = steps("100mbit")[0]
    below = (
        f"{first['numel']:,} values (VGG-11's parameters), {first['ranks']} ranks of one thread, gloo; medians.",
        "Blue: laconic.attach(model, spec). Records: results/ddp/links.jsonl, drawn by tools/refresh_pages.py.",
    )
    for row, words in enumerate(below):
        parts.append(f'<text class="quiet" x="16" y="{height - 36 + 20 * row}">{escape(words)}</text>')
    return "\n".join([*parts, "</svg>", ""])
