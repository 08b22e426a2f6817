"""Regression tests of inputs that fuzzing has found, and a short run of each fuzz target; ``make fuzz`` runs longer.

The inputs are in golden/fuzz, in a folder per target, named after the defect they found.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import laconic
import mutate
from laconic import FrameError, wire

FUZZ = Path(__file__).resolve().parent.parent / "fuzz"
FOUND = sorted((Path(__file__).resolve().parent / "golden" / "fuzz").glob("*/*.bin"))
sys.path.append(str(FUZZ))

import bend  # noqa: E402
import run  # noqa: E402
import state_target  # noqa: E402
from targets import TARGETS, guarded  # noqa: E402


@pytest.fixture(autouse=True)
def no_process_group_stays():
    yield
    state_target.end()


@pytest.mark.parametrize("path", FOUND, ids=[f"{path.parent.name}/{path.stem}" for path in FOUND])
def test_former_finding_passes(path):
    guarded(TARGETS[path.parent.name], path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_target_accepts_its_seeds_and_some_mutations(name):
    target, rng = TARGETS[name], random.Random(0)
    seeds, scramble = target.seeds(), bend.blind(rng)
    assert all(guarded(target, seed) for seed in seeds if name != "messages")  # one of which is incomplete
    accepted = 0
    for _ in range(100):
        accepted += guarded(target, target.bend(rng.choice(seeds), rng, scramble, 1 << 14))
    assert 3 <= accepted <= 97, "the mutations are all accepted or all rejected"


def test_driver_lists_all_targets():
    assert tuple(TARGETS) == run.NAMES


def test_time_to_explain_a_bundle_is_linear_in_its_packets():
    frame = laconic.encode(torch.ones(2), "none")
    names = [b"%d" % i for i in range(6_000)]
    bundle = mutate.Bundle(names, [frame] * len(names)).write()
    began = time.process_time()
    assert len(laconic.explain(bundle)) == len(names)
    explaining = time.process_time() - began
    began = time.process_time()
    laconic.decode_bundle(bundle)
    assert explaining < 10 * (time.process_time() - began)


def test_bundle_of_empty_frames_raises_frame_error():
    with pytest.raises(FrameError, match="at least 32 bytes"):
        wire.unpack_bundle(mutate.Bundle([b""] * 1000, [b""] * 1000).write())


LITTLE_MEMORY = """
import resource, struct, laconic, mutate, torch
with open("/proc/self/statm") as file:
    limit = int(file.read().split()[0]) * resource.getpagesize() + (1 << 27)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
n = 31 << 19
chunks = -(-n // 2**19)
coded = struct.pack(f"<{chunks}I", *[3] * chunks) + bytes([0, 1, 0]) * chunks
ends, ones = struct.pack("<ff", 0, 1), struct.pack("<ff", 1, 1)
for name, read, frame in (
    ("symbols are counted", laconic.explain, mutate.Frame([n], [ends, coded], b"uniform:8|rans:pure")),
    ("halves saturate", laconic.decode, mutate.Frame([n], [ones, b""], b"uniform:8", dtype=3)),
):
    try:
        read(frame.write())
        print(name, "read")
    except laconic.FrameError:
        print(name, "FrameError")
"""


def test_out_of_memory_after_decoding_raises_frame_error():
    done = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.splitlines() == ["symbols are counted read", "halves saturate FrameError"]
