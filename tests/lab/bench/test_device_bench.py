"""The GPU benchmark as far as it goes without a GPU; ``kernels/test_triton_kernels.py`` runs it in the interpreter."""

from __future__ import annotations

import pytest
import torch

import laconic
from laconic_lab.bench.device import FLOORS, SPECS, DeviceSettings, run_device
from laconic_lab.bench.device_step import StepSettings, run_steps


def test_every_goal_belongs_to_a_timed_codec():
    assert {spec for spec, _ in FLOORS} <= set(SPECS)
    for spec in SPECS:
        laconic.codec(spec)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_missing_device_raises_config_error():
    with pytest.raises(laconic.ConfigError, match="torch sees no CUDA device"):
        run_device(["qsgd:4"])


def test_command_contains_non_default_settings():
    assert DeviceSettings().command(SPECS) == "laconic bench --device cuda"
    assert DeviceSettings(numel=1000, seed=2).command(["qsgd:4"]) == (
        "laconic bench qsgd:4 --device cuda --numel 1000 --seed 2"
    )


def test_step_benchmark_gives_a_record_per_codec():
    settings = StepSettings(model="lenet5", device="cpu", batch=4, repeat=2, bucket=30_000)
    (record,) = run_steps(["qsgd:8"], settings)
    assert record.kind == "bench.device.step" and record.values["buckets"] == -(-record.values["values"] // 30_000)
    assert record.values["compressed_s"] > 0 and record.values["command"].endswith("--step lenet5 --repeat 2")


def test_step_of_a_model_without_images_raises_config_error():
    with pytest.raises(laconic.ConfigError, match="must be an image model, got 'gpt'"):
        run_steps(["qsgd:4"], StepSettings(model="gpt", device="cpu"))
