"""Networks trained in a batch equal networks trained alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laconic_lab.studies.oland2015 import fused
from laconic_lab.studies.oland2015.network import HIDDEN, PIXELS, Batches, Networks, initial
from laconic_lab.studies.oland2015.settings import Setting

CPU = torch.device("cpu")


def some_images(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 28, 28), generator=generator, dtype=torch.uint8)
    return images, torch.randint(0, 10, (count,), generator=generator)


def batches(count: int = 60, batch: int = 10, workers: int = 3) -> Batches:
    return Batches(*some_images(count), workers=workers, batch=batch, seed=0, pixels="unit", device=CPU)


def loss(tensors: list[Tensor], x: Tensor, t: Tensor, l1: float) -> Tensor:
    w1, w2, w3, b1, b2, b3 = tensors
    y = (((x @ w1.T + b1).tanh() @ w2.T + b2).tanh() @ w3.T + b3).tanh()
    return (y - t).square().mean() + l1 * sum(w.abs().sum() for w in (w1, w2, w3))


def test_step_equals_autograd() -> None:
    settings = [Setting(lr=0.5, l1=1e-3), Setting(lr=0.2, decay=0.5)]
    networks = Networks(settings, [3, 9], 1, 0, CPU)
    images, targets = next(iter(batches().epoch(0)))
    x, t = images[0], targets[0]
    expected = []
    for run, setting in enumerate(settings):
        shapes = [(HIDDEN, PIXELS), (50, HIDDEN), (10, 50)]
        before = [networks.layer(0, i)[run].view(shapes[i]).clone().requires_grad_() for i in range(3)]
        before += [b.view(2, -1)[run].clone().requires_grad_() for b in networks.biases(0)]
        slopes = torch.autograd.grad(loss(before, x, t, setting.l1), before)
        rate = setting.lr * setting.decay**2
        expected.append([w.detach() - rate * slope for w, slope in zip(before, slopes, strict=True)])
    networks.step(0, x, t, networks.rates(2, len(x)))
    for run, after in enumerate(expected):
        for i in range(3):
            torch.testing.assert_close(networks.layer(0, i)[run].view(after[i].shape), after[i], rtol=1e-4, atol=2e-6)
        for bias, wanted in zip(networks.biases(0), after[3:], strict=True):
            torch.testing.assert_close(bias.view(2, -1)[run], wanted, rtol=1e-4, atol=2e-6)


def test_gradient_rms_covers_the_whole_share() -> None:
    networks, data = Networks([Setting()], [0], 3, 0, CPU), batches()
    before = [networks.layer(1, i).view(shape).clone() for i, shape in enumerate([(392, 784), (50, 392), (10, 50)])]
    before = [x.requires_grad_() for x in [*before, *(b.view(-1).clone() for b in networks.biases(1))]]
    x, t = (torch.cat(parts) for parts in zip(*data.share(1), strict=True))
    slopes = torch.autograd.grad(loss(before, x, t, 0.0), before)
    expected = torch.stack([slope.square().mean().sqrt() for slope in slopes[:3]])
    torch.testing.assert_close(networks.gradient_rms(1, data).view(-1), expected, rtol=1e-4, atol=1e-8)


def test_run_does_not_depend_on_others_in_the_batch() -> None:
    settings = [Setting(lr=0.5), Setting(lr=0.1, l1=1e-3)]
    data = batches()
    together = Networks(settings, [4, 5], 3, 7, CPU)
    together.train_epoch(0, data)
    for run, setting in enumerate(settings):
        alone = Networks([setting], [4 + run], 3, 7, CPU)
        assert torch.equal(initial(7, [4 + run], 0, CPU)[0], initial(7, [1, 4 + run], 0, CPU)[1])
        alone.train_epoch(0, data)
        for i in range(3):
            torch.testing.assert_close(alone.layer(2, i)[0], together.layer(2, i)[run], rtol=1e-4, atol=1e-6)


def test_shares_are_exclusive_and_orders_are_repeatable() -> None:
    data = batches(count=61)
    assert len(set(data.shares.flatten().tolist())) == 60
    first, again, other = (next(iter(data.epoch(epoch)))[0] for epoch in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not fused.AVAILABLE, reason="no CUDA device")
@pytest.mark.parametrize("batch", [10, 100, 128])
def test_fused_kernels_equal_the_plain_step(batch: int) -> None:
    device = torch.device("cuda")
    settings = [Setting(lr=0.5, l1=1e-3), Setting(lr=0.2), Setting()]
    data = Batches(*some_images(2 * batch), workers=1, batch=batch, seed=0, pixels="unit", device=device)
    states = []
    for kernels in (True, False):
        networks = Networks(settings, range(3), 1, 0, device)
        rates = networks.rates(0, batch)
        images, targets = next(iter(data.epoch(0)))
        if kernels:
            networks._train_fused(0, images.to(torch.float16), targets, rates)
        else:
            for x, t in zip(images, targets, strict=True):
                networks.step(0, x, t, rates)
        states.append(networks)
    start = Networks(settings, range(3), 1, 0, device)
    for one, other, before in zip(*(networks._tensors(0) for networks in (*states, start)), strict=True):
        change = (other - before).norm()
        assert (one - other).norm() < 5e-3 * change
