"""Clipped, trimmed and median means: their values, dense and sparse, and what a single sender can do to them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laconic.aggregate import OpenedFrame
from laconic.aggregate.robust import clip_factors, parse_robust, squared_norm, trimmed_mean
from laconic.errors import ConfigError
from laconic.frames import encode


def opened(tensors: list[Tensor], spec: str = "none") -> list[OpenedFrame]:
    return [OpenedFrame.of(encode(x, spec), x, "w") for x in tensors]


def by_hand(tensors: list[Tensor], sent: list[Tensor], trim: int) -> Tensor:
    """Return the trimmed mean of the values that were sent, coordinate by coordinate."""
    out = torch.zeros(tensors[0].numel())
    for i in range(out.numel()):
        values = sorted(float(x.view(-1)[i]) for x, s in zip(tensors, sent, strict=True) if s.view(-1)[i])
        if values:
            cut = min(trim, (len(values) - 1) // 2)
            kept = values[cut : len(values) - cut]
            out[i] = sum(kept) / len(kept) * len(values) / len(tensors)
    return out.view(tensors[0].shape)


@pytest.mark.parametrize("senders, trim", [(3, 1), (4, 1), (5, 1), (5, 2), (6, 2)])
@pytest.mark.parametrize("spec", ["none", "topk:0.3"])
def test_trimmed_mean_is_that_of_the_values_sent(senders: int, trim: int, spec: str) -> None:
    generator = torch.Generator().manual_seed(senders)
    tensors = [torch.randn(7, 9, generator=generator) for _ in range(senders)]
    frames = opened(tensors, spec)
    decoded = [frame.decode(torch.device("cpu")) for frame in frames]
    sent = [x != 0 for x in decoded] if spec != "none" else [torch.ones_like(x, dtype=torch.bool) for x in decoded]
    result = trimmed_mean(frames, trim)
    assert result.shape == (7, 9)
    torch.testing.assert_close(result, by_hand(decoded, sent, trim))


def test_median_of_an_odd_and_an_even_number() -> None:
    odd = [torch.tensor([x]) for x in (1.0, 2.0, -1e30, 4.0, 1e30)]
    trim = parse_robust("median", 5)
    assert trim is not None and float(trimmed_mean(opened(odd), trim)) == 2.0
    even = parse_robust("median", 4)
    assert even is not None and float(trimmed_mean(opened(odd[:4]), even)) == 1.5


@pytest.mark.parametrize("value", [3e38, -3e38])
def test_one_sender_stays_between_the_others(value: float) -> None:
    honest = [torch.full((4,), float(x)) for x in (1, 2, 3, 4)]
    result = trimmed_mean(opened([*honest, torch.full((4,), value)]), 1)
    assert bool((result >= 1).all()) and bool((result <= 4).all())


def test_frames_of_zeros_count_as_zeros_if_dense_and_as_unsent_if_sparse() -> None:
    tensors = [torch.zeros(4), torch.tensor([4.0, 0, 0, 0]), torch.tensor([8.0, 0, 0, 0])]
    assert trimmed_mean(opened(tensors), 1).tolist() == [4.0, 0, 0, 0]
    assert trimmed_mean(opened(tensors, "topk:0.25"), 1).tolist() == [4.0, 0, 0, 0]  # (4 + 8) / 2 x 2 / 3


def test_factors_shorten_to_the_median_norm_and_lengthen_nothing() -> None:
    norms = [squared_norm(x) ** 0.5 for x in (torch.full((4,), y) for y in (0.0, 1.0, 2.0, 3e38))]
    factors = clip_factors(norms)
    assert factors[:2] == [1.0, 1.0]
    assert [norm * factor for norm, factor in zip(norms, factors, strict=True)][2:] == pytest.approx([3.0, 3.0])
    assert clip_factors([0.0, 0.0, 5.0]) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("after, workers", [("trimmed:0", 5), ("trimmed:3", 5), ("trimmed", 5), ("trimmed:1", 2),
                                            ("median", 2), ("clipped", 2), ("trimmed:-1", 5)])  # fmt: skip
def test_impossible_options_raise_config_error(after: str, workers: int) -> None:
    with pytest.raises(ConfigError, match="after="):
        parse_robust(after, workers)
