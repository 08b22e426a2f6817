"""The line of badges at the top of README: facts of pyproject.toml and constraints.txt, drawn as one SVG.

Badges of a CI run, a package index or a site of the documentation need a public address, which the project does not
have.
"""

from __future__ import annotations

import re
from html import escape

from page_blocks import ROOT

PICTURE = ROOT / "docs" / "badges.svg"
HEIGHT, GAP, PADDING = 20, 6, 7
LETTER = 6.4
"""Width of a letter of 11 px, with some room for wide ones."""


def facts() -> list[tuple[str, str]]:
    """Return names and values: Pythons, torch, system and licence."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    found = {
        "torch": re.search(r'"torch>=([\d.]+)"', project),
        "tested": re.search(r"^torch==([\d.]+)$", constraints, re.M),
        "licence": re.search(r'^license = "(.+)"$', project, re.M),
    }
    values = {name: match[1] for name, match in found.items() if match}
    if len(values) != len(found) or not pythons:
        raise SystemExit("pyproject.toml or constraints.txt lacks what badges show: Pythons, torch or the licence")
    return [
        ("Python", f"{pythons[0]} – {pythons[-1]}"),
        ("torch", f"≥ {values['torch']}, tested with {values['tested']}"),
        ("system", "Linux x86-64"),
        ("licence", values["licence"]),
    ]


def badges() -> str:
    """Return the SVG."""
    parts, x = [], 0.0
    for name, value in facts():
        left, right = (round(2 * PADDING + LETTER * len(text)) for text in (name, value))
        parts += [
            f'<rect x="{x:g}" width="{left}" height="{HEIGHT}" rx="3" fill="#4b5563"/>',
            f'<rect x="{x + left - 3:g}" width="{right + 3}" height="{HEIGHT}" rx="3" fill="#1d5fb4"/>',
            f'<text x="{x + left / 2:g}" y="14">{escape(name)}</text>',
            f'<text x="{x + left + right / 2:g}" y="14">{escape(value)}</text>',
        ]
        x += left + right + GAP
    words = "; ".join(f"{name}: {value}" for name, value in facts())
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{x - GAP:g}" height="{HEIGHT}" role="img" '
        f'aria-label="{escape(words)}" fill="#fff" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11" '
        'text-anchor="middle">'
    )
    return "\n".join([head, *parts, "</svg>", ""])
