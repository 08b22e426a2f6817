"""Tasks: they learn, they keep what is held out from training, and what they measure follows from the parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from laconic.errors import ConfigError, FileError
from laconic.optim import SGD, Schedule
from laconic.train import DATA, Shards, Task, build_task
from laconic.train.task import cross_entropy


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Products are small: where cores are busy a second thread costs more than it does."""
    torch.set_num_threads(1)


def error_of(model: str = "mlp", data: str = "digits", **options: object) -> str:
    with pytest.raises((ConfigError, FileError)) as caught:
        build_task(model, data, **options)  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def gradients(task: Task, indices: Tensor) -> dict[str, Tensor]:
    parameters = dict(task.model.named_parameters())
    grads = torch.autograd.grad(task.loss(task.batch(indices)), list(parameters.values()))
    return dict(zip(parameters, grads, strict=True))


def train(task: Task, *, iterations: int, batch: int, lr: float) -> None:
    shards, optimizer = Shards(task.num_train, 1, batch, seed=0), SGD(momentum=0.9)
    schedule = Schedule(lr, "cosine", warmup=10, iterations=iterations)
    for i in range(iterations):
        optimizer.step(dict(task.model.named_parameters()), gradients(task, shards.joined(i)), lr=schedule(i))


def test_mlp_learns_digits() -> None:
    task = build_task("mlp", "digits", seed=0)
    assert task.name == "mlp/digits" and task.num_train == 3800
    before, judged = task.evaluate(), task.judge()
    assert set(before) == {"accuracy", "loss"} and before["accuracy"] < 30 and 2 < before["loss"] < 3
    assert judged == pytest.approx(before["loss"], rel=0.1)
    train(task, iterations=300, batch=64, lr=0.05)
    after = task.evaluate()
    assert after["accuracy"] > 90 and after["loss"] < 0.5
    assert task.judge() == pytest.approx(after["loss"], rel=0.5) and task.judge() != after["loss"]
    assert task.evaluate() == after


def test_lenet5_learns_digits() -> None:
    task = build_task("lenet5", "digits", seed=0)
    train(task, iterations=100, batch=32, lr=0.05)
    assert task.evaluate()["accuracy"] > 80


def test_images_are_normalised() -> None:
    inputs, targets = build_task().batch(torch.arange(3800))
    assert inputs.shape == (3800, 1, 28, 28) and inputs.dtype == torch.float32 and targets.dtype == torch.int64
    assert float(inputs.mean()) == pytest.approx(0, abs=0.02) and float(inputs.std()) == pytest.approx(1, abs=0.02)


def test_task_depends_on_the_seed_alone() -> None:
    one, same, other = (build_task(seed=seed) for seed in (3, 3, 4))
    some = torch.tensor([0, 1000, 3799])
    assert all(torch.equal(a, b) for a, b in zip(one.batch(some), same.batch(some), strict=True))
    losses = [task.loss(task.batch(some)).item() for task in (one, same, other)]
    assert losses[0] == losses[1] != losses[2]
    assert one.evaluate() == same.evaluate() and one.judge() == same.judge() != other.judge()
    assert not torch.equal(one._held, other._held)


def test_mean_gradient_of_workers_equals_the_joined_batch() -> None:
    task, shards = build_task(), Shards(3800, 2, 32, seed=0)
    joined = gradients(task, shards.joined(9))
    parts = [gradients(task, shards.indices(worker, 9)) for worker in (0, 1)]
    for slot, gradient in joined.items():
        torch.testing.assert_close((parts[0][slot] + parts[1][slot]) / 2, gradient, rtol=1e-4, atol=1e-7)


def test_gpt_learns_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 300)
    task = build_task("gpt", "text", data_dir=tmp_path, seed=0)
    inputs, targets = task.batch(torch.tensor([0, 5]))
    assert inputs.shape == targets.shape == (2, 128) and inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert bytes(inputs[0].tolist()).startswith(b"the quick brown fox")
    before = task.evaluate()
    assert before["loss"] == pytest.approx(5.55, abs=0.2) and before["accuracy"] < 10
    train(task, iterations=20, batch=4, lr=0.1)
    assert task.evaluate()["loss"] < 4


