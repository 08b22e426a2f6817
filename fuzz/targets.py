"""The fuzz targets: for each, generated seeds, a mutation, and a check of properties that hold for all bytes.

A check returns whether the bytes were accepted, and raises if a property is violated: invalid bytes raise
``FrameError`` (and ``FileError`` for files) only, decoded tensors are as declared, and two ways to the same tensor
agree. ``guarded`` adds limits of time and memory. Atheris is not needed.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

import bend
import laconic
import laws
import mutate
from file_target import bend_file, check_file, file_seeds
from inputs import folder, ramp
from laconic import FrameError, checkpoints, kernels, wire
from laconic.cluster import checkpoint
from laconic.errors import FileError
from message_targets import bend_server, check_messages, check_server, message_seeds, server_seeds
from pipeline_target import bend_pipeline, check_pipeline, pipeline_seeds
from state_target import bend_state, check_state, state_seeds
from transform_target import bend_transform, check_transform, transform_seeds

MAX_NUMEL = mutate.MAX_NUMEL
MAX_SECONDS = 1.0
"""The most processor time of an input."""
MAX_GROWTH = 64 << 20
"""The most bytes by which an input may grow the process."""
REFERENCE_SHARE = 1
"""One of so many small frames is decoded by the reference, too: under sanitizers few, because it is not under test."""


@dataclass(frozen=True)
class Target:
    name: str
    seeds: Callable[[], list[bytes]]
    bend: Callable[..., bytes]
    check: Callable[[bytes], bool]


def guarded(target: Target, data: bytes) -> bool:
    """Run the check of a target, with limits of time and memory."""
    taken, seconds, grown = _measured(target, data)
    if seconds >= MAX_SECONDS:  # what is loaded on first use does not count
        taken, seconds, _ = _measured(target, data)
    assert seconds < MAX_SECONDS, f"{len(data)} bytes took {seconds:.1f} s"
    assert grown < MAX_GROWTH, f"{len(data)} bytes took {grown >> 20} MiB"
    return taken


def _measured(target: Target, data: bytes) -> tuple[bool, float, int]:
    """Return whether an input was taken, the seconds of processor time and the bytes of memory that it took."""
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken = target.check(data)
    seconds = time.process_time() - began
    return taken, seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@cache
def frames_of(*specs: str) -> list[bytes]:
    """Valid frames of each spec: some values, few, one, equal ones, none but zero, other dtypes."""
    inputs = (ramp(300).view(20, 15), ramp(40), ramp(1)[0], torch.full((9,), 0.75), torch.zeros(3, 2))
    encoded = [laconic.encode(x, spec, seed=7) for spec in specs for x in inputs]
    return encoded + [laconic.encode(ramp(50, dtype), specs[0]) for dtype in laws.DTYPES[1:]]


def bundles_of(specs: tuple[str, ...]) -> list[bytes]:
    """Bundles with frames of one shape, three by three."""
    x = ramp(60)
    frames = [laconic.encode(x, spec, seed=7) for spec in specs]
    return [
        bytes(wire.pack_bundle([(f"slot{j}", frame) for j, frame in enumerate(frames[i : i + 3])]))
        for i in range(0, len(frames), 3)
    ]


def check_parser(data: bytes) -> bool:
    try:
        if wire.is_bundle(data):
            parts = wire.unpack_bundle(data)
            assert bytes(wire.pack_bundle(parts)) == data, "another bundle than what was read"
            return True
        packet = wire.unpack(data, max_numel=MAX_NUMEL)
    except FrameError:
        return False
    assert packet.spec.numel <= MAX_NUMEL
    # The one freedom of a writer: 64-bit sizes where 32 would do.
    assert data[5] & wire.WIDE or bytes(wire.pack(packet)) == data, "another frame than what was read"
    return True


def check_decode(data: bytes) -> bool:
    """Decode as the hostile-frame tests do; some small frames by the reference, too, whose branches atheris sees."""
    taken = mutate.survives(data, False)
    if mutate.crc32c(data) % REFERENCE_SHARE:
        return taken
    try:
        packet = wire.unpack(data, max_numel=300)
    except FrameError:
        return taken
    with kernels.use_backend("reference"):
        try:
            truth = laconic.decode(data)
        except FrameError:
            assert not taken, "the reference refuses what the core takes"
            return False
    assert taken, "the reference takes what the core refuses"
    assert laws.same_bits(laconic.decode(data), truth), f"another tensor than the reference's: {packet.codec}"
    return True


@cache
def sums_of(*specs: str) -> list[bytes]:
    """Bundles of what three workers send, and of a sum of some of it, by each spec, for a server and for a ring."""
    bundles, xs = [], [ramp(300).view(20, 15) * scale for scale in (1.0, -0.5, 0.25)]
    for spec in specs:
        for ring in (False, True):
            summing = laconic.summing(spec, workers=3, ring=ring)
            agreed = summing.agree([summing.probe(x, seed=7) for x in xs])
            frames = [summing.encode(x, agreed, seed=7, worker=i) for i, x in enumerate(xs)]
            bundles.append(bytes(wire.pack_bundle([(str(i), frame) for i, frame in enumerate(frames)])))
            bundles.append(bytes(wire.pack_bundle([("a", frames[0]), ("b", laconic.sums.add(*frames[1:]))])))
    return bundles


def _bundled_frames(data: bytes) -> list[Any]:
    """Return the frames of a bundle; none if the bytes are not a bundle."""
    try:
        return [frame for _, frame in wire.unpack_bundle(data)]
    except FrameError:
        return []


def check_sums(data: bytes) -> bool:
    """A bundle's frames added up: what is refused leaves the sum alone, and what is taken decodes."""
    frames = _bundled_frames(data)
    total, taken = laconic.Sum(max_numel=MAX_NUMEL), 0
    for frame in frames:
        before = total.finish() if taken else None
        try:
            total.add(frame)
            taken += 1
        except FrameError:
            assert before is None or total.finish() == before, "a refused frame changed the sum"
    if not taken:
        return False
    answer = total.finish()
    try:
        mean = laconic.decode(answer)
    except FrameError:  # scales that no sender writes, or sums beyond float32
        return False
    assert bool(torch.isfinite(mean).all())
    return True


