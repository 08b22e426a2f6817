"""What a rank of a trainer with LocalSGD saves: tensors and plain values, and nothing that is unpickled."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.collective.rank_files import read_state, write_state
from laconic.errors import FileError


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_state_of_optimizers_is_read_as_it_was_written(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    half = torch.ones(2, 3, dtype=torch.bfloat16).t()  # not contiguous
    state = {"local": {"a/b": half, "n": 3, "none": None}, "optimizers": [optimizer.state_dict(), {"lr": float("inf")}]}
    write_state(state, tmp_path / "state")
    assert same(read_state(tmp_path / "state"), state)


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("unpickled",)


@pytest.mark.parametrize(
    "kind", ["pickle", "torch", "empty", "other names", "no list", "no metadata", "folder", "deep"]
)
def test_other_file_is_refused_in_one_line(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "state"
    if kind == "pickle":
        file.write_bytes(pickle.dumps(Harmful()))
    elif kind == "torch":
        torch.save({"local": {}, "optimizers": []}, file)
    elif kind == "empty":
        file.touch()
    elif kind == "other names":
        write_state({"local": {}}, file)
    elif kind == "no list":
        write_state({"local": {}, "optimizers": 2}, file)
    elif kind == "folder":
        file.mkdir()
    else:
        from safetensors.torch import save_file

        save_file({}, file, metadata=None if kind == "no metadata" else {"state": "[" * 100_000})
    with pytest.raises(FileError, match="does not hold the state of a rank") as error:
        read_state(file)
    assert "\n" not in str(error.value) and not (tmp_path / "unpickled").exists()
