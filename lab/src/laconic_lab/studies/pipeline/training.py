"""One training run: all stages in one process, with the messages of a real pipeline between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic_lab.bench.corpus import Corpus
from laconic_lab.studies.pipeline.model import SIZES, Boundary, build_stages, chain
from laconic_lab.studies.pipeline.settings import REPEATED, Setting

__all__ = ["Training"]

VALIDATION_WINDOWS, VALIDATION_BATCH = 256, 32
EVALUATIONS = 3
LAST = 0.1
"""Share of the steps whose losses are averaged for the training loss."""


class Training:
    """A run of one setting."""

    def __init__(self, setting: Setting, seed: int, corpus: Corpus, device: torch.device) -> None:
        self.setting, self.device = setting, device
        self.context = SIZES[setting.size].context
        self.stages = [
            stage.to(device)
            for stage in build_stages(
                setting.size, setting.stages, seed, setting.sent_width if setting.bottleneck else 0,
                reads_tokens=setting.reads_tokens,
            )
        ]  # fmt: skip
        self.boundaries = [
            Boundary(stage, setting.forward, setting.backward, setting.delta) for stage in range(setting.stages - 1)
        ]
        self.parameters = [parameter for stage in self.stages for parameter in stage.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, setting.lr, betas=(0.9, 0.95), weight_decay=0.1)
        self._window = torch.arange(self.context + 1, device=device)
        self._train = corpus.train.to(device)
        self._held_out = self._validation(corpus.validation.to(device))
        generator = torch.Generator().manual_seed(1000 + seed)
        self._starts, self._samples = self._draw(generator)

    def _draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return where the windows of each micro-batch start, [steps, micro-batches, windows], and its sample."""
        setting, limit = self.setting, self._train.numel() - self.context
        total = setting.steps * setting.micro_batches
        if setting.samples != REPEATED:
            shape = (setting.steps, setting.micro_batches, setting.windows)
            return torch.randint(limit, shape, generator=generator), torch.zeros(0)
        pool = torch.randint(limit, (setting.pool, setting.windows), generator=generator)
        epochs = [torch.randperm(setting.pool, generator=generator) for _ in range(-(-total // setting.pool))]
        order = torch.cat(epochs)[:total].view(setting.steps, setting.micro_batches)
        return pool[order], order

    def _validation(self, text: Tensor) -> Tensor:
        starts = torch.linspace(0, text.numel() - self.context - 1, VALIDATION_WINDOWS, dtype=torch.float64).long()
        return text[starts.to(text.device)[:, None] + self._window].long()

    def step(self, step: int) -> float:
        """Take one step; return its loss."""
        setting, losses = self.setting, []
        for group in self.optimizer.param_groups:
            group["lr"] = setting.learning_rate(step)
        self.optimizer.zero_grad()
        for micro_batch in range(setting.micro_batches):
            starts = self._starts[step, micro_batch].to(self.device)
            tokens = self._train[starts[:, None] + self._window].long()
            read = x = tokens[:, :-1]
            sample = None
            if self._samples.numel() and setting.delta:
                sample = int(self._samples[step, micro_batch])
            for number, stage in enumerate(self.stages):
                x = stage(x, read)
                if number < len(self.boundaries):
                    x = self.boundaries[number].cross(x, micro_batch, sample)
            loss = _loss(x, tokens)
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad /= setting.micro_batches
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return float(torch.stack(losses).mean())

    @torch.no_grad()
    def validation_loss(self, *, compressed: bool) -> float:
        """Return the loss on held-out windows, in nats a byte.

        Args:
            compressed: Whether activations cross the boundaries as in training.
        """
        boundaries = self.boundaries if compressed else []
        batches = torch.split(self._held_out, VALIDATION_BATCH)
        return fmean(float(_loss(chain(self.stages, boundaries, batch[:, :-1]), batch)) for batch in batches)

    def run(self, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
        """Train to the end; return the values of the Record."""
        setting, began = self.setting, time.perf_counter()
        marks = {round(setting.steps * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)}
        steps, losses, train = [], [], []
        for step in range(1, setting.steps + 1):
            train.append(self.step(step - 1))
            if step in marks:
                sent = self._bytes()
                steps.append(step)
                losses.append(self.validation_loss(compressed=False))
            if progress is not None and step % 10 == 0:
                progress(step)
        return {
            "steps_evaluated": steps, "validation_loss": losses, **sent,
            "compressed_loss": self.validation_loss(compressed=True),
            "train_loss": fmean(train[-max(1, round(LAST * setting.steps)) :]),
            "error_forward": self.boundaries[0].forward_sender.stats.error,
            "error_backward": self.boundaries[0].backward_sender.stats.error,
            "seconds": round(time.perf_counter() - began, 2),
        }  # fmt: skip

    def _bytes(self) -> dict[str, Any]:
        """Return the bytes of all boundaries so far, beside float32 activations of the full width."""
        sent = [
            sum(end.stats.bytes_sent for end in ends)
            for ends in (
                [boundary.forward_sender for boundary in self.boundaries],
                [boundary.backward_sender for boundary in self.boundaries],
            )
        ]
        setting = self.setting
        tokens = setting.steps * setting.micro_batches * setting.windows * self.context
        plain = 4 * tokens * SIZES[setting.size].width * len(self.boundaries)
        return {
            "forward_bytes": sent[0],
            "backward_bytes": sent[1],
            "plain_bytes": plain,
            "ratio": 2 * plain / sum(sent),
        }


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
