"""Links resolve, the site map is complete, and generated parts of the architecture page are current."""

from __future__ import annotations

import re
from pathlib import Path

import architecture
import pytest
from doc_pages import PAGES, ROOT, anchors, name, prose

LINKED = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "fuzz" / "README.md", ROOT / "examples" / "README.md"]
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
IMAGE = re.compile(r"<img [^>]*src=\"([^\"]+)\"")


def links(page: Path) -> list[str]:
    text = prose(page)
    return [
        target for target in LINK.findall(text) + IMAGE.findall(text) if not target.startswith(("https://", "http://"))
    ]


@pytest.mark.parametrize("page", LINKED, ids=name)
def test_relative_links_resolve_to_files_and_headings(page):
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and (target.suffix != ".md" or anchor not in anchors(target))):
            broken.append(link)
    assert broken == []


def test_link_pattern_finds_links_and_headings():
    """Guards the test above: a pattern that finds nothing would pass it."""
    assert sum(len(links(page)) for page in LINKED) > 80
    assert "#" in "".join(links(ROOT / "docs" / "planner.md"))
    assert {"packages", "how-to-add-a-codec"} <= anchors(ROOT / "CONTRIBUTING.md")


def test_site_navigation_lists_every_page_once():
    text = (ROOT / "mkdocs.yml").read_text()
    nav = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", text[text.index("\nnav:") :], re.MULTILINE)
    pages = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob("**/*.md"))
    assert sorted(nav) == pages


def test_site_hook_unescapes_pipes_in_table_code():
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("docs_site", ROOT / "docs" / "site.py")
    assert spec is not None and spec.loader is not None
    site = module_from_spec(spec)
    spec.loader.exec_module(site)
    before = "| `a\\|b` \\| c | `d` |\n`e\\|f`\n"
    assert site.on_page_markdown(before) == "| `a|b` \\| c | `d` |\n`e\\|f`\n"


def test_every_page_is_reachable_from_the_index():
    seen, waiting = set(), [ROOT / "docs" / "index.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page in seen or page.suffix != ".md" or ROOT / "docs" not in page.parents:
            continue
        seen.add(page)
        waiting += [page.parent / link.partition("#")[0] for link in links(page)]
    assert sorted(page for page in (ROOT / "docs").glob("**/*.md") if page not in seen) == []


def test_generated_picture_and_table_of_the_architecture_are_current():
    assert (ROOT / "docs" / "architecture.svg").read_text() == architecture.draw(), "run make docs"
    assert (ROOT / "docs" / "architecture.md").read_text() == architecture.page(), "run make docs"


def test_contributing_lists_every_package():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    packages = {package for package in architecture.ALLOWED if "__" not in package and "." not in package}
    assert sorted(name for name in packages if not re.search(rf"^  {name}(\.py|/) ", text, re.MULTILINE)) == []


def test_files_named_in_the_architecture_walks_exist_in_at_most_twelve_steps():
    text = (ROOT / "docs" / "architecture.md").read_text()
    walks = text[text.index("## Four walks") :].split("\n### ")[1:]
    assert len(walks) == 4
    for walk in walks:
        files = re.findall(r"^\d+\. `([\w/.]+)`", walk, re.MULTILINE)
        assert 3 <= len(files) <= 12 and len(set(files)) == len(files), (walk.splitlines()[0], files)
        assert [path for path in files if not (ROOT / path).exists()] == []


def test_code_of_the_readme_fits_a_repository_page():
    blocks = re.findall(r"^```\w*\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 96] == []
