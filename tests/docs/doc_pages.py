"""Documentation pages and their code blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
PYTHON, SHELL = {"python", "py"}, {"sh", "bash", "console", "shell"}
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>not run|slow|file|needs): (?P<why>[^>]*) -->\n+)?"
    r"^(?P<tick>```+)(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=tick)$",
    re.MULTILINE | re.DOTALL,
)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Command:
    """A line of a shell block and its expected output; None where the page shows none."""

    line: str
    output: str | None

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)


@dataclass(frozen=True)
class Block:
    """A fenced block and the mark of the comment before it.

    Marks are ``not run``, ``slow``, the ``file`` that the block shows, and a module that it ``needs``.
    """

    page: Path
    line: int
    language: str
    mark: str | None
    why: str
    text: str

    @property
    def where(self) -> str:
        return f"{name(self.page)}:{self.line}"

    def commands(self) -> Iterator[Command]:
        """Lines with ``$`` are followed by what they print; without any ``$`` every line is a command."""
        text = self.text.replace("\\\n", " ")
        if self.language != "console":
            yield from (Command(line, None) for line in text.splitlines() if line.strip() and line.lstrip()[0] != "#")
            return
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            line, _, output = part.partition("\n")
            yield Command(line, output.strip() or None)


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    code = []
    for match in BLOCK.finditer(text):
        line = text[: match.start("tick")].count("\n") + 1
        code.append(Block(page, line, match["language"].strip(), match["mark"], match["why"] or "", match["text"]))
    return code


def prose(page: Path) -> str:
    """The page without its blocks and its code in line: what links are looked for in."""
    return re.sub(r"`[^`\n]*`", "", BLOCK.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """What GitHub and MkDocs make of the headings."""
    names: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        same = sum(1 for other in names if re.fullmatch(re.escape(slug) + r"(-\d+)?", other))
        names.add(f"{slug}-{same}" if same else slug)
    return names


def matches(shown: str, printed: str) -> bool:
    """Whether a command printed what a page shows: blanks may differ, and … stands for anything."""
    wanted = ".*?".join(re.escape(" ".join(part.split())).replace(r"\ ", " ") for part in shown.split("…"))
    wanted = re.sub(r" ?\.\*\? ?", ".*?", wanted)
    return re.fullmatch(wanted, " ".join(printed.split()), re.DOTALL) is not None
