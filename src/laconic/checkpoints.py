"""Checkpoint files: a safetensors file <-> a ``.lac`` file, tensor by tensor.

A ``.lac`` file is one bundle (docs/wire-format.md) whose slots are the tensors. Float tensors are encoded by a codec;
integers and booleans are stored exactly. The metadata of a safetensors file is one more packet, the UTF-8 bytes of a
JSON object under the name ``__metadata__``, which safetensors reserves, so no tensor can have it.

Files are written under a temporary name beside their target, synced and renamed, so that no partial file remains.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from laconic import wire
from laconic.codecs import Chain, codec, without_memory
from laconic.errors import FileError, FrameError, InputError, NonFiniteError
from laconic.frames import max_nbytes, open_packet, write_frame
from laconic.fsync import os_error_as_file_error, sync_folder
from laconic.inspect import Explanation, explain
from laconic.packet import FLOATS, Packet, TensorSpec
from laconic.policy import Choice, Policy

__all__ = ["METADATA", "Entry", "Summary", "default_max_numel", "explain_file", "list_file", "pack_file", "unpack_file"]

METADATA = "__metadata__"
"""The slot of a safetensors file's metadata."""

NUMEL_ALLOWED, NUMEL_PER_BYTE = 1 << 24, 1 << 10
"""The values that a file may declare by default, and that it may declare besides for each of its bytes."""

Progress = Callable[[int, int], None]
"""Called with the bytes of the tensors processed so far, and of all tensors."""

