"""Kernels that select in several slots at once, or multiply several matrices, agree with the reference."""

from __future__ import annotations

import pytest
import torch
from triton_support import DEVICE, MARKS, no_compile_fallback  # noqa: F401

import laws
from laconic.kernels import reference

pytestmark = [*MARKS, pytest.mark.usefixtures("no_compile_fallback")]


def selection(x: torch.Tensor, k: int) -> torch.Tensor:
    """Return the positions of the k largest magnitudes; of equal ones the lowest."""
    order = torch.sort(-x.abs(), stable=True).indices
    return order[:k].sort().values


@pytest.mark.parametrize("kind", ["normal", "few values", "one octave"])
def test_slots_are_selected_exactly(kind: str) -> None:
    """Ties are taken from some tiles whole, from one in part, and from others not at all."""
    from laconic.kernels.triton.topk_batched import TILE, Selector

    sizes, counts = (3 * TILE + 17, 100, 2 * TILE), (TILE + 40, 100, 7)
    x = laws.normal(sum(sizes), seed=3)
    if kind == "few values":
        x = (x * 2).round()
    elif kind == "one octave":
        x = 1.0 + torch.rand(x.numel(), generator=torch.Generator().manual_seed(1)) / 4096
    ends = torch.tensor(sizes).cumsum(0).tolist()
    spans = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    selector = Selector(spans, counts, torch.device(DEVICE))
    positions, values = selector.choose_with_values(x.to(DEVICE), torch.int64)
    expected = torch.cat([begin + selection(x[begin:end], k) for (begin, end), k in zip(spans, counts, strict=True)])
    assert torch.equal(positions.cpu(), expected) and torch.equal(values.cpu(), x[expected])


@pytest.mark.parametrize("rank", [3, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (1, 2, 4, 5, 8))])
def test_sketches_and_factors_have_the_bits_of_the_reference(rank: int) -> None:
    from laconic.kernels.triton.lowrank_all import Matrices

    shapes = [(66, 70, rank), (20, 9, min(rank, 2)), (12, 3, 1), (32, 33, rank)]
    given = [laws.normal(rows, columns, seed=i) for i, (rows, columns, _) in enumerate(shapes)]
    starts = [laws.normal(r, columns, seed=10 + i) for i, (_, columns, r) in enumerate(shapes)]
    bases = [laws.normal(rows, r, seed=20 + i) for i, (rows, _, r) in enumerate(shapes)]
    matrices = Matrices(shapes, rank, torch.device(DEVICE))
    tensors = [x.to(DEVICE) for x in given]
    places, bits = matrices.addresses(tensors), torch.zeros(len(shapes), dtype=torch.int32, device=DEVICE)
    matrices.write_sketch(places, bits, torch.cat([q.view(-1) for q in starts]).to(DEVICE))
    expected = [reference.project_rows(x, q).view(-1) for x, q in zip(given, starts, strict=True)]
    assert laws.same_bits(matrices.sketch.cpu(), torch.cat(expected))
    matrices.basis.copy_(torch.cat([p.view(-1) for p in bases]))
    matrices.write_factor(places)
    factors = [reference.project_columns(x, p) for x, p in zip(given, bases, strict=True)]
    assert laws.same_bits(matrices.factor.cpu(), torch.cat([q.view(-1) for q in factors]))
    products = [torch.zeros_like(x) for x in tensors]
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    matrices.store_products(matrices.addresses(products), matrices.factor, flag)
    for x, p, q in zip(products, bases, factors, strict=True):
        total = p[:, :1] * q[:1]
        for k in range(1, q.shape[0]):
            total = total + p[:, k : k + 1] * q[k : k + 1]
        assert laws.same_bits(x.cpu(), total)
    assert int(flag) == 0


@pytest.mark.parametrize("fold", [1024, *(pytest.param(fold, marks=pytest.mark.slow) for fold in (2048, 4096))])
def test_bases_have_the_bits_of_the_reference(fold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors that are folded in registers at once, in memory before, and padded; some depend on others."""
    from laconic.codecs.powersgd import orthonormal
    from laconic.kernels.triton import lowrank_all

    monkeypatch.setattr(lowrank_all, "MAX_FOLD", fold)
    rows = (700, 1024, 2048, 2500, 4500)
    matrices = lowrank_all.Matrices([(each, 8, 3) for each in rows], 3, torch.device(DEVICE))
    sketches = [laws.normal(each, 3, seed=i) for i, each in enumerate(rows)]
    sketches[1][:, 1] = 0.0  # such a column becomes zero, and the products with it are zeros of either sign
    sketches[1][::2, 2] = -0.0
    sketches[3][:, 2] = 2 * sketches[3][:, 0]
    matrices.sketch.copy_(torch.cat([each.view(-1) for each in sketches]))
    count = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    matrices.write_basis(count)
    expected = torch.cat([orthonormal(each).view(-1) for each in sketches])
    assert laws.same_bits(matrices.basis.cpu(), expected) and int(count) == 0
    sketches[2][5, 1] = float("inf")
    matrices.sketch.copy_(torch.cat([each.view(-1) for each in sketches]))
    matrices.write_basis(count)
    assert int(count) == 1 and (matrices.flags > 0).tolist() == [False, False, True, False, False]