def check_aggregate(data: bytes) -> bool:
    """A bundle's frames as what many senders sent: decoded into one sum, or one by one."""
    frames = _bundled_frames(data)
    if not frames:
        return False
    weights = [0.5, 0.25, 1.0, 0.0, -2.0] * len(frames)
    refused = None
    try:
        total = laconic.aggregate.weighted_sum(frames, weights[: len(frames)], max_numel=MAX_NUMEL)
    except FrameError as error:
        refused = error
    try:
        tensors = [laconic.decode(frame, max_numel=MAX_NUMEL) for frame in frames]
    except FrameError:
        assert refused is not None, "summed, though it does not decode"
        return False
    if refused is not None:
        carried = all(tensor.is_floating_point() for tensor in tensors)
        same = len({tensor.shape for tensor in tensors}) == 1
        assert not (carried and same), f"decodes, but is not summed: {refused}"
        return False
    assert total.shape == tensors[0].shape and total.dtype == torch.float32
    if all(tensor.dtype == torch.float32 for tensor in tensors):  # a half decodes with a rounding of its own
        wanted = torch.zeros(total.shape)
        for tensor, weight in zip(tensors, weights, strict=False):
            wanted += tensor * torch.tensor(weight, dtype=torch.float32)
        assert torch.equal(total.nan_to_num(), wanted.nan_to_num()), "another sum than that of what decodes"
    laconic.aggregate.mean(frames, max_numel=MAX_NUMEL)
    return True


def check_explain(data: bytes) -> bool:
    try:
        explained = laconic.explain(data, max_numel=MAX_NUMEL)
    except FrameError:
        return False
    repr(explained)
    assert sum(each.numel for each in explained) <= MAX_NUMEL
    if wire.is_bundle(data):
        assert len(laconic.decode_bundle(data, max_numel=MAX_NUMEL)) == len(explained)
    else:
        assert laconic.decode(data, max_numel=MAX_NUMEL).shape == explained[0].shape
    return True


def bend_frame_or_bundle(data: bytes, rng: Any, scramble: bend.Scramble, room: int) -> bytes:
    return (bend.bundle if data[5:6] == b"\1" else bend.frame)(data, rng, scramble, room)


def bend_either_way(data: bytes, rng: Any, scramble: bend.Scramble, room: int) -> bytes:
    """Half of them as plain bytes: what is refused before the checksum."""
    return scramble(data, room) if rng.random() < 0.3 else bend_frame_or_bundle(data, rng, scramble, room)


@cache
def lac_seeds() -> list[bytes]:
    from safetensors.torch import save_file

    tensors = {
        "weight": ramp(5000).view(50, 100), "bias": ramp(9), "half": ramp(20, torch.float16), "scalar": ramp(1)[0],
        "steps": torch.arange(5), "mask": torch.tensor([True, False]), "none": torch.zeros(0, 3), "ŝ": torch.zeros(4),
    }  # fmt: skip
    seeds = []
    with folder() as at:
        for spec in ("qsgd:4", "topk:0.01|qsgd:4|rans", "adaptive:3.0,tail=0.01|huffman", "none"):
            for metadata in ({"format": "pt", "note": "as ever"}, None):
                save_file(tensors, at / "in.safetensors", metadata)
                checkpoints.pack_file(at / "in.safetensors", at / "out.lac", spec, force=True)
                seeds.append((at / "out.lac").read_bytes())
    return seeds


