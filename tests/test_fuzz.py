"""What fuzzing has found, once and for all; and that the fuzzers still have an aim. ``make fuzz`` looks for more.

Inputs lie in golden/fuzz, in a folder per target, named after what was wrong with the code that read them.
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
from targets import TARGETS, guarded  # noqa: E402


@pytest.mark.parametrize("path", FOUND, ids=[f"{path.parent.name}/{path.stem}" for path in FOUND])
def test_a_finding_stays_mended(path):
    guarded(TARGETS[path.parent.name], path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_takes_its_seeds_and_some_of_what_becomes_of_them(name):
    target, dice = TARGETS[name], random.Random(0)
    seeds, scramble = target.seeds(), bend.blind(dice)
    assert all(guarded(target, seed) for seed in seeds if name != "messages")  # one of which is but a beginning
    taken = 0
    for _ in range(150):
        taken += guarded(target, target.bend(dice.choice(seeds), dice, scramble, 1 << 14))
    assert 5 <= taken <= 145, "the mutator has lost its aim: all or none are refused"


def test_the_driver_knows_all_targets():
    assert tuple(TARGETS) == run.NAMES


def test_the_time_to_explain_a_bundle_grows_with_its_packets_only():
    frame = laconic.encode(torch.ones(2), "none")
    names = [b"%d" % i for i in range(6_000)]
    bundle = mutate.Bundle(names, [frame] * len(names)).write()
    began = time.process_time()
    assert len(laconic.explain(bundle)) == len(names)
    explaining = time.process_time() - began
    began = time.process_time()
    laconic.decode_bundle(bundle)
    assert explaining < 10 * (time.process_time() - began)


def test_a_bundle_of_nothings_is_refused_before_there_is_a_view_of_each():
    with pytest.raises(FrameError, match="at least 32 bytes"):
        wire.unpack_bundle(mutate.Bundle([b""] * 1000, [b""] * 1000).write())


TIGHT = """
import resource, struct, laconic, mutate, torch
with open("/proc/self/statm") as file:
    limit = int(file.read().split()[0]) * resource.getpagesize() + (1 << 28)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
n = 31 << 20
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


def test_a_frame_that_decodes_but_leaves_no_room_for_the_rest_raises_frame_error():
    done = subprocess.run(
        [sys.executable, "-c", TIGHT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.splitlines() == ["symbols are counted read", "halves saturate FrameError"]
