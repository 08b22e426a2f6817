"""Links on pages lead somewhere, and the site's map has every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT, anchors, name, prose

LINKED = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "fuzz" / "README.md", ROOT / "examples" / "README.md"]
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
IMAGE = re.compile(r"<img [^>]*src=\"([^\"]+)\"")


def links(page: Path) -> list[str]:
    text = prose(page)
    return [
        found for found in LINK.findall(text) + IMAGE.findall(text) if not found.startswith(("https://", "http://"))
    ]


@pytest.mark.parametrize("page", LINKED, ids=name)
def test_links_lead_to_files_and_headings(page):
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and (target.suffix != ".md" or anchor not in anchors(target))):
            broken.append(link)
    assert broken == []


def test_the_walk_sees_links_and_headings():
    """Guards the test above."""
    assert sum(len(links(page)) for page in LINKED) > 80
    assert "#" in "".join(links(ROOT / "docs" / "planner.md"))
    assert {"rooms", "how-to-add-a-codec"} <= anchors(ROOT / "CONTRIBUTING.md")


def test_every_page_is_on_the_map_once():
    text = (ROOT / "mkdocs.yml").read_text()
    nav = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", text[text.index("\nnav:") :], re.MULTILINE)
    pages = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob("**/*.md"))
    assert sorted(nav) == pages


def test_the_site_shows_no_backslash_in_the_code_of_a_table():
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("docs_site", ROOT / "docs" / "site.py")
    assert spec is not None and spec.loader is not None
    site = module_from_spec(spec)
    spec.loader.exec_module(site)
    before = "| `a\\|b` \\| c | `d` |\n`e\\|f`\n"
    assert site.on_page_markdown(before) == "| `a|b` \\| c | `d` |\n`e\\|f`\n"


def test_every_page_can_be_found_from_the_first():
    seen, waiting = set(), [ROOT / "docs" / "index.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page in seen or page.suffix != ".md" or ROOT / "docs" not in page.parents:
            continue
        seen.add(page)
        waiting += [page.parent / link.partition("#")[0] for link in links(page)]
    assert sorted(page for page in (ROOT / "docs").glob("**/*.md") if page not in seen) == []


def test_the_map_of_rooms_is_that_of_the_house():
    house = (ROOT / "tests" / "test_rooms.py").read_text()
    rooms = re.findall(r'^    "(\w+)",$', house[house.index("ROOMS = (") : house.index("\n)\n")], re.MULTILINE)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    plan = text[text.index("src/laconic/\n") : text.index("\ntests/ ")]
    shown = [re.sub(r"(\.py|/)$", "", found) for found in re.findall(r"^  (\w+(?:\.py|/)) ", plan, re.MULTILINE)]
    assert len(rooms) > 20 and shown == [room for room in rooms if not room.startswith("_")]
