"""Batch norm, ReLU and pooling in one operation, against torch's modules."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import nn

from laconic.train.models import Bottleneck, build_model, seeded

pytest.importorskip("triton", reason="no triton")

from laconic_lab.studies.fused_norm import norm_relu, outputs

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
            out = norm_relu(x, bias, norm, pool=pool)
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
    out = norm_relu(x, None, norm, pool=True)
    (fused,) = torch.autograd.grad(out[0].sum(), x)
    (wanted,) = torch.autograd.grad(nn.functional.max_pool2d(torch.relu(norm(x)), 2)[0].sum(), x)
    torch.testing.assert_close(fused, wanted, rtol=1e-4, atol=1e-5)
    assert float(fused[0, :, 0, 1].abs().min()) > float(fused[0, :, 1, 0].abs().max())


def blocks_of_resnet() -> nn.Module:
    with seeded(0):
        return nn.Sequential(Bottleneck(64, 64, 1), Bottleneck(256, 64, 2), nn.Flatten(), nn.Linear(256 * 16, 10))


MODELS = {
    "vgg11": (lambda: build_model("vgg11", seed=0), (8, 3, 32, 32), 8),  # eight layers, of which five pool
    "bottlenecks": (blocks_of_resnet, (4, 64, 8, 8), 4),
}


@pytest.mark.parametrize("name", MODELS)
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


def _nodes(start: object) -> list[object]:
    found, waiting = [], [start]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.append(node)
            waiting += [one for one, _ in node.next_functions]  # type: ignore[attr-defined]
    return found
