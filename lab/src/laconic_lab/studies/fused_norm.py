"""Batch norm, ReLU and max pooling after a convolution as one operation of training on a GPU.

Apart, they read and write a convolution's output nineteen times forward and backward; here it is read four times and
its gradient written once. A bias of the convolution does not change what batch norm returns; its gradient is the sum of
the output's gradient, in which nothing but rounding is left, as it is with torch's own modules.

``outputs`` runs a model with these operations. Running statistics are not updated: evaluations compute their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from laconic.kernels.triton.launch_args import exact_options
from laconic.train.models import Bottleneck

__all__ = ["can_share", "norm_relu", "outputs", "shared_outputs"]

COLUMNS = 64
"""Channels of a program."""
ROWS = (256, 128, 64, 32)
"""Pixels of a program: the most that give ``PROGRAMS`` programs, or the fewest."""
PROGRAMS = 128


@triton.jit
def _statistics(x, means, squares, channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the mean of a tile's pixels and the sum of their squared differences from it, by channel."""
    tile = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tile * ROWS + tl.arange(0, ROWS)
    v = tl.load(x + row[:, None] * channels + column[None, :])
    mean = tl.sum(v, 0) * (1.0 / ROWS)
    difference = v - mean[None, :]
    tl.store(means + tile * channels + column, mean)
    tl.store(squares + tile * channels + column, tl.sum(difference * difference, 0))


