"""Files with the state of one rank of a trainer: LocalSGD's and its optimizers'.

A safetensors file holds the tensors. Its metadata is the JSON of the rest, in which a container is its kind and its
items, and a tensor its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from laconic.errors import FileError

__all__ = ["read_state", "write_state"]


def write_state(state: Any, file: Path) -> None:
    """Write a state: dicts, lists and tuples of tensors and of what JSON has."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            name = str(len(tensors))
            tensors[name] = value.detach().cpu().contiguous().clone()
            return ["tensor", name]
        if isinstance(value, Mapping):
            return ["dict", [[key, plain(item)] for key, item in value.items()]]
        if isinstance(value, list | tuple):
            return ["list" if isinstance(value, list) else "tuple", [plain(item) for item in value]]
        return value

    save_file(tensors, file, metadata={"state": json.dumps(plain(state))})


def read_state(file: Path) -> Any:
    """Return a state that ``write_state`` wrote; ``FileError`` in one line if the file holds none."""
    from safetensors import SafetensorError, safe_open

    def restored(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        kind, content = value
        if kind == "tensor":
            return source.get_tensor(content).clone()
        if kind == "dict":
            return {key: restored(item) for key, item in content}
        return {"list": list, "tuple": tuple}[kind](map(restored, content))

    try:
        if not file.is_file():  # a pipe would never end
            raise ValueError("not a regular file")
        with safe_open(file, framework="pt") as source:
            state = restored(json.loads((source.metadata() or {})["state"]))
        if not isinstance(state, dict) or {*state} != {"local", "optimizers"}:
            raise ValueError("other names than local and optimizers")
        if not isinstance(state["local"], dict) or not isinstance(state["optimizers"], list):
            raise ValueError("local is no dict, or optimizers no list")
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RecursionError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise FileError(f"{file} does not hold the state of a rank ({reason}): remove it to start empty") from None
    return state
