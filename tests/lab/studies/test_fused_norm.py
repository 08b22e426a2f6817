"""Batch norm, ReLU and pooling in one operation, against torch's modules."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict

import pytest
import torch
from torch import nn

from laconic.train.examples import ImageExamples
from laconic.train.models import Bottleneck, build_model, seeded
from laconic.train.task import Task, cross_entropy

pytest.importorskip("triton", reason="no triton")

from laconic_lab.studies import fused_steps
from laconic_lab.studies.flat_parameters import FlatParameters
from laconic_lab.studies.fused_norm import can_share, norm_relu, outputs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

pytestmark = (
    [] if INTERPRETED else [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
)


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("shape", [(4, 64, 8, 16), (2, 128, 4, 8), (32, 64, 2, 2)])
def test_fused_operation_equals_the_modules(shape: tuple[int, ...], pool: bool) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    conv_out, gradient = (torch.randn(shape, generator=generator).to(DEVICE) for _ in range(2))
    gradient = gradient[:, :, ::2, ::2] if pool else gradient
    norm = nn.BatchNorm2d(shape[1]).to(DEVICE)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(shape[1], generator=generator) + 0.5)
        norm.bias.copy_(torch.randn(shape[1], generator=generator))
    bias = torch.full((shape[1],), 3.0, device=DEVICE, requires_grad=True)
    results = []
    for fused in (True, False):
        x = (conv_out * 2 + 5).requires_grad_()
        if fused:
            out = norm_relu(x, [bias], [norm.weight], [norm.bias], norm.eps, pool=pool)
        else:
            out = torch.relu(norm(x + bias.view(1, -1, 1, 1)))
            out = nn.functional.max_pool2d(out, 2) if pool else out
        results.append([out.detach(), *torch.autograd.grad(out, [x, norm.weight, norm.bias, bias], gradient)])
    for got, wanted in zip(*results, strict=True):
        assert got.shape == wanted.shape
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_equal_maxima_give_the_gradient_to_the_first_pixel() -> None:
    x = torch.zeros(8, 64, 2, 2, device=DEVICE)
    x[:, :, 0, 1] = x[:, :, 1, 0] = 1.0
    x.requires_grad_()
    norm = nn.BatchNorm2d(64).to(DEVICE)
    out = norm_relu(x, [None], [norm.weight], [norm.bias], norm.eps, pool=True)
    (fused,) = torch.autograd.grad(out[0].sum(), x)
    (wanted,) = torch.autograd.grad(nn.functional.max_pool2d(torch.relu(norm(x)), 2)[0].sum(), x)
    torch.testing.assert_close(fused, wanted, rtol=1e-4, atol=1e-5)
    assert float(fused[0, :, 0, 1].abs().min()) > float(fused[0, :, 1, 0].abs().max())


def blocks_of_resnet() -> nn.Module:
    with seeded(0):
        return nn.Sequential(Bottleneck(64, 64, 1), Bottleneck(256, 64, 2), nn.Flatten(), nn.Linear(256 * 16, 10))


def small_model() -> nn.Module:
    with seeded(0):
        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(3, 64, 3, padding=1), norm1=nn.BatchNorm2d(64), relu1=nn.ReLU(), pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(64, 64, 3, padding=1), norm2=nn.BatchNorm2d(64), relu2=nn.ReLU(), flatten=nn.Flatten(),
                head=nn.Linear(1024, 10),
            )
        )  # fmt: skip


MODELS = {
    "small": (small_model, (8, 3, 8, 8), 2),
    "vgg11": (lambda: build_model("vgg11", seed=0), (8, 3, 32, 32), 8),  # eight layers, of which five pool
    "bottlenecks": (blocks_of_resnet, (4, 64, 8, 8), 4),
}


@pytest.mark.parametrize("name", ["small", "bottlenecks", pytest.param("vgg11", marks=pytest.mark.slow)])
def test_model_with_fused_operations_has_the_same_gradients(name: str) -> None:
    build, shape, fused = MODELS[name]
    model, examples = build().to(DEVICE), shape[0]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert sum(type(part).__name__ == "_NormReLUBackward" for part in _nodes(outputs(model, x).grad_fn)) == fused
    exact = copy.deepcopy(model).double()
    results = []
    for one, run, inputs in (
        (model, outputs, x),
        (model, nn.Module.__call__, x),
        (exact, nn.Module.__call__, x.double()),
    ):
        out = run(one, inputs)
        loss = nn.functional.cross_entropy(out, torch.arange(examples, device=DEVICE))
        results.append([out.detach(), *torch.autograd.grad(loss, list(one.parameters()))])
    for key, got, usual, wanted in zip(["output", *dict(model.named_parameters())], *results, strict=True):
        error, usual_error = (float((value.double() - wanted).norm()) for value in (got, usual))
        assert error < 3 * usual_error + 1e-5 * float(wanted.norm()), key


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_that_share_a_pass_have_their_own_gradients(workers: int) -> None:
    task = random_task(64)
    parameters = FlatParameters(task, [name for name, _ in task.model.named_parameters()], channels_last=True)
    batches = [task.batch(torch.arange(8 * worker, 8 * worker + 8)) for worker in range(workers)]
    found = fused_steps.shared_gradients(task, parameters, batches)
    assert found is not None
    for batch, loss, gradients in zip(batches, *found, strict=True):
        usual = fused_steps.loss(task, batch)
        wanted = torch.autograd.grad(usual, parameters.parameters)
        assert float(loss) == pytest.approx(float(usual.detach()), rel=1e-5)
        for name, got, gradient in zip(dict(task.model.named_parameters()), gradients, wanted, strict=True):
            if name.startswith("conv") and name.endswith("bias"):  # nothing but rounding
                assert float(got.abs().max()) < 1e-4
            else:
                assert float((got - gradient).norm()) < 1e-2 * float(gradient.norm()), name


def test_models_that_can_share_a_pass() -> None:
    names = ("vgg11", "vgg11fc", "lenet5", "resnet50")
    assert [can_share(build_model(name, seed=0)) for name in names] == [True, True, False, False]


def random_task(count: int) -> Task:
    """Return two convolutions, of which one pools, with random images."""
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=generator)
    examples = ImageExamples(images, torch.randint(0, 10, (count,), generator=generator), "cifar10")
    for one in ("inputs", "targets", "mean", "deviation"):
        setattr(examples, one, getattr(examples, one).to(DEVICE))
    return Task("small", small_model().to(DEVICE), examples, examples, cross_entropy, holdout=0.0)


def _nodes(start: object) -> list[object]:
    found, waiting = [], [start]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.append(node)
            waiting += [one for one, _ in node.next_functions]  # type: ignore[attr-defined]
    return found
