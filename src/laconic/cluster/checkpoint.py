"""Checkpoints on disk, written so that the newest complete one always loads.

Each checkpoint is a folder::

    00000041-step-820/
      tensors.safetensors
      manifest.json           format, version, step, meta, size and SHA-256 of the tensors, and its own SHA-256
    00000042-step-840/
    latest                    the name of the newest, for people and scripts; this module does not read it

They are numbered in the order of writing, not by step: after going back to step 800, step 820 is written again and is
newer than an earlier step 840. A checkpoint is written under a hidden name, synced and renamed; an old one is hidden
before it is deleted. So a folder with such a name is complete. One process at a time may write.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from laconic import counters
from laconic.errors import ConfigError, FileError, InputError
from laconic.fsync import os_error_as_file_error, sync_folder

__all__ = ["VERSION", "Checkpoint", "Folder", "load", "load_latest", "save"]

VERSION = 1

log = logging.getLogger("laconic")

_FORMAT = "laconic checkpoint"
_TENSORS, _MANIFEST, _LATEST = "tensors.safetensors", "manifest.json", "latest"
_MAX_MANIFEST = 1 << 26
_NAME = re.compile(r"[0-9]{8,}-step-[0-9]+")
_MAX_NUMBER = 10**15
"""The largest number and step of a checkpoint; folders with larger ones are not ours."""
_PARTIAL = re.compile(rf"\.({_LATEST}|{_NAME.pattern})\.partial")
_DTYPES: Mapping[torch.dtype, str] = {
    torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.uint8: "U8",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.int8: "I8", torch.int16: "I16",
    torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint. The tensors are copies in memory, independent of the files."""

    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    path: Path


# ------------------------------------------------------------------------------------------------------------- save


