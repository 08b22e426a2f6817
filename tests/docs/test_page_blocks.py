"""Every code block of every page runs unchanged, in order, in an empty folder; exceptions are counted."""

from __future__ import annotations

import subprocess
import sys
import types
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from doc_pages import PAGES, PYTHON, ROOT, SHELL, Block, blocks, matches, name
from typer.testing import CliRunner

from laconic.cli.app import app
from laconic.codecs import registry

NOT_RUN = {
    "README.md": 4,
    "CONTRIBUTING.md": 1,
    "docs/adding-a-codec.md": 6,  # followed by test_adding_a_kernel.py
    "docs/cluster-benchmarks.md": 1,
    "docs/ddp.md": 0,
    "docs/faults.md": 1,
    "docs/gpu.md": 1,
    "docs/lab.md": 2,
    "docs/planner.md": 2,
    "docs/quickstart.md": 2,
    "docs/releasing.md": 2,
    "docs/report.md": 1,
    "docs/security.md": 1,
    "docs/studies/gpt.md": 1,
    "docs/studies/homomorphic.md": 1,
    "docs/studies/jang2017.md": 1,
    "docs/studies/kothari2021.md": 2,
    "docs/studies/oland2015.md": 1,
    "docs/studies/pipeline.md": 1,
    "docs/watch.md": 3,
}
"""Blocks marked ``<!-- not run: why -->`` by page; a new one must be added here on purpose."""


@pytest.fixture
def page_module(tmp_path, monkeypatch):
    """Provide a module namespace in an empty working folder that Python can import from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for folder in ("examples", "results"):  # pages refer to these folders of a checkout
        (tmp_path / folder).symlink_to(ROOT / folder)
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = set(sys.modules)
    registry.stages.cache_clear()  # a page may install a codec
    yield module
    registry.stages.cache_clear()
    for new in set(sys.modules) - before:
        if str(getattr(sys.modules[new], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[new]


def run(block: Block, module: types.ModuleType) -> None:
    if block.mark == "file":
        Path(block.why).parent.mkdir(parents=True, exist_ok=True)
        Path(block.why).write_text(block.text)
    elif block.language in PYTHON:
        exec(compile("\n" * block.line + block.text, str(block.page), "exec"), vars(module))
    elif block.language in SHELL:
        run_commands(block)


def run_commands(block: Block) -> None:
    for command in block.commands():
        words = command.words
        assert words[0] == "laconic", (
            f"{block.where}: {command.line!r} cannot run here: mark the block, with the reason"
        )
        done = CliRunner().invoke(app, words[1:], prog_name="laconic")
        assert done.exit_code == 0, f"{block.where}: {command.line}\n{done.output}\n{done.exception!r}"
        if command.output is not None:
            assert matches(command.output, done.output), f"{block.where}: {command.line} printed\n{done.output}"


def runs(block: Block) -> bool:
    return block.language in PYTHON | SHELL


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_page_blocks_run(page, page_module):
    for block in blocks(page):
        if block.mark in (None, "file"):
            run(block, page_module)


NEEDS = sorted({(page, block.why) for page in PAGES for block in blocks(page) if block.mark == "needs"})


@pytest.mark.slow
@pytest.mark.parametrize("page, module", NEEDS, ids=[f"{name(page)} {module}" for page, module in NEEDS])
def test_page_blocks_that_need_a_module_run(page, module, tmp_path):
    """In a process of their own, because engines start threads and servers."""
    if find_spec(module) is None:
        pytest.skip(f"no {module}")
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(block.text for block in blocks(page) if (block.mark, block.why) == ("needs", module)))
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [p for p in PAGES if any(b.mark == "slow" for b in blocks(p))], ids=name)
def test_slow_page_blocks_run(page, page_module):
    for block in blocks(page):
        if block.mark not in ("not run", "needs"):
            run(block, page_module)


def test_blocks_that_are_not_run_are_counted_and_give_a_reason():
    marked = [block for page in PAGES for block in blocks(page) if block.mark == "not run"]
    assert [block.where for block in marked if len(block.why) < 8 or not runs(block)] == []
    counts = Counter(name(block.page) for block in marked)
    assert {page: counts[page] for page in NOT_RUN} | counts == NOT_RUN


def test_pages_have_blocks_and_every_language_is_known():
    """Guards the tests above: a pattern that finds nothing would pass them."""
    all_blocks = [block for page in PAGES for block in blocks(page)]
    fences = sum(line.startswith("```") for page in PAGES for line in page.read_text().splitlines())
    assert len(all_blocks) == fences / 2 > 100
    assert (
        sum(block.language in PYTHON for block in all_blocks) > 50
        and sum(block.language in SHELL for block in all_blocks) > 20
    )
    known = PYTHON | SHELL | {"cpp", "text", "toml", "json", "yaml", "html"}  # shown, not executed
    assert [block.where for block in all_blocks if block.language not in known] == []


@pytest.mark.parametrize(
    "shown, printed, same",
    [
        ("a b", " a  b\n", True), ("a … c", "a b\nc", True), ("a …", "a\nb c", True), ("… c", "a c", True),
        ("a", "a b", False), ("a … d", "a b c", False), ("1.5 (x)", "1.5 (x)", True), ("1.5", "1x5", False),
    ],
)  # fmt: skip
def test_output_comparison_ignores_blanks_and_ellipses(shown, printed, same):
    assert matches(shown, printed) is same


def test_unmarked_command_other_than_laconic_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```sh\nmake test\n```\n\n<!-- not run: makes all -->\n```sh\nmake all\n```\n")
    first, second = blocks(page)
    assert (second.mark, second.why, second.line) == ("not run", "makes all", 6)
    object.__setattr__(first, "page", PAGES[0])
    with pytest.raises(AssertionError, match="mark the block"):
        run_commands(first)
