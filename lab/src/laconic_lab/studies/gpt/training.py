"""One training run: all workers in one process, inner steps as CUDA graphs, exchanges between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laconic import counters
from laconic_lab.bench.corpus import Corpus
from laconic_lab.studies.gpt.frames import FrameLog
from laconic_lab.studies.gpt.gradient_exchange import exchange_of_gradients
from laconic_lab.studies.gpt.inner import InnerOptimizer
from laconic_lab.studies.gpt.local_exchange import LocalExchange
from laconic_lab.studies.gpt.model import SIZES, Replicas
from laconic_lab.studies.gpt.settings import LOCAL, Setting

__all__ = ["Training"]

VALIDATION_WINDOWS = 1024
EVALUATIONS = 8


class Training:
    """A run of one setting.

    Args:
        compiled: Whether torch.compile fuses the forward pass and the optimizer; by default on a GPU.
    """

    def __init__(
        self, setting: Setting, seed: int, corpus: Corpus, device: torch.device, *, compiled: bool | None = None
    ) -> None:
        self.setting, self.device, self.shape = setting, device, SIZES[setting.size]
        on_gpu = device.type == "cuda"
        compiled = on_gpu if compiled is None else compiled
        # With exact gradients K workers are one worker with all windows.
        workers = 1 if setting.exchange == "ddp" else setting.workers
        self.replicas = Replicas(self.shape, workers, seed, device, compiled=compiled)
        self.optimizer = InnerOptimizer(self.replicas, setting, compiled=compiled)
        self.frames = FrameLog()
        self.local = self.gradients = None
        if setting.exchange == LOCAL:
            self.local = LocalExchange(self.replicas, setting, self.frames)
        elif setting.exchange != "ddp":
            self.gradients = exchange_of_gradients(setting.exchange)(
                self.replicas, setting, self.frames, self.optimizer
            )
        self._window = torch.arange(self.shape.context + 1, device=device)
        self._train = corpus.train.to(device)
        self._held_out = self._validation_windows(corpus.validation.to(device))
        generator = torch.Generator().manual_seed(1000 + seed)
        limit, per_worker = self._train.numel() - self.shape.context, setting.batch // workers
        self._starts = torch.randint(limit, (setting.steps, workers, per_worker), generator=generator).to(device)
        read = self._starts.numel() * self.shape.context
        if read > self._train.numel():
            counters.count(
                "repeated_text", 1, f"the training reads {read:,} bytes of a text of {self._train.numel():,}, so it "
                "learns some of them by heart: give a longer text by --data-dir, or fewer --iterations",
            )  # fmt: skip
        self._start = torch.zeros_like(self._starts[0])
        self.losses = torch.zeros(workers, device=device)
        self._backward, self._update = (
            self._graphed([self._compute_gradients, self.optimizer.step]) if on_gpu
            else (self._compute_gradients, self.optimizer.step)
        )  # fmt: skip

    def _validation_windows(self, validation: Tensor) -> Tensor:
        limit = validation.numel() - self.shape.context - 1
        starts = torch.linspace(0, limit, VALIDATION_WINDOWS, dtype=torch.float64, device=validation.device).long()
        return validation[starts[:, None] + self._window].long()

    def _compute_gradients(self) -> None:
        tokens = self._train[self._start[..., None] + self._window].long()
        self.losses.copy_(self.replicas.backward(tokens))

    def _graphed(self, functions: list[Callable[[], None]]) -> list[Callable[[], None]]:
        """Return the functions as CUDA graphs; parameters and optimizer state are as before."""
        changed = (self.replicas.rows, *self.optimizer.state().values())
        before = [x.clone() for x in changed]
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                for function in functions:
                    function()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        replays: list[Callable[[], None]] = []
        for function in functions:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                function()
            replays.append(graph.replay)
        with torch.no_grad():
            for x, saved in zip(changed, before, strict=True):
                x.copy_(saved)
        return replays

    @property
    def model(self) -> Tensor:
        """The parameters that would be saved."""
        return self.replicas.rows[0] if self.local is None else self.local.model

    def run(self, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
        """Train to the end; return the values of the Record."""
        setting, began = self.setting, time.perf_counter()
        marks = {round(setting.steps * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)}
        steps, losses = [], []
        for step in range(1, setting.steps + 1):
            self.optimizer.lr.fill_(setting.learning_rate(step - 1))
            self._start.copy_(self._starts[step - 1])
            self._backward()
            if self.gradients is not None:
                self.gradients.exchange(step)
            self._update()
            if self.local is not None:
                self.local.after_step(step)
            if step in marks:
                steps.append(step)
                losses.append(self.replicas.validation_loss(self.model, self._held_out))
                if progress is not None:
                    progress(step)
        return {"steps_evaluated": steps, "validation_loss": losses, **self._bytes(),
                "train_loss": float(self.losses.mean()), "seconds": round(time.perf_counter() - began, 2)}  # fmt: skip

    def _bytes(self) -> dict[str, Any]:
        """Return the bytes of one worker over the run, beside 8 bytes a parameter a step of float32 DDP."""
        dense = 4 * self.shape.numel * self.setting.steps
        up, down = (dense, dense) if self.setting.exchange == "ddp" else map(self.frames.nbytes, ("up", "down"))
        return {
            "numel": self.shape.numel, "up_bytes": up, "down_bytes": down, "ratio": 2 * dense / (up + down),
            "bytes_by_message": self.frames.share(), "frames_compared": self.frames.compared,
            "frames_other": self.frames.differing,
        }  # fmt: skip
