"""Rounds of compressed sums, computed for all workers and slots at once on their device, without frames.

The arithmetic is that of ``laconic.Contributor`` and ``laconic.Sum`` with ``shared`` or ``thc``, bit for bit. It does
not wait for the host, so that an iteration can be one CUDA graph. Tests compare it with real frames, and every run
compares samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from laconic.aggregate.homomorphic.summing import CARRY
from laconic.codecs import parse
from laconic.codecs.memory import residual_decay
from laconic.codecs.packed_ints import PackedIntStage
from laconic.errors import ConfigError, WrongResultError
from laconic.kernels.interface import CLIP_LIMIT
from laconic.kernels.reference.packed_ints import _LARGE, _TINY, _levels_of, block_scales, hadamard, rotation_signs
from laconic.kernels.sections import SUM_BLOCK, num_buckets

__all__ = ["Round"]

log = logging.getLogger("laconic")


class Round:
    """Slots of one summable codec that are consecutive in a flat tensor.

    Args:
        slots: Names and shapes, in the order of the flat tensor.
        spec: ``ef|thc:2``, ``shared:16``, …: ``shared`` or ``thc`` with rounding to nearest.
        carry: Whether scales are those of the round before, widened, as on the server; otherwise workers agree on
            scales before they send.
    """

    def __init__(
        self, slots: Mapping[str, tuple[int, ...]], spec: str, workers: int, device: torch.device, *, carry: bool
    ) -> None:
        memories, chain = parse(spec)
        stage = chain.values
        if not isinstance(stage, PackedIntStage) or chain.selector is not None or stage.stochastic:
            raise ConfigError(f"only shared and thc that round to nearest are computed here, got {spec!r}")
        self.slots, self.spec, self.workers = dict(slots), spec, workers
        self.carry, self.feedback, self.decay = carry, bool(memories), residual_decay(memories)
        self.levels = stage.header(workers, ring=False).levels
        self.rotated = stage.rotation_seed is not None
        self.spans: dict[str, tuple[int, int]] = {}
        self._stretches: list[tuple[int, int, int]] = []
        """First value, number of values and first block of each slot."""
        at = block = 0
        signs = []
        for name, shape in slots.items():
            numel = torch.Size(shape).numel()
            blocks = num_buckets(numel, SUM_BLOCK)
            self.spans[name] = (block, blocks)
            self._stretches.append((at, numel, block))
            if stage.rotation_seed is not None:
                signs.append(rotation_signs(blocks * SUM_BLOCK, stage.rotation_seed, device).view(blocks, SUM_BLOCK))
            at, block = at + numel, block + blocks
        self.numel, self.blocks = at, block
        self._signs = torch.cat(signs) if signs else None
        places = [torch.arange(numel) + first * SUM_BLOCK for _, numel, first in self._stretches]
        self._places = (torch.cat(places) if places else torch.empty(0, dtype=torch.int64)).to(device)
        factor = stage.clip_factor(self.levels, workers)
        self._factor = torch.tensor(factor, dtype=torch.float32, device=device)
        kept = workers if self.feedback else 0
        self._hadamard = _hadamard_on(device)
        self.residual = torch.zeros(kept, block, SUM_BLOCK, device=device)
        self.scales = torch.zeros(block, device=device)
        self._first = torch.ones(1, dtype=torch.bool, device=device)

    def state(self) -> list[Tensor]:
        """Return the tensors that a round changes."""
        return [self.residual, self.scales, self._first]

    def state_dict(self) -> dict[str, Tensor]:
        return dict(zip(("residual", "scales", "first"), self.state(), strict=True))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, x in self.state_dict().items():
            x.copy_(state[name])

    def forget(self, name: str) -> None:
        """Set a slot's residuals to zero."""
        if self.feedback and name in self.spans:
            first, blocks = self.spans[name]
            self.residual[:, first : first + blocks].zero_()

    @torch.no_grad()
    def mean(self, values: Tensor) -> Tensor:
        """Return the mean that all workers decode if each sends a row of ``values``."""
        rows = values.new_zeros(self.workers, self.blocks * SUM_BLOCK).index_copy_(1, self._places, values)
        blocks = rows.view(self.workers, self.blocks, SUM_BLOCK)
        if self.rotated:
            blocks = self._rotated(blocks)
        if self.feedback:
            if self.decay != 1.0:
                self.residual.mul_(self.decay)
            blocks = self.residual.add_(blocks)
        flat = blocks.reshape(-1)
        scales = block_scales(flat, self.rotated).view(self.workers, self.blocks).amax(0)
        agreed = torch.where(self._first, scales, self.scales * CARRY) if self.carry else scales
        self.scales.copy_(scales)
        self._first.zero_()
        clips = agreed * self._factor
        clips = torch.where(clips < CLIP_LIMIT, clips, CLIP_LIMIT)
        prescale = torch.where(clips > _LARGE, 2.0**-64, torch.where(clips < _TINY, 2.0**64, 1.0)).to(torch.float32)
        rows = (blocks * prescale.unsqueeze(1)).view(-1, SUM_BLOCK)
        symbols = _levels_of(rows, (clips * prescale).repeat(self.workers), self.levels, None).view_as(blocks)
        if self.feedback:
            step = (clips / torch.full_like(clips, float(self.levels))).unsqueeze(1)
            self.residual.sub_((2 * symbols - self.levels).to(torch.float32) * step)
        return self._decoded(symbols.sum(0), clips)

    def _rotated(self, blocks: Tensor) -> Tensor:
        assert self._signs is not None
        scaled = blocks * 2.0**-5 * self._signs
        return self._hadamard(scaled.view(-1, SUM_BLOCK)).view_as(blocks)

    def _decoded(self, total: Tensor, clips: Tensor) -> Tensor:
        most = self.levels * self.workers
        centred = (2 * total - most).to(torch.float32)
        if not self.rotated:
            values = centred * (clips / torch.full_like(clips, float(most))).unsqueeze(1)
        else:
            assert self._signs is not None
            step = (clips / torch.full_like(clips, float(most))) * 2.0**-5
            values = self._hadamard(centred * step.unsqueeze(1)) * self._signs
        return values.view(-1).index_select(0, self._places)


def _hadamard_on(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the rotation by Triton if it is available and gives the reference's bits, otherwise the reference."""
    if device.type != "cuda":
        return hadamard
    try:
        from laconic.kernels.triton import rotation
    except ImportError as error:
        log.warning("rotations take ten passes on the GPU, which is slow, because Triton is missing: %s", error)
        return hadamard
    x = torch.randn(33, SUM_BLOCK, device=device)
    if not rotation.hadamard(x).equal(hadamard(x)):
        raise WrongResultError("the rotation by Triton differs from the reference: please report this")
    return rotation.hadamard
