"""The GPU's bench as far as it goes without one; ``kernels/on_triton.py`` runs it in the interpreter."""

from __future__ import annotations

import pytest
import torch

import laconic
from laconic.bench.device import FLOORS, SPECS, DeviceSettings, run_device


def test_every_floor_belongs_to_a_codec_that_is_timed():
    assert {spec for spec, _ in FLOORS} <= set(SPECS)
    for spec in SPECS:
        laconic.codec(spec)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_told():
    with pytest.raises(laconic.ConfigError, match="torch sees no CUDA device"):
        run_device(["qsgd:4"])


def test_the_command_names_what_differs_from_the_default():
    assert DeviceSettings().command(SPECS) == "laconic bench --device cuda"
    assert DeviceSettings(numel=1000, seed=2).command(["qsgd:4"]) == (
        "laconic bench qsgd:4 --device cuda --numel 1000 --seed 2"
    )
