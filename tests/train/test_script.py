"""Scripts: what they may return, and one-line errors."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from laconic.errors import ConfigError, FileError, LaconicError
from laconic.train import Task, build_task

GOOD = """
import torch
from torch import nn

def build():
    x = torch.randn(100, 4)
    return nn.Linear(4, 2), (x, (x.sum(1) > 0).long()), (x, (x.sum(1) > 0).long()), nn.functional.cross_entropy
"""


@pytest.fixture(autouse=True)
def _path_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("laconic_script_", "neighbour")):
            del sys.modules[name]


def scripted(folder: Path, text: str, function: str = "build") -> Task:
    (folder / "my.py").write_text(text)
    return build_task(script=f"{folder / 'my.py'}:{function}")


def refusal(folder: Path, text: str, kind: type[LaconicError] = ConfigError, function: str = "build") -> str:
    with pytest.raises(kind) as caught:
        scripted(folder, text, function)
    assert len(str(caught.value).splitlines()) == 1 and "my.py" in str(caught.value)
    return str(caught.value)


def test_tuple_of_four_makes_a_task(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    task = scripted(tmp_path, GOOD)
    assert torch.equal(torch.get_rng_state(), before)
    assert task.num_train == 95 and task.name.endswith("my.py:build")
    assert set(task.evaluate()) == {"accuracy", "loss"} and task.judge() > 0
    # Each worker builds it for itself, and all must begin alike.
    torch.rand(5)
    again = scripted(tmp_path, GOOD)
    assert all(torch.equal(a, b) for a, b in zip(task.model.parameters(), again.model.parameters(), strict=True))
    assert torch.equal(task.batch(torch.arange(9)).inputs, again.batch(torch.arange(9)).inputs)
    other = build_task(script=f"{tmp_path / 'my.py'}:build", seed=1)
    assert not torch.equal(next(task.model.parameters()), next(other.model.parameters()))


def test_example_of_the_docstring_runs(tmp_path: Path) -> None:
    doc = inspect.getdoc(build_task)
    assert doc is not None
    example = doc.split("Such as::\n")[1].split("\nTorch's generator")[0]
    assert scripted(tmp_path, textwrap.dedent(example)).num_train == 855


def test_task_is_returned_unchanged(tmp_path: Path) -> None:
    text = GOOD.replace("return ", "from laconic.train import Task\n    return Task('mine', *(").rstrip()
    task = scripted(tmp_path, f"{text}), holdout=0.5)")
    assert task.name == "mine" and task.num_train == 50


def test_script_can_import_modules_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "neighbour.py").write_text(GOOD)
    (tmp_path / "my.py").write_text("from neighbour import build")
    monkeypatch.chdir(tmp_path)
    assert build_task(script="my.py:build").num_train == 95


def test_invalid_script_name_raises_an_error(tmp_path: Path) -> None:
    for script in ("my.py", "my.py:", ":build", "my.py:a b", "C:\\my.py", ""):
        with pytest.raises(ConfigError, match=r"must be FILE\.py:FUNCTION, such as my\.py:build, got"):
            build_task(script=script)
    with pytest.raises(FileError, match="there is no file"):
        build_task(script=f"{tmp_path}/none.py:build")
    with pytest.raises(FileError, match="there is no file"):
        build_task(script=f"{tmp_path}:build")
    (tmp_path / "data.csv").write_text("1,2")
    with pytest.raises(ConfigError, match=r"its name must end in \.py"):
        build_task(script=f"{tmp_path}/data.csv:build")


def test_missing_function_raises_config_error(tmp_path: Path) -> None:
    assert "has no function 'make'" in refusal(tmp_path, GOOD, function="make")
    assert "has no function 'build'" in refusal(tmp_path, "build = 3")


@pytest.mark.parametrize("text, words", [
    ("def build(:", "line 1: SyntaxError"),
    ("import torch\nimport nothing_of_that_name", "line 2: ModuleNotFoundError: No module named 'nothing_of_that"),
    ("\n\ndef build():\n    return 1 / 0", "line 4: ZeroDivisionError: division by zero"),
    ("def build():\n    raise ValueError('two\\nlines')", "line 2: ValueError: two lines"),
    ("def build(x): pass", "TypeError: build() missing 1 required positional argument: 'x'"),
    ("import sys\nsys.exit(3)", "line 2: SystemExit: 3"),
    ("def build():\n    return 3", "must return (model, train, test, loss) or a laconic Task, got int"),
    ("def build():\n    return 1, 2, 3", "got a tuple of 3"), ("def build(): pass", "got NoneType"),
    (GOOD.replace("nn.Linear(4, 2)", "'net'"), "the model must be a torch module, got str"),
    (GOOD.replace("nn.Linear(4, 2)", "nn.ReLU()"), "the model has no parameters to train"),
    (GOOD.replace("nn.functional.cross_entropy", "'mse'"), "the loss must be a function of outputs and targets"),
    (GOOD.replace("(x, (x.sum", "(x[:9], (x.sum", 1), "the training set: 9 inputs but 100 targets"),
])  # fmt: skip
def test_error_of_a_script_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    assert words in refusal(tmp_path, text)


def test_laconic_errors_are_not_wrapped(tmp_path: Path) -> None:
    text = "from pathlib import Path\nfrom laconic.train import load\ndef build():\n    load('mnist', Path('my.py'))"
    assert refusal(tmp_path, text, FileError).startswith("mnist is read from")
