"""A training step of all runs in two kernels; on a GPU the time is that of reading and writing the weights.

The first layer's weights are read and written once a step: the kernel that updates a block of them also multiplies it
with the next mini-batch. Products take float16 operands and accumulate in float32: float16 has TF32's mantissa, and the
weights, of which each product gets a rounded copy, stay float32. Derivatives are passed between the kernels without the
learning rate and times 64, in the middle of float16's range.

Blocks are loaded and stored through descriptors: elements outside a tensor read as zero and are not written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from triton.tools.tensor_descriptor import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
        TensorDescriptor,
    )
except ImportError:  # comes with torch's builds for CUDA
    triton = tl = None

__all__ = ["AVAILABLE", "MOST_IMAGES", "first_layer", "upper_layers"]

AVAILABLE = triton is not None
MOST_IMAGES = 128
"""A mini-batch is one tile of the products."""

GAIN = 64.0

UNITS, PIXELS, CHUNK = 128, 32, 32
FIRST = {"num_warps": 8, "num_stages": 4}
UPPER = {"num_warps": 4, "num_stages": 2}
"""Block sizes and launch options: the fastest on an H200 with 1,000 runs and 100 images."""


def jit(kernel: Callable[..., Any]) -> Any:
    return kernel if triton is None else triton.jit(kernel)


@jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 1 - 2 / (tl.exp(2 * x) + 1)


@jit
def _sign(x):  # type: ignore[no-untyped-def]
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@jit
def _first_layer(  # type: ignore[no-untyped-def]
    w, bias, h, d, x, next_x, step, shrink, width, inputs,
    HIDDEN: tl.constexpr, GAIN: tl.constexpr, IMAGES: tl.constexpr, UNITS: tl.constexpr,  # noqa: N803
    PIXELS: tl.constexpr, UPDATE: tl.constexpr, FORWARD: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Update a block of units, w -= shrink * sign(w) + step * d' x; then compute h = tanh(next_x w' + bias)."""
    start = tl.program_id(0) * UNITS
    unit = start + tl.arange(0, UNITS)
    if UPDATE:
        error = tl.trans(d.load([0, start]))
        rate = tl.load(step + unit // HIDDEN, mask=unit < width, other=0.0)[:, None] / GAIN
        pull = tl.load(shrink + unit // HIDDEN, mask=unit < width, other=0.0)[:, None]
    total = tl.zeros((UNITS, IMAGES), dtype=tl.float32)
    for first in range(0, inputs, PIXELS):
        block = w.load([start, first])
        if UPDATE:
            block -= _sign(block) * pull + tl.dot(error, x.load([0, first])) * rate
            w.store([start, first], block)
        if FORWARD:
            total = tl.dot(block.to(tl.float16), tl.trans(next_x.load([0, first])), total)
    if FORWARD:
        total += tl.load(bias + unit, mask=unit < width, other=0.0)[:, None]
        h.store([0, start], tl.trans(_tanh(total)))


@jit
def _upper_layers(  # type: ignore[no-untyped-def]
    h, d, w2, w3, b1, b2, b3, targets, step, shrink, images,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, CLASSES: tl.constexpr, GAIN: tl.constexpr,  # noqa: N803
    IMAGES: tl.constexpr, INNERS: tl.constexpr, OUTPUTS: tl.constexpr, CHUNK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Compute the outputs of a run from h and back, update layers two and three and all biases, and write d."""
    run = tl.program_id(0)
    image, inner, output = tl.arange(0, IMAGES), tl.arange(0, INNERS), tl.arange(0, OUTPUTS)
    rate, pull = tl.load(step + run) / GAIN, tl.load(shrink + run)

    total = tl.zeros((IMAGES, INNERS), dtype=tl.float32)
    for first in range(0, HIDDEN, CHUNK):
        active = h.load([0, run, first]).reshape(IMAGES, CHUNK).to(tl.float16)
        weights = w2.load([run, 0, first]).reshape(INNERS, CHUNK).to(tl.float16)
        total = tl.dot(active, tl.trans(weights), total)
    bias2 = tl.load(b2 + run * INNER + inner, mask=inner < INNER, other=0.0)
    a2 = _tanh(total + bias2[None, :])

    pointers3 = w3 + run * CLASSES * INNER + output[:, None] * INNER + inner[None, :]
    valid3 = (output < CLASSES)[:, None] & (inner < INNER)[None, :]
    weights3 = tl.load(pointers3, mask=valid3, other=0.0)
    bias3 = tl.load(b3 + run * CLASSES + output, mask=output < CLASSES, other=0.0)
    y = _tanh(tl.dot(a2.to(tl.float16), tl.trans(weights3).to(tl.float16)) + bias3[None, :])
    valid = (image < images)[:, None] & (output < CLASSES)[None, :]
    target = tl.load(targets + image[:, None] * CLASSES + output[None, :], mask=valid, other=0.0)
    d3 = tl.where(valid, (y - target) * (1 - y * y) * GAIN, 0.0)
    d2 = tl.dot(d3.to(tl.float16), weights3.to(tl.float16)) * (1 - a2 * a2)

    change3 = tl.dot(tl.trans(d3).to(tl.float16), a2.to(tl.float16)) * rate
    tl.store(pointers3, weights3 - _sign(weights3) * pull - change3, mask=valid3)
    tl.store(b3 + run * CLASSES + output, bias3 - tl.sum(d3, 0) * rate, mask=output < CLASSES)
    tl.store(b2 + run * INNER + inner, bias2 - tl.sum(d2, 0) * rate, mask=inner < INNER)

    back = d2.to(tl.float16)
    for first in range(0, HIDDEN, CHUNK):
        unit = first + tl.arange(0, CHUNK)
        above = h.load([0, run, first]).reshape(IMAGES, CHUNK)
        weights2 = w2.load([run, 0, first]).reshape(INNERS, CHUNK)
        d1 = tl.dot(back, weights2.to(tl.float16)) * (1 - above * above)
        d.store([0, run, first], d1.to(tl.float16).reshape(IMAGES, 1, CHUNK))
        bias = tl.load(b1 + run * HIDDEN + unit, mask=unit < HIDDEN, other=0.0)
        tl.store(b1 + run * HIDDEN + unit, bias - tl.sum(d1, 0) * rate, mask=unit < HIDDEN)
        change = tl.dot(tl.trans(back), above.to(tl.float16)) * rate
        w2.store([run, 0, first], (weights2 - _sign(weights2) * pull - change).reshape(1, INNERS, CHUNK))


def _tile(size: int) -> int:
    """Return the next power of two that a product accepts."""
    return max(16, 1 << (size - 1).bit_length())


def _blocks(x: Tensor, *block: int) -> Any:
    return TensorDescriptor.from_tensor(x, list(block))


def first_layer(
    w: Tensor, bias: Tensor, h: Tensor, d: Tensor, batches: tuple[Tensor | None, Tensor | None],
    rates: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Update the weights with one mini-batch and compute the activations of the next one; either may be missing.

    Args:
        w: [runs * hidden, inputs], float32.
        bias: [runs * hidden].
        h: [images, runs * hidden], float32, for the activations of the second mini-batch.
        d: The same in float16, the derivatives that ``upper_layers`` wrote for the first one.
        batches: [images, inputs] in float16.
        rates: [runs] each: the factor of a derivative, and what l1 subtracts from a magnitude.
    """
    (x, next_x), (step, shrink) = batches, rates
    width, inputs = w.shape
    given = [batch for batch in batches if batch is not None]
    images = _tile(len(given[0]))
    _first_layer[(triton.cdiv(width, UNITS),)](
        _blocks(w, UNITS, PIXELS), bias, _blocks(h, images, UNITS), _blocks(d, images, UNITS),
        _blocks(given[0], images, PIXELS), _blocks(given[-1], images, PIXELS),
        step, shrink, width, inputs, HIDDEN=width // len(step), GAIN=GAIN, IMAGES=images, UNITS=UNITS, PIXELS=PIXELS,
        UPDATE=x is not None, FORWARD=next_x is not None, **FIRST,
    )  # fmt: skip


def upper_layers(
    h: Tensor, d: Tensor, w2: Tensor, w3: Tensor, biases: Sequence[Tensor], targets: Tensor,
    rates: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Do the rest of a step with the activations that ``first_layer`` left in ``h``.

    Args:
        h: [images, runs * hidden], float32.
        d: The same in float16; written.
        w2: [runs, inner, hidden], changed.
        w3: [runs, classes, inner], changed.
        biases: Biases of the three layers, changed.
        targets: [images, classes].
        rates: As for ``first_layer``.
    """
    runs, inner, hidden = w2.shape
    images, inners, classes = len(targets), _tile(inner), w3.shape[1]
    tile = _tile(images)
    _upper_layers[(runs,)](
        _blocks(h.view(images, runs, hidden), tile, 1, CHUNK), _blocks(d.view(images, runs, hidden), tile, 1, CHUNK),
        _blocks(w2, 1, inners, CHUNK), w3, *biases, targets, *rates, images,
        HIDDEN=hidden, INNER=inner, CLASSES=classes, GAIN=GAIN, IMAGES=tile, INNERS=inners, OUTPUTS=_tile(classes),
        CHUNK=CHUNK, **UPPER,
    )  # fmt: skip
