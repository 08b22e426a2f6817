"""Data shards: disjoint, complete, in a new order each epoch, equal on every machine."""

from __future__ import annotations

import pytest
import torch

from laconic.errors import ConfigError
from laconic.train import Shards


def epoch(shards: Shards, worker: int, number: int) -> list[int]:
    steps = range(number * shards.iterations_per_epoch, (number + 1) * shards.iterations_per_epoch)
    return torch.cat([shards.indices(worker, step) for step in steps]).tolist()


@pytest.mark.parametrize("examples, workers, batch", [(1000, 4, 16), (1003, 3, 7), (5, 5, 1), (64, 1, 64)])
def test_shards_are_disjoint_and_complete_up_to_the_remainder(examples: int, workers: int, batch: int) -> None:
    shards = Shards(examples, workers, batch, seed=1)
    assert shards.iterations_per_epoch == examples // workers // batch
    for number in (0, 3):
        taken = [epoch(shards, worker, number) for worker in range(workers)]
        every = [index for some in taken for index in some]
        assert len(every) == len(set(every)) == shards.iterations_per_epoch * batch * workers
        assert set(every) <= set(range(examples))
    # What an epoch leaves out for want of a whole batch comes in another; a worker never sees another's share.
    seen = [set().union(*(epoch(shards, worker, number) for number in range(40))) for worker in range(workers)]
    assert [len(some) for some in seen] == [examples // workers] * workers
    assert len(set().union(*seen)) == examples // workers * workers


def test_order_changes_with_epoch_worker_and_seed() -> None:
    shards = Shards(2000, 2, 100, seed=0)
    first, second = epoch(shards, 0, 0), epoch(shards, 0, 1)
    assert sorted(first) == sorted(second)
    # Nothing of one order is left in the other: rank correlations of 1,000 are below 0.1 (three deviations).
    places = torch.tensor([[order.index(i) for i in sorted(first)] for order in (first, second)], dtype=torch.float64)
    assert abs(float(torch.corrcoef(places)[0, 1])) < 0.1
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 10
    assert sorted(first) != sorted(epoch(Shards(2000, 2, 100, seed=1), 0, 0))
    # And a share is no contiguous piece, nor ordered: classes often come one after the other.
    assert 800 < sum(first) / len(first) < 1200


def test_iterations_can_be_computed_in_any_order() -> None:
    one, other = Shards(1000, 4, 16, seed=7), Shards(1000, 4, 16, seed=7)
    forward = [one.indices(2, step) for step in range(50)]
    backward = [other.indices(2, step) for step in reversed(range(50))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))
    assert one == other and one != Shards(1000, 4, 16, seed=8)
    forward[0].zero_()  # the caller's own
    assert torch.equal(one.indices(2, 0), backward[0])


def test_joined_concatenates_all_workers() -> None:
    shards = Shards(100, 3, 8, seed=0)
    wanted = [shards.indices(worker, 5).tolist() for worker in range(3)]
    assert shards.joined(5).view(3, 8).tolist() == wanted


@pytest.mark.parametrize("worker, iteration, indices", [
    (0, 0, [931, 183, 76, 379, 614, 930, 389, 174, 450, 462, 271, 596, 883, 808, 305, 639]),
    (3, 0, [941, 478, 351, 24, 35, 447, 901, 419, 938, 212, 803, 798, 913, 228, 615, 70]),
    (1, 15, [336, 745, 646, 593, 990, 469, 50, 309, 484, 8, 601, 759, 916, 968, 468, 115]),
    (2, 10**9, [981, 522, 850, 904, 22, 83, 413, 662, 726, 137, 823, 264, 682, 752, 730, 681]),
])  # fmt: skip
def test_orders_are_frozen(worker: int, iteration: int, indices: list[int]) -> None:
    """Workers on other machines and of other versions must agree: these values never change."""
    assert Shards(1000, 4, 16, seed=7).indices(worker, iteration).tolist() == indices


@pytest.mark.parametrize("arguments, words", [
    ((10, 0, 1), "workers must be at least 1, got 0"), ((0, 1, 1), "num_examples must be at least 1, got 0"),
    ((10, 2, -3), "batch must be at least 1, got -3"),
    ((10, 3, 4), "each of 3 workers gets 3 of 10 examples, too few for a batch of 4: use a smaller batch"),
    ((2, 3, 1), "each of 3 workers gets 0 of 2 examples"),
])  # fmt: skip
def test_invalid_sizes_raise_config_error(arguments: tuple[int, int, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Shards(*arguments, seed=0)


@pytest.mark.parametrize("worker, iteration", [(2, 0), (-1, 0), (0, -1)])
def test_invalid_worker_or_iteration_raises_config_error(worker: int, iteration: int) -> None:
    with pytest.raises(ConfigError, match=f"got worker {worker} and iteration {iteration}"):
        Shards(10, 2, 1, seed=0).indices(worker, iteration)