def save(
    folder: str | os.PathLike[str], step: int, tensors: Mapping[str, Tensor], meta: dict[str, Any], *, keep: int = 3,
    at_stop: bool = False,
) -> Path:  # fmt: skip
    """Write a checkpoint and return its folder; once this returns, it survives a crash and a power cut.

    An error such as a full disk raises ``FileError`` and leaves the folder unchanged.

    Args:
        folder: The folder of all checkpoints; made if it is missing.
        step: The iteration to resume at.
        tensors: Tensors by name; they must not change meanwhile.
        meta: Plain JSON: strings as keys, lists, no tuples, finite numbers.
        keep: How many of the newest checkpoints remain.
        at_stop: This one is saved because the run stops. The next one takes its place, not that of a regular one, so
            that a run that is resumed and stopped again and again keeps its regular checkpoints.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ConfigError(f"step must be an integer of at least 0, got {step!r}")
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ConfigError(f"keep must be an integer of at least 1, got {keep!r}")
    _check_meta(meta)
    header = _safetensors_header(tensors)
    folder = Path(folder)
    try:
        _make_folder(folder)
        _remove_partials(folder)  # left by a process that was killed
        number = max(map(_number, _complete(folder)), default=0) + 1
        if number > _MAX_NUMBER:
            raise FileError(f"{folder} has a checkpoint with the largest possible number, {_MAX_NUMBER}: remove it")
        path = folder / f"{number:08d}-step-{step}"
        try:
            _write(folder, path, header, step, tensors, meta, at_stop=at_stop)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to report
                _remove_partials(folder)
            raise
    except OSError as error:
        raise FileError(
            f"cannot write the checkpoint of step {step} to {folder}: {error.strerror or error}; older checkpoints are "
            "intact"
        ) from None
    try:
        _remove_old(folder, keep)
    except OSError as error:
        log.warning("cannot remove old checkpoints from %s: %s", folder, error.strerror or error)
    return path


def _write(
    folder: Path, path: Path, header: bytes, step: int, tensors: Mapping[str, Tensor], meta: dict[str, Any], *,
    at_stop: bool,
) -> None:  # fmt: skip
    # All data is written before the first rename: a full disk cannot interrupt the renames.
    partial, latest = folder / f".{path.name}.partial", folder / f".{_LATEST}.partial"
    partial.mkdir()
    with _synced(partial / _TENSORS) as out:
        entry = _write_tensors(out, header, tensors)
    _check_readable(partial / _TENSORS)
    body = {"format": _FORMAT, "version": VERSION, "step": step, "files": {_TENSORS: entry}, "meta": meta}
    if at_stop:
        body["at_stop"] = True
    manifest = _dump(body | {"sha256": _sha256(_dump(body))})
    if len(manifest) > _MAX_MANIFEST:
        raise InputError(
            f"a checkpoint's meta may take {_MAX_MANIFEST} bytes as JSON, got {len(manifest)}: use tensors"
        )
    with _synced(partial / _MANIFEST) as out:
        out.write(manifest)
    sync_folder(partial)
    with _synced(latest) as out:
        out.write(f"{path.name}\n".encode())
    partial.rename(path)
    sync_folder(folder)
    latest.replace(folder / _LATEST)
    sync_folder(folder)


def _check_meta(meta: dict[str, Any]) -> None:
    try:
        if isinstance(meta, dict) and json.loads(json.dumps(meta, allow_nan=False)) == meta:
            return
        reason = "it would be loaded differently"
    except (TypeError, ValueError, RecursionError) as error:
        reason = str(error)
    raise InputError(f"a checkpoint's meta must be plain JSON (string keys, lists, finite numbers): {reason}")


def _dump(value: Any) -> bytes:
    """Return the canonical JSON of a value; a manifest in another form is damaged."""
    return json.dumps(value, allow_nan=False, indent=1, sort_keys=True).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _safetensors_header(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the header of a safetensors file whose data are these tensors in this order.

    The safetensors library is not used for writing: it copies every tensor, and the data are hashed while written.
    """
    header, offset = {}, 0
    for name, x in tensors.items():
        if not isinstance(name, str) or not isinstance(x, Tensor) or name == "__metadata__":
            raise InputError(f"a checkpoint holds tensors by name, got {type(x).__name__} under {name!r}")
        if x.dtype not in _DTYPES or x.layout != torch.strided or x.is_quantized or x.is_meta:
            raise InputError(f"a checkpoint cannot hold tensor {name!r}: {x.dtype}, {x.layout}, on {x.device}")
        header[name] = {"dtype": _DTYPES[x.dtype], "shape": [*x.shape], "data_offsets": [offset, offset + x.nbytes]}
        offset += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _check_readable(file: Path) -> None:
    """Raise if safetensors cannot read the file, for example because a name is not Unicode or the header too long."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            pass
    except SafetensorError as error:
        raise InputError(f"a checkpoint cannot hold these tensors: {error}") from None


def _write_tensors(out: BinaryIO, header: bytes, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    digest = hashlib.sha256(header)
    nbytes = out.write(header)
    for x in tensors.values():
        if x.numel():  # numpy cannot view nothing as bytes
            data = x.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest.update(data)
            nbytes += out.write(data)
    return {"nbytes": nbytes, "sha256": digest.hexdigest()}


def _make_folder(folder: Path) -> None:
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(exist_ok=True)
        sync_folder(missing.parent)


def _remove_old(folder: Path, keep: int) -> None:
    """Remove all but the newest. They are renamed first, so that none looks complete while it is being deleted."""
    *earlier, newest = _complete(folder)
    regular = [path for path in earlier if not _is_at_stop(path)]
    count = keep if _is_at_stop(newest) else keep - 1
    for path in set(earlier) - set(regular[max(0, len(regular) - count) :]):
        path.rename(folder / f".{path.name}.partial")
    _remove_partials(folder)


def _is_at_stop(path: Path) -> bool:
    """Whether a checkpoint was saved because the run stopped; a damaged one counts as regular."""
    try:
        return _read_manifest(path).get("at_stop") is True
    except (FileError, OSError):
        return False


def _remove_partials(folder: Path) -> None:
    for path in folder.iterdir():
        if _PARTIAL.fullmatch(path.name):
            if path.is_dir() and not path.is_symlink():  # of a link only the link is removed
                shutil.rmtree(path)
            else:
                path.unlink()


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    with path.open("xb") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())


# ----------------------------------------------------------------------------------------------------------- folder


class Folder:
    """The checkpoints of one process, by step.

    Args:
        path: Their folder; made when the first is saved.
        keep: How many of the newest remain.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int = 3) -> None:
        self.path, self._keep = Path(path), keep

    def save(self, step: int, tensors: Mapping[str, Tensor], meta: dict[str, Any]) -> None:
        save(self.path, step, tensors, meta, keep=self._keep)

    def save_at_stop(self, step: int, tensors: Mapping[str, Tensor], meta: dict[str, Any]) -> None:
        """Save a checkpoint because the run stops, unless the newest one has this step; see ``save``."""
        paths = _complete(self.path) if self.path.is_dir() else []
        if not paths or _step(paths[-1]) != step:
            save(self.path, step, tensors, meta, keep=self._keep, at_stop=True)

    def versions(self) -> list[int]:
        """Return the steps of all complete checkpoints; their content is not checked."""
        return sorted(self._paths())

    def fetch(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        paths = self._paths()
        if step not in paths:
            raise FileError(f"{self.path} has no checkpoint of step {step}")
        checkpoint = load(paths[step])
        return checkpoint.tensors, checkpoint.meta

    def forget(self, after: int) -> None:
        """Remove the checkpoints after a step, before the job repeats these steps."""
        if not self.path.is_dir():
            return
        try:
            for path in _complete(self.path):
                if _step(path) > after:
                    path.rename(self.path / f".{path.name}.partial")
            _remove_partials(self.path)
        except OSError as error:
            log.warning("cannot remove old checkpoints from %s: %s", self.path, error.strerror or error)

    def _paths(self) -> dict[int, Path]:
        """Return the folders by step; of equal steps the newest."""
        return {_step(path): path for path in _complete(self.path)} if self.path.is_dir() else {}


# ------------------------------------------------------------------------------------------------------------- load


def load_latest(folder: str | os.PathLike[str]) -> Checkpoint | None:
    """Load the newest undamaged checkpoint; return None if there is no checkpoint at all.

    A damaged one is logged and skipped. If all are damaged, this raises ``FileError`` rather than start from nothing.
    """
    folder = Path(folder)
    with os_error_as_file_error(f"read checkpoints from {folder}"):
        paths = _complete(folder)[::-1] if folder.exists() else []
    errors = []
    for path in paths:
        try:
            return load(path)
        except FileError as error:
            log.warning("skipping a checkpoint: %s", error)
            errors.append(str(error))
    if errors:
        raise FileError(f"none of the {len(errors)} checkpoints in {folder} can be read; the newest: {errors[0]}")
    return None


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Load one checkpoint and verify every byte; raise ``FileError`` if it is damaged."""
    path = Path(path)
    with os_error_as_file_error(f"read checkpoint {path}"):
        return _load(path)


def _load(path: Path) -> Checkpoint:
    from safetensors import SafetensorError, safe_open

    body = _read_manifest(path)
    file = path / _TENSORS
    _verify(file, body["files"][_TENSORS])
    tensors = {}
    try:
        with safe_open(file, framework="pt") as source:
            for name in getattr(source, "offset_keys", source.keys)():  # in the order of saving, if the library has it
                tensors[name] = source.get_tensor(name).clone()  # a copy: the file may be removed
    except (SafetensorError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        # Besides its own error those of torch, for dtypes and shapes that torch does not have.
        raise FileError(f"{file} is not a safetensors file that torch can read: {_first_line(error)}") from None
    return Checkpoint(body["step"], tensors, body["meta"], path)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / _MANIFEST
    if not file.is_file():
        raise FileError(f"{path} is not a checkpoint: it has no {_MANIFEST}")
    if file.stat().st_size > _MAX_MANIFEST:
        raise FileError(f"{file} is too large to be a manifest")
    body = _read_sealed(file.read_bytes())
    if body is None:
        raise FileError(f"{file} is damaged: it does not match its own SHA-256")
    if body.get("format") != _FORMAT or body.get("version") != VERSION:
        raise FileError(
            f"{file} is a {body.get('format')!r} of version {body.get('version')!r}, expected {_FORMAT!r} of version "
            f"{VERSION}: a newer laconic may read it"
        )
    if not _is_well_formed(body):
        raise FileError(f"{file} must hold a step, meta, and the size and SHA-256 of {_TENSORS} and of nothing else")
    return body


def _read_sealed(text: bytes) -> dict[str, Any] | None:
    """Return the content of a manifest, or None if it does not match its SHA-256."""
    try:
        body = json.loads(text)
        if not isinstance(body, dict) or _dump(body) != text:
            return None
        claimed = body.pop("sha256", None)
        return body if claimed == _sha256(_dump(body)) else None
    except (ValueError, RecursionError):
        return None


def _is_well_formed(body: dict[str, Any]) -> bool:
    files = body.get("files")
    if not isinstance(files, dict) or list(files) != [_TENSORS]:  # no other file name is ever opened
        return False
    entry, step = files[_TENSORS], body.get("step")
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("nbytes"), int)
        and isinstance(entry.get("sha256"), str)
        and isinstance(step, int)
        and not isinstance(step, bool)
        and step >= 0
        and isinstance(body.get("meta"), dict)
    )


def _verify(file: Path, entry: dict[str, Any]) -> None:
    nbytes = file.stat().st_size if file.is_file() else None
    if nbytes != entry["nbytes"]:
        raise FileError(
            f"{file} must have {entry['nbytes']} bytes, {'it is missing' if nbytes is None else f'it has {nbytes}'}"
        )
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while block := source.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != entry["sha256"]:
        raise FileError(f"{file} is damaged: its SHA-256 differs from the manifest")


def _complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints, the newest last."""
    paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    usable = [path for path in paths if max(_number(path), _step(path)) <= _MAX_NUMBER]
    if len(usable) < len(paths):
        counters.count("huge checkpoint numbers", 1, f"{folder} has folders with numbers that no checkpoint has")
    return sorted(usable, key=_number)


def _number(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