def bend_lac(data: bytes, rng: Any, scramble: bend.Scramble, room: int) -> bytes:
    return bend.bundle(data, rng, scramble, room, metadata=checkpoints.METADATA.encode())


def check_lac(data: bytes) -> bool:
    from safetensors import safe_open

    with folder() as at:
        source, target = at / "in.lac", at / "out.safetensors"
        source.write_bytes(data)
        listed = explained = None
        with contextlib.suppress(FrameError, FileError):
            listed = checkpoints.list_file(source)
        with contextlib.suppress(FrameError, FileError):
            explained = checkpoints.explain_file(source, max_numel=MAX_NUMEL)
        try:
            summary = checkpoints.unpack_file(source, target, max_numel=MAX_NUMEL)
        except (FrameError, FileError):
            assert [path.name for path in at.iterdir()] == ["in.lac"], "a part of a file is left"
            return False
        assert listed is not None and listed.entries == summary.entries and listed.bytes_out == summary.bytes_out
        assert explained is not None and len(explained) == len(summary.entries)
        assert target.stat().st_size == summary.bytes_out
        with safe_open(target, framework="pt") as file:  # what we write, others can read
            assert set(file.keys()) == {entry.name for entry in summary.entries}
            for entry in summary.entries:
                assert tuple(file.get_slice(entry.name).get_shape()) == entry.shape
        return True


@cache
def checkpoint_seeds() -> list[bytes]:
    tensors = {
        "weight": ramp(60).view(20, 3), "momentum": ramp(7), "scalar": ramp(1)[0], "empty": torch.zeros(0, 3),
        "bytes": torch.arange(9, dtype=torch.uint8), "eighth": torch.zeros(5, dtype=torch.float8_e4m3fn),
    }  # fmt: skip
    seeds = []
    for step, kept, meta in ((820, tensors, {"clock": [1, 2], "job": {"lr": 0.1}}), (0, {}, {})):
        with folder() as at:
            path = checkpoint.save(at, step, kept, meta)
            parts = [(path / name).read_bytes() for name in ("manifest.json", "tensors.safetensors")]
            seeds.append(bend.join_checkpoint(*parts))
    return seeds


def check_checkpoint(data: bytes) -> bool:
    manifest, tensors = bend.split_checkpoint(data)
    with folder() as at:
        path = at / "00000001-step-820"
        path.mkdir()
        (path / "manifest.json").write_bytes(manifest)
        (path / "tensors.safetensors").write_bytes(tensors)
        latest = None
        with contextlib.suppress(FileError):
            latest = checkpoint.load_latest(at)
        try:
            loaded = checkpoint.load(path)
        except FileError:
            assert latest is None
            return False
    assert latest is not None and latest.tensors.keys() == loaded.tensors.keys()
    assert type(loaded.step) is int and loaded.step >= 0 and isinstance(loaded.meta, dict)
    assert sum(x.nbytes for x in loaded.tensors.values()) <= len(tensors), "more than the file holds"
    return True


def _decode(name: str, specs: tuple[str, ...]) -> Target:
    return Target(f"decode-{name}", lambda: frames_of(*specs), bend.frame, check_decode)


TARGETS = {
    target.name: target
    for target in (
        Target("parser", lambda: frames_of(*laws.EVERY[::5]) + bundles_of(laws.EVERY), bend_either_way, check_parser),
        _decode("casts", laws.CASTS),
        _decode("quantizers", laws.QUANTIZERS),
        _decode("lanes", laws.PACKED_INTS + laws.LINEAR),
        _decode("adaptive", laws.ADAPTIVE),
        _decode("selectors", laws.SELECTORS + laws.CHAINS),
        _decode("coders", laws.CODED),
        Target(
            "sums",
            lambda: sums_of("shared:4", "thc:2", "randk:0.5|thc:3", "randk:0.5", "union", "powersgd:2"),
            bend.bundle,
            check_sums,
        ),
        Target("aggregate", lambda: bundles_of(laws.EVERY), bend.bundle, check_aggregate),
        Target("explain", lambda: frames_of(*laws.EVERY) + bundles_of(laws.EVERY), bend_frame_or_bundle, check_explain),
        Target("lac", lac_seeds, bend_lac, check_lac),
        Target("checkpoint", checkpoint_seeds, bend.checkpoint, check_checkpoint),
        Target("messages", message_seeds, bend.messages, check_messages),
        Target("server", server_seeds, bend_server, check_server),
        Target("pipeline", pipeline_seeds, bend_pipeline, check_pipeline),
        Target("transform", transform_seeds, bend_transform, check_transform),
        Target("states", state_seeds, bend_state, check_state),
        Target("files", file_seeds, bend_file, check_file),
    )
}