@triton.jit
def _merge(
    means, squares, mean_out, inverse_out, tiles, channels, a_tile, a_pixel, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Combine the statistics of a group's tiles to each channel's mean and inverse deviation; a_tile is 1 / tiles."""
    group = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    means += group * tiles * channels
    squares += group * tiles * channels
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        at = tile[:, None] * channels + column[None, :]
        total += tl.sum(tl.load(means + at, mask=tile[:, None] < tiles, other=0.0), 0)
    mean = total * a_tile
    square = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        valid = tile[:, None] < tiles
        at = tile[:, None] * channels + column[None, :]
        difference = tl.where(valid, tl.load(means + at, mask=valid, other=0.0) - mean[None, :], 0.0)
        square += tl.sum(tl.load(squares + at, mask=valid, other=0.0) + ROWS * difference * difference, 0)
    tl.store(mean_out + group * channels + column, mean)
    one = tl.full((COLUMNS,), 1.0, tl.float32)
    tl.store(inverse_out + group * channels + column, tl.div_rn(one, tl.sqrt_rn(square * a_pixel + eps)))


@triton.jit
def _first_pixel(row, height, width, POOL: tl.constexpr):
    """Return the pixel of an output row: with POOL the upper left of a square of four."""
    if POOL:
        pooled = width // 2
        line = row // pooled
        image = line // (height // 2)
        row = (image * height + line % (height // 2) * 2) * width + row % pooled * 2
    return row


@triton.jit
def _by_channel(mean, inverse, weight, shift, in_group, column):
    """Load what normalizes each channel, its gain and its offset, for a tile of pixels by channels."""
    return (
        tl.load(mean + in_group)[None, :], tl.load(inverse + in_group)[None, :], tl.load(weight + column)[None, :],
        tl.load(shift + column)[None, :],
    )  # fmt: skip


@triton.jit
def _forward(
    x, out, mean, inverse, weight, shift, group_tiles, channels, height, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tile * ROWS + tl.arange(0, ROWS)
    pixel = _first_pixel(row, height, width, POOL)
    in_group = tile // group_tiles * channels + column
    centre, factor, gain, offset = _by_channel(mean, inverse, weight, shift, in_group, column)
    largest = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in tl.static_range(4 if POOL else 1):
        v = tl.load(x + (pixel + k // 2 * width + k % 2)[:, None] * channels + column[None, :])
        largest = tl.maximum(largest, (v - centre) * factor * gain + offset)
    tl.store(out + row[:, None] * channels + column[None, :], largest)


@triton.jit
def _chosen(
    x, gradient, row, column, channels, height, width, centre, factor, gain, offset,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Return the number of the pixel that each output comes from, its normalized value, and its gradient after ReLU."""
    pixel = _first_pixel(row, height, width, POOL)
    best = tl.full((ROWS, COLUMNS), -float("inf"), tl.float32)
    normalized = tl.zeros((ROWS, COLUMNS), tl.float32)
    number = tl.zeros((ROWS, COLUMNS), tl.int32)
    for k in tl.static_range(4 if POOL else 1):
        v = tl.load(x + (pixel + k // 2 * width + k % 2)[:, None] * channels + column[None, :])
        one = (v - centre) * factor
        value = one * gain + offset
        larger = value > best
        best = tl.where(larger, value, best)
        normalized = tl.where(larger, one, normalized)
        number = tl.where(larger, k, number)
    g = tl.load(gradient + row[:, None] * channels + column[None, :])
    return number, normalized, tl.where(best > 0, g, 0.0)


@triton.jit
def _backward_sums(
    x, gradient, mean, inverse, weight, shift, sums, tiles, group_tiles, channels, height, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Store a tile's sums of the gradients and of their products with the normalized values, by channel."""
    tile = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tile * ROWS + tl.arange(0, ROWS)
    in_group = tile // group_tiles * channels + column
    centre, factor, gain, offset = _by_channel(mean, inverse, weight, shift, in_group, column)
    _, normalized, g = _chosen(
        x, gradient, row, column, channels, height, width, centre, factor, gain, offset, ROWS, COLUMNS, POOL
    )
    tl.store(sums + tile * channels + column, tl.sum(g, 0))
    tl.store(sums + (tiles + tile) * channels + column, tl.sum(g * normalized, 0))


@triton.jit
def _backward(
    x, gradient, mean, inverse, weight, shift, totals, out, bias_sums, a_pixel, groups, group_tiles, channels, height,
    width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the convolution's output, and a tile's sums of it by channel."""
    tile = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tile * ROWS + tl.arange(0, ROWS)
    in_group = tile // group_tiles * channels + column
    centre, factor, gain, offset = _by_channel(mean, inverse, weight, shift, in_group, column)
    number, _, g = _chosen(
        x, gradient, row, column, channels, height, width, centre, factor, gain, offset, ROWS, COLUMNS, POOL
    )
    mean_gradient = tl.load(totals + in_group)[None, :] * a_pixel
    mean_product = tl.load(totals + groups * channels + in_group)[None, :] * a_pixel
    pixel = _first_pixel(row, height, width, POOL)
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in tl.static_range(4 if POOL else 1):
        at = (pixel + k // 2 * width + k % 2)[:, None] * channels + column[None, :]
        one = (tl.load(x + at) - centre) * factor
        change = (tl.where(number == k, g, 0.0) - mean_gradient - one * mean_product) * (factor * gain)
        tl.store(out + at, change)
        total += tl.sum(change, 0)
    tl.store(bias_sums + tile * channels + column, total)


class _NormReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, pool: bool, groups: int, *parameters: Tensor | None) -> Tensor:
        """Take biases, weights and shifts of all groups, which have equal values but gradients of their own."""
        x = x.contiguous(memory_format=torch.channels_last)
        count, channels, height, width = x.shape
        pixels = count // groups * height * width
        rows = _rows(pixels, groups, channels)
        tiles = pixels // rows
        grid = (groups * tiles, channels // COLUMNS)
        weight, shift = parameters[groups], parameters[2 * groups]
        partial, statistics = x.new_empty(2, grid[0], channels), x.new_empty(2, groups, channels)
        options = exact_options(COLUMNS=COLUMNS, num_warps=max(2, rows // 32))
        _statistics[grid](x, *partial, channels, ROWS=rows, **options)
        _merge[(channels // 32, groups)](
            *partial, *statistics, tiles, channels, 1 / tiles, 1 / pixels, eps, ROWS=rows, COLUMNS=32,
            BLOCK=min(256, max(16, triton.next_power_of_2(tiles))),
            **exact_options(num_warps=4),
        )  # fmt: skip
        step = 2 if pool else 1
        out = x.new_empty(count, height // step, width // step, channels).permute(0, 3, 1, 2)
        options |= {"ROWS": rows // step**2, "POOL": pool}
        _forward[grid](x, out, *statistics, weight, shift, tiles, channels, height, width, **options)
        ctx.save_for_backward(x, weight, shift, statistics)
        ctx.shape = (grid, groups, tiles, pixels, parameters[0] is not None, options)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, shift, statistics = ctx.saved_tensors
        grid, groups, tiles, pixels, biased, options = ctx.shape
        _, channels, height, width = x.shape
        known = (x, gradient.contiguous(memory_format=torch.channels_last), *statistics, weight, shift)
        sums = x.new_empty(2, groups, tiles, channels)
        _backward_sums[grid](*known, sums, grid[0], tiles, channels, height, width, **options)
        totals, out, bias_sums = sums.sum(2), torch.empty_like(x), x.new_empty(groups, tiles, channels)
        _backward[grid](
            *known, totals, out, bias_sums, 1 / pixels, groups, tiles, channels, height, width, **options
        )  # fmt: skip
        biases = bias_sums.sum(1).unbind() if biased else (None,) * groups
        return out, None, None, None, *biases, *totals[1].unbind(), *totals[0].unbind()


class _SharedConv(torch.autograd.Function):
    """A convolution of all workers' images by equal weights, of which each worker has a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stride: Any, padding: Any, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights[0])
        ctx.options = (len(weights), stride, padding)
        return F.conv2d(x, weights[0], None, stride, padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        workers, stride, padding = ctx.options

        def derive(dy: Tensor, x: Tensor, which: list[bool]) -> Any:
            return torch.ops.aten.convolution_backward(
                dy, x, weight, None, stride, padding, (1, 1), False, (0, 0), 1, which
            )

        to_input = derive(gradient, x, [True, False, False])[0] if ctx.needs_input_grad[0] else None
        pairs = zip(gradient.chunk(workers), x.chunk(workers), strict=True)
        return to_input, None, None, *(derive(dy, part, [False, True, False])[1] for dy, part in pairs)


def norm_relu(
    x: Tensor, biases: Sequence[Tensor | None], weights: Sequence[Tensor], shifts: Sequence[Tensor], eps: float, *,
    pool: bool = False,
) -> Tensor:  # fmt: skip
    """Return batch norm in training of ``x`` plus a bias, then ReLU, then maxima of squares of four pixels if asked.

    Args:
        x: Output of a convolution without its bias, the images of all workers one after the other: float32 with a
            multiple of 64 channels and of 32 pixels for each worker; with ``pool``, of even height and width.
        biases: The convolution's bias for each worker, with equal values; each gets a gradient.
        weights: Those of batch norm, likewise; each worker has its own statistics.
        shifts: The biases of batch norm, likewise.
    """
    out: Tensor = _NormReLU.apply(x, eps, pool, len(weights), *biases, *weights, *shifts)
    return out


def _rows(pixels: int, groups: int, channels: int) -> int:
    columns = channels // COLUMNS * groups
    fitting = [rows for rows in ROWS if pixels % rows == 0]
    return next((rows for rows in fitting if pixels // rows * columns >= PROGRAMS), fitting[-1])


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Return what a model returns in training; convolutions, batch norm, ReLU and pooling in a row are fused."""
    if isinstance(model, nn.Sequential):
        modules = list(model)
        while modules:
            used, conv, norm = _fused_count(modules, x), modules[0], modules[min(1, len(modules) - 1)]
            if used and isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                y = conv._conv_forward(x, conv.weight, None)
                x = norm_relu(y, [conv.bias], [norm.weight], [norm.bias], norm.eps, pool=used == 4)
            else:
                x, used = outputs(conv, x), 1
            del modules[:used]
        return x
    if isinstance(model, Bottleneck) and _fits(x, model.conv2.stride[0]):
        y = x
        for conv, norm in ((model.conv1, model.norm1), (model.conv2, model.norm2)):
            y = norm_relu(conv(y), [None], [norm.weight], [norm.bias], norm.eps)
        return F.relu(model.norm3(model.conv3(y)) + model.shortcut(x))
    out: Tensor = model(x)
    return out


Copies = Mapping[Tensor, Sequence[Tensor]]


def can_share(model: nn.Module) -> bool:
    """Return whether ``shared_outputs`` can run a model."""
    if not isinstance(model, nn.Sequential):
        return False
    modules = list(model)
    while modules:
        used = _fused_count(modules, None)
        if not used and any(True for _ in modules[0].parameters()) and not isinstance(modules[0], nn.Linear):
            return False
        del modules[: used or 1]
    return True


def shared_outputs(model: nn.Sequential, x: Tensor, copies: Copies) -> Tensor:
    """Return what a model returns in training for the images of all workers, which follow one another.

    Args:
        copies: For each parameter a tensor on the same memory for each worker, which gets that worker's gradient.
    """
    modules, workers = list(model), len(next(iter(copies.values())))
    while modules:
        used, first, norm = _fused_count(modules, x), modules[0], modules[min(1, len(modules) - 1)]
        if used and isinstance(first, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            y = _SharedConv.apply(x, first.stride, first.padding, *copies[first.weight])
            biases = [None] * workers if first.bias is None else copies[first.bias]
            x = norm_relu(y, biases, copies[norm.weight], copies[norm.bias], norm.eps, pool=used == 4)
        elif isinstance(first, nn.Linear):
            parts = zip(x.chunk(workers), copies[first.weight], copies[first.bias], strict=True)
            x, used = torch.cat([F.linear(*part) for part in parts]), 1
        else:
            x, used = first(x), 1
        del modules[:used]
    return x


def _fused_count(modules: list[nn.Module], x: Tensor | None) -> int:
    """Return how many of the first modules one operation replaces; 0 if they are none that can be fused.

    Without ``x`` the size of the images is taken as one that fits, and pooling is not counted.
    """
    kinds = (nn.Conv2d, nn.BatchNorm2d, nn.ReLU)
    if len(modules) < 3 or not all(isinstance(module, kind) for module, kind in zip(modules, kinds, strict=False)):
        return 0
    conv, pool = modules[0], modules[3] if len(modules) > 3 else None
    assert isinstance(conv, nn.Conv2d)
    same_size = (conv.kernel_size, conv.stride, conv.padding) == ((3, 3), (1, 1), (1, 1))
    if not same_size or conv.out_channels % COLUMNS or not (x is None or _fits(x, 1)):
        return 0
    if x is None:
        return 3
    even = all(side % 2 == 0 for side in x.shape[2:])
    return 4 if even and isinstance(pool, nn.MaxPool2d) and (pool.kernel_size, pool.stride) == (2, 2) else 3


def _fits(x: Tensor, stride: int) -> bool:
    """Return whether the pixels of a convolution's output are cut into whole tiles."""
    return x.shape[0] * (x.shape[2] // stride) * (x.shape[3] // stride) % ROWS[-1] == 0