def test_windows_cover_the_text_once(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(i % 251 for i in range(20 * 128 * 10)))
    task = build_task("gpt", "text", data_dir=tmp_path, holdout=0)
    assert task.num_train == (18 * 128 * 10 - 1) // 128
    inputs, targets = task.batch(torch.arange(task.num_train))
    assert inputs.flatten().tolist() == [i % 251 for i in range(task.num_train * 128)]
    assert targets.flatten().tolist() == [(i + 1) % 251 for i in range(task.num_train * 128)]


def test_vgg11_accepts_cifar10(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    for i, file in enumerate((*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")):
        labels = (torch.arange(4) + i).to(torch.uint8).view(-1, 1) % 10
        images = torch.randint(256, (4, 3072), generator=rng, dtype=torch.uint8)
        (tmp_path / file).write_bytes(torch.cat([labels, images], 1).numpy().tobytes())
    task = build_task("vgg11", "cifar10", data_dir=tmp_path, seed=0)
    assert task.num_train == 19 and task.batch(torch.arange(2)).inputs.shape == (2, 3, 32, 32)
    task.loss(task.batch(torch.arange(2))).backward()
    assert set(task.evaluate()) == {"accuracy", "loss"}


@pytest.mark.parametrize("model, data, words", [
    ("vgg11", "digits", "'vgg11' takes 3 x 32 x 32 images: choose cifar10 for data; 'digits' is for mlp or lenet5"),
    ("mlp", "cifar10", "'mlp' takes 1 x 28 x 28 images: choose digits or mnist for data; 'cifar10' is for vgg11"),
    ("gpt", "mnist", "'gpt' takes windows of 128 bytes: choose text for data"),
    ("lenet5", "text", "choose digits or mnist for data; 'text' is for gpt"),
    ("alexnet", "cifar10", "takes 3 x 224 x 224 images in 1,000 classes, which no built-in data set has"),
    ("resnet50", "digits", "choose cifar10 for data; 'digits' is for mlp or lenet5"),
    ("vgg16", "digits", "unknown model 'vgg16': use one of mlp, lenet5, vgg11, alexnet, resnet50, vgg11fc, gpt"),
    ("mlp", "imagenet", "unknown data set 'imagenet': use one of digits, mnist, cifar10, text"),
])  # fmt: skip
def test_model_and_data_that_do_not_fit_raise_config_error(model: str, data: str, words: str) -> None:
    assert words in error_of(model, data)


def test_missing_files_raise_an_error(tmp_path: Path) -> None:
    for model, data in (("mlp", "mnist"), ("vgg11", "cifar10"), ("gpt", "text")):
        assert "there " in error_of(model, data, data_dir=tmp_path) and data in DATA
    (tmp_path / "short.txt").write_bytes(b"x" * 1289)
    assert "needs 128 bytes, got 128" in error_of("gpt", "text", data_dir=tmp_path)


def numbered(n: int, **options: float) -> Task:
    """Return a task whose inputs are the numbers of the examples and whose loss is their mean."""
    x = torch.arange(n, dtype=torch.float32).view(-1, 1)
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    return Task("numbers", layer, (x, x), (x[:2], x[:2]), lambda y, t: y.mean(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("n, holdout, held", [(1000, 0.05, 50), (10, 0.01, 1), (10, 0.99, 0), (7, 0.0, 0), (2, 0.5, 1)])
def test_held_out_examples_are_not_trained_with(n: int, holdout: float, held: int) -> None:
    if holdout == 0.99:
        with pytest.raises(ConfigError, match="leaves nothing of 10 examples to train with"):
            numbered(n, holdout=holdout)
        return
    task = numbered(n, holdout=holdout)
    assert task.num_train == n - held
    trained = set(task.batch(torch.arange(task.num_train)).inputs.flatten().tolist())
    assert len(trained) == task.num_train
    if not held:
        with pytest.raises(ConfigError, match="set holdout above 0"):
            task.judge()
    else:
        rest = set(range(n)) - trained
        assert task.judge() == pytest.approx(sum(rest) / len(rest))
    with pytest.raises(IndexError):
        task.batch(torch.tensor([task.num_train]))


@pytest.mark.parametrize("holdout", [-0.1, 1.0, float("nan")])
def test_invalid_holdout_raises_config_error(holdout: float) -> None:
    assert "holdout must be in [0, 1)" in error_of(holdout=holdout)


def test_accuracy_is_missing_if_targets_are_not_classes() -> None:
    assert numbered(10).evaluate() == {"loss": 0.5}


def normed(n: int = 1000) -> Task:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=rng) * 3 + 2
    y = (x.sum(1) > 10).long()
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2), nn.Dropout(0.5))
    return Task("normed", model, (x, y), (x[:100], y[:100]), cross_entropy)


def test_evaluation_depends_on_parameters_alone() -> None:
    task = normed()
    first, judged = task.evaluate(), task.judge()
    for i in range(3):  # changes the running statistics of a worker
        task.loss(task.batch(torch.arange(i, i + 50)))
    norm = task.model[0]  # type: ignore[index]
    assert int(norm.num_batches_tracked) == 7 + 3
    rng = torch.get_rng_state()
    assert task.evaluate() == first and task.judge() == judged
    assert torch.equal(torch.get_rng_state(), rng)
    assert norm.momentum == 0.1 and all(module.training for module in task.model.modules())
    torch.testing.assert_close(norm.running_mean, torch.full((5,), 2.0), atol=0.3, rtol=0)
    torch.testing.assert_close(norm.running_var, torch.full((5,), 9.0), atol=1.5, rtol=0)


def test_training_mode_is_restored_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    task = normed()
    monkeypatch.setattr(task.model[1], "forward", lambda x: 1 / 0)  # type: ignore[index]
    with pytest.raises(ZeroDivisionError):
        task.evaluate()
    assert task.model[0].momentum == 0.1 and all(module.training for module in task.model.modules())  # type: ignore[index]


def test_fewer_examples_than_a_chunk() -> None:
    assert set(normed(110).evaluate()) == {"accuracy", "loss"}


class Squares(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.full((3,), float(i * i)), i % 2


class Other(Dataset):  # type: ignore[type-arg]
    def __init__(self, item: object) -> None:
        self.item = item

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> object:
        if isinstance(self.item, Exception):
            raise self.item
        return self.item


def test_torch_datasets_are_accepted() -> None:
    pair = torch.rand(20, 3), torch.zeros(20, dtype=torch.int64)
    task = Task("own", nn.Linear(3, 2), Squares(), TensorDataset(*pair), cross_entropy, holdout=0)
    inputs, targets = task.batch(torch.tensor([3, 4]))
    assert inputs[:, 0].tolist() == [9, 16] and targets.tolist() == [1, 0]
    assert set(task.evaluate()) == {"accuracy", "loss"}


@pytest.mark.parametrize("data, words", [
    (None, r"the training set must be two tensors .* got NoneType"), (torch.zeros(3, 3), "got Tensor"),
    ((torch.zeros(3),), "got tuple"), ((torch.zeros(3, 3), torch.zeros(4)), "3 inputs but 4 targets"),
    ((torch.zeros(0, 3), torch.zeros(0)), "the training set is empty"),
    (Other(torch.zeros(3)), "first example cannot be loaded as a pair"),
    (Other((torch.zeros(3), "cat")), "must be a pair .* of tensors or numbers"),
    (Other(KeyError("path")), "first example cannot be loaded as a pair .* KeyError: 'path'"),
])  # fmt: skip
def test_invalid_data_raise_config_error(data: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Task("own", nn.Linear(3, 2), data, Squares(), cross_entropy)


def test_loss_must_be_a_scalar() -> None:
    task = Task("own", nn.Linear(3, 2), Squares(), Squares(), lambda y, t: y)
    with pytest.raises(ConfigError, match=r"must be a scalar tensor, the mean; got the shape \[2, 2\]"):
        task.loss(task.batch(torch.arange(2)))