_SAFETENSORS: Mapping[str, torch.dtype] = {
    "F32": torch.float32, "F64": torch.float64, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
}  # fmt: skip
_TORCH = {dtype: name for name, dtype in _SAFETENSORS.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a ``.lac`` file.

    ``nbytes`` is the size of its frame; ``note`` says why its codec is not the one given for the file (empty if it is,
    or if the file was only read: a ``.lac`` file does not store the reason).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    codec: str
    nbytes: int
    note: str = ""


@dataclass(frozen=True)
class Summary:
    """What was packed or unpacked. Bytes are those of the whole files, including headers."""

    entries: tuple[Entry, ...]
    bytes_in: int
    bytes_out: int
    seconds: float
    metadata: Mapping[str, str] | None = None


# ------------------------------------------------------------------------------------------------------------- pack


def pack_file(
    source: str | os.PathLike[str], target: str | os.PathLike[str], spec: str, *,
    policy: Policy | Mapping[str, str] | None = None, seed: int = 0, force: bool = False,
    progress: Progress | None = None,
) -> Summary:  # fmt: skip
    """Compress a safetensors file into a ``.lac`` file; one tensor is in memory at a time.

    Args:
        spec: The codec of float tensors, without channel stages (no ``ef``).
        policy: Codecs by name pattern, and exemptions; by default one-dimensional and small tensors are exempt.
        seed: Decides all randomness, together with each tensor's name.
        force: Replace ``target`` if it exists.
        progress: Called after each tensor.
    """
    began = time.perf_counter()
    source, target, rules = Path(source), Path(target), Policy.of(policy)
    for used in (spec, rules.small, *rules.rules.values()):
        without_memory(used, ", and a file is written once: drop it and use '{codec}'")
    _check_paths(source, target, force)
    with _open_safetensors(source) as file:
        metadata = file.metadata()
        names = list(getattr(file, "offset_keys", file.keys)())  # in file order, if this version of safetensors has it
        tensors = {name: _spec_of(file, name, source) for name in names}
        choices = {name: _choose(name, tensor, spec, rules) for name, tensor in tensors.items()}
        _require_tensors(tensors, spec, source)
        entries: list[Entry] = []
        done, total = 0, sum(tensor.nbytes for tensor in tensors.values())
        buffer = torch.empty(0, dtype=torch.uint8)
        with _replacing(target) as out:
            bundle = _BundleWriter(out, [*names, METADATA] if metadata is not None else names)
            for name in names:
                x, chain = file.get_tensor(name), codec(choices[name].spec)
                if buffer.numel() < max_nbytes(chain, x):
                    buffer = torch.empty(max_nbytes(chain, x), dtype=torch.uint8)
                try:
                    nbytes, _ = write_frame(x, chain, buffer, seed=seed + zlib.crc32(name.encode()), exact=True)
                except NonFiniteError:
                    raise NonFiniteError(
                        f"tensor {name!r} of {source} holds a NaN, an infinity or a value beyond float32; a .lac file "
                        "holds finite values only: repair the tensor, or leave it out"
                    ) from None
                except InputError as error:
                    raise type(error)(f"tensor {name!r} of {source}: {error}") from None
                bundle.add(buffer[:nbytes])
                entries.append(_entry(name, tensors[name], chain, nbytes, choices[name].reason))
                done += tensors[name].nbytes
                if progress is not None:
                    progress(done, total)
            if metadata is not None:
                bundle.add(wire.as_bytes(_metadata_frame(metadata)))
            bytes_out = bundle.close()
    return Summary(tuple(entries), source.stat().st_size, bytes_out, time.perf_counter() - began, metadata)


def _spec_of(file: Any, name: str, source: Path) -> TensorSpec:
    tensor = file.get_slice(name)
    dtype = _SAFETENSORS.get(tensor.get_dtype())
    if dtype is None:
        raise InputError(
            f"tensor {name!r} of {source} has dtype {tensor.get_dtype()}; a frame carries {', '.join(_SAFETENSORS)}. "
            "Convert it first, or keep it in a separate file."
        )
    if len(name.encode()) > wire.MAX_NAME:
        raise InputError(f"a tensor name has at most {wire.MAX_NAME} bytes in a bundle, {name[:40]!r}… has more")
    return TensorSpec(tuple(tensor.get_shape()), dtype)


def _choose(name: str, tensor: TensorSpec, spec: str, policy: Policy) -> Choice:
    if tensor.dtype not in FLOATS:
        return Choice("none", f"is {_dtype_name(tensor.dtype)}")
    return policy.choose(name, tensor, spec)


def _require_tensors(tensors: Mapping[str, TensorSpec], spec: str, source: Path) -> None:
    if not tensors:
        raise InputError(f"{source} holds no tensors: there is nothing to pack")
    if codec(spec).text != "none" and not any(tensor.dtype in FLOATS for tensor in tensors.values()):
        dtypes = ", ".join(sorted({_dtype_name(tensor.dtype) for tensor in tensors.values()}))
        raise InputError(
            f"{source} holds no float tensors for {spec!r} to encode, only {dtypes}, which are stored exactly: "
            "use the codec 'none' to pack them anyway"
        )


def _metadata_frame(metadata: Mapping[str, str]) -> bytes:
    text = json.dumps(metadata, ensure_ascii=False, sort_keys=True).encode()
    return bytes(wire.pack(codec("none").encode(torch.frombuffer(bytearray(text), dtype=torch.uint8), exact=True)))


class _BundleWriter:
    """Writes a bundle frame by frame; its directory comes first and holds the sizes, so it is written last."""

    def __init__(self, out: BinaryIO, names: list[str]) -> None:
        self.out, self.names = out, names
        self.sizes: list[int] = []
        out.write(bytes(len(wire.bundle_header(names, [0] * len(names)))))

    def add(self, frame: Tensor) -> None:
        self.out.write(bytes(-self.out.tell() % wire.ALIGN))
        self.out.write(frame.numpy().data)
        self.sizes.append(frame.numel())

    def close(self) -> int:
        """Write the directory; return the bytes of the bundle."""
        end = self.out.tell()
        self.out.seek(0)
        self.out.write(wire.bundle_header(self.names, self.sizes))
        return end


# ----------------------------------------------------------------------------------------------------------- unpack


def unpack_file(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, force: bool = False,
    max_numel: int | None = None, progress: Progress | None = None,
) -> Summary:  # fmt: skip
    """Decode a ``.lac`` file into a safetensors file; one tensor is in memory at a time.

    Every checksum is verified before anything is written.

    Args:
        source: A ``.lac`` file.
        force: Replace ``target`` if it exists.
        max_numel: A file that declares more values in total raises ``FrameError``; by default ``default_max_numel``.
        progress: Called after each tensor.
    """
    began = time.perf_counter()
    source, target = Path(source), Path(target)
    _check_paths(source, target, force)
    slots, metadata = _open_bundle(source, default_max_numel(source) if max_numel is None else max_numel)
    header, total = _safetensors_header(slots, metadata)
    bytes_out = len(header) + total
    free = shutil.disk_usage(target.resolve().parent).free
    if free < bytes_out:
        raise FileError(
            f"{target} needs {bytes_out} bytes and its disk has {free} free: free space, or write to another disk"
        )
    done = 0
    with _replacing(target) as out:
        out.write(header)
        for name, (packet, chain, _) in slots.items():
            try:
                tensor = chain.decode(packet)
            except FrameError as error:
                raise FrameError(f"{source}: tensor {name!r}: {error}") from None
            out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            done += packet.spec.nbytes
            if progress is not None:
                progress(done, total)
    entries = tuple(_entry(name, packet.spec, chain, size) for name, (packet, chain, size) in slots.items())
    return Summary(entries, source.stat().st_size, bytes_out, time.perf_counter() - began, metadata)


def list_file(source: str | os.PathLike[str]) -> Summary:
    """List a ``.lac`` file: checksums are verified, nothing is decoded. ``bytes_out`` is the unpacked size."""
    began = time.perf_counter()
    source = Path(source)
    _check_source(source)
    slots, metadata = _open_bundle(source, None)
    header, total = _safetensors_header(slots, metadata)
    entries = tuple(_entry(name, packet.spec, chain, size) for name, (packet, chain, size) in slots.items())
    return Summary(entries, source.stat().st_size, len(header) + total, time.perf_counter() - began, metadata)


def explain_file(source: str | os.PathLike[str], *, max_numel: int | None = None) -> list[Explanation]:
    """Explain how each tensor of a ``.lac`` file was coded, and how many bits each part takes.

    Every tensor is decoded; a file that declares more than ``max_numel`` values in total raises ``FrameError``, by
    default more than ``default_max_numel``.
    """
    source = Path(source)
    _check_source(source)
    limit = default_max_numel(source) if max_numel is None else max_numel
    _open_bundle(source, limit)
    try:
        return [packet for packet in explain(_map(source), max_numel=limit) if packet.name != METADATA]
    except FrameError as error:
        raise FrameError(f"{source} is not a .lac file, or is damaged or truncated: {error}") from None


Slots = dict[str, tuple[Packet, Chain, int]]
"""The packets by name, with their codecs and the bytes of their frames."""


def default_max_numel(source: Path) -> int:
    """Return the values that a ``.lac`` file may declare unless a limit is given: 2^24, and 1,024 a byte of the file.

    Zeros, constants and sparse tensors take hardly any bytes, so that a short file can fill a disk. The smallest codec
    for models, ``topk:0.001|qsgd:4``, has about 600 values a byte.
    """
    return NUMEL_ALLOWED + NUMEL_PER_BYTE * source.stat().st_size


def _open_bundle(source: Path, max_numel: int | None) -> tuple[Slots, dict[str, str] | None]:
    slots: Slots = {}
    metadata: dict[str, str] | None = None
    try:
        frames = wire.unpack_bundle(_map(source))
    except FrameError as error:
        raise FrameError(f"{source} is not a .lac file, or is damaged or truncated: {error}") from None
    total = 0
    for name, frame in frames:
        if name in slots or (name == METADATA and metadata is not None):
            raise FrameError(f"{source} holds {name!r} twice")
        try:
            packet, chain = open_packet(frame)
        except FrameError as error:
            raise FrameError(f"{source}: tensor {name!r}: {error}") from None
        total += packet.spec.numel
        if name == METADATA:
            metadata = _read_metadata(packet, chain, source)
        else:
            slots[name] = (packet, chain, frame.numel())
    if max_numel is not None and total > max_numel:
        raise FrameError(
            f"{source} declares {total:,} values in {source.stat().st_size:,} bytes, more than the {max_numel:,} "
            f"allowed: if you trust the file, allow them with --max-numel {total} (max_numel={total})"
        )
    return slots, metadata


def _map(source: Path) -> memoryview:
    with os_error_as_file_error(f"read {source}"), source.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:  # an empty file cannot be mapped
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _read_metadata(packet: Packet, chain: Chain, source: Path) -> dict[str, str]:
    try:
        # A packet without sections is all zero, of any size, and not JSON.
        if packet.spec.dtype != torch.uint8 or len(packet.spec.shape) != 1 or not packet.sections:
            raise ValueError
        metadata = json.loads(bytes(chain.decode(packet).numpy().data))
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError
        for text in (*metadata, *metadata.values()):
            text.encode()  # JSON can hold a lone surrogate, which cannot be written as UTF-8
    except (ValueError, RecursionError):
        raise FrameError(f"{source}: {METADATA!r} must hold a JSON object of strings, as UTF-8 bytes") from None
    return metadata


def _safetensors_header(slots: Slots, metadata: Mapping[str, str] | None) -> tuple[bytes, int]:
    """Return the header of a safetensors file with these tensors, in this order, and the bytes of all tensors.

    The library's writer is not used, because it needs all tensors in memory and copies each.
    """
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata is not None else {}
    at = 0
    for name, (packet, _, _) in slots.items():
        spec = packet.spec
        header[name] = {"dtype": _TORCH[spec.dtype], "shape": spec.shape, "data_offsets": (at, at + spec.nbytes)}
        at += spec.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, at


# ------------------------------------------------------------------------------------------------------------ files


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _entry(name: str, tensor: TensorSpec, chain: Chain, nbytes: int, note: str = "") -> Entry:
    return Entry(name, tensor.shape, _dtype_name(tensor.dtype), chain.text, nbytes, note)


@contextlib.contextmanager
def _open_safetensors(source: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(source, framework="pt") as file:
            yield file
    except SafetensorError as error:
        if zipfile.is_zipfile(source):
            raise FileError(
                f"{source} looks like a file of torch.save, a pickle, which laconic does not read: convert it by "
                "safetensors.torch.save_file(torch.load(..., weights_only=True), ...)"
            ) from None
        raise FileError(f"{source} is not a safetensors file, or is damaged: {error}") from None


def _check_source(source: Path) -> None:
    if not source.exists():
        raise FileError(f"no such file: {source}")
    if not source.is_file():
        raise FileError(f"expected a file to read, {source} is not a file")
    if not os.access(source, os.R_OK):
        raise FileError(f"cannot read {source}: permission denied")


def _check_paths(source: Path, target: Path, force: bool) -> None:
    """Check both paths before the work starts: packing may take an hour."""
    _check_source(source)
    with os_error_as_file_error(f"write {target}"):
        _check_target(source, target, force)


def _check_target(source: Path, target: Path, force: bool) -> None:
    if target.is_dir():
        raise FileError(f"expected a file to write, {target} is a folder: name a file in it")
    if target.exists() and not target.is_file():
        raise FileError(f"expected a file to write, {target} is not a regular file")
    if target.exists() and target.samefile(source):
        raise FileError(f"input and output are the same file, {source}: name another output")
    if target.exists() and not force:
        raise FileError(f"{target} exists: replace it with --force (force=True), or name another output")
    folder = target.resolve().parent
    if not folder.is_dir():
        raise FileError(f"no such folder: {folder}")


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces the target on success and is removed on failure."""
    target = target.resolve()  # keep a symbolic link
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        with os_error_as_file_error(f"write {target}"):
            # Not tempfile, whose files only their owner can read.
            with partial.open("xb") as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
            partial.replace(target)
            sync_folder(target.parent)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
