"""What a round of sums gives, computed for all workers and slots at once on the device that holds them.

The arithmetic is that of ``laconic.Contributor`` and ``laconic.Sum`` with ``shared`` or ``thc``, bit for bit, without
making frames: nothing waits for the host, so that a whole iteration can be one CUDA graph. Tests compare it with real
frames, and so does every run, by sample.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from laconic.aggregate.homomorphic.summing import CARRY
from laconic.codecs import parse
from laconic.codecs.packed_ints import PackedIntStage
from laconic.errors import ConfigError, WrongResultError
from laconic.kernels.interface import CLIP_LIMIT
from laconic.kernels.reference.packed_ints import hadamard, rotation_signs
from laconic.kernels.reference.reductions import pairwise_sum
from laconic.kernels.sections import SUM_BLOCK, num_buckets

__all__ = ["Round"]

log = logging.getLogger("laconic")

LARGE, TINY = 2.0**90, 2.0**-90
"""As in the kernels: clips beyond these are brought back by a power of two before anything is divided by them."""


class Round:
    """Slots that one summable codec serves, side by side in a flat tensor.

    Args:
        slots: Names and shapes, in the order in which they lie there.
        spec: ``ef|thc:2``, ``shared:16``, …: ``shared`` or ``thc``, rounding to nearest.
        workers: How many send.
        device: Where all of it is.
        carry: Whether integers are on the scales of the round before, widened, as the server has it; otherwise
            workers settle them before they send.
    """

    def __init__(
        self, slots: Mapping[str, tuple[int, ...]], spec: str, workers: int, device: torch.device, *, carry: bool
    ) -> None:
        memories, chain = parse(spec)
        stage = chain.values
        if not isinstance(stage, PackedIntStage) or chain.selector is not None or stage.stochastic:
            raise ConfigError(f"only shared and thc that round to nearest are computed here, not {spec!r}")
        self.slots, self.spec, self.workers = dict(slots), spec, workers
        self.carry, self.feedback = carry, bool(memories)
        self.levels = stage.header(workers, ring=False).levels
        self.rotated = stage.rotation_seed is not None
        self.spans: dict[str, tuple[int, int]] = {}
        self._stretches: list[tuple[int, int, int]] = []
        """First value, how many, and the first block of each slot."""
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
        """What a round changes."""
        return [self.residual, self.scales, self._first]

    def state_dict(self) -> dict[str, Tensor]:
        return dict(zip(("residual", "scales", "first"), self.state(), strict=True))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, x in self.state_dict().items():
            x.copy_(state[name])

    def forget(self, name: str) -> None:
        """Begin a slot's residuals anew."""
        if self.feedback and name in self.spans:
            first, blocks = self.spans[name]
            self.residual[:, first : first + blocks].zero_()

    @torch.no_grad()
    def mean(self, values: Tensor) -> Tensor:
        """What everybody decodes when each worker sends a row."""
        rows = values.new_zeros(self.workers, self.blocks * SUM_BLOCK).index_copy_(1, self._places, values)
        blocks = rows.view(self.workers, self.blocks, SUM_BLOCK)
        if self.rotated:
            blocks = self._turned(blocks)
        if self.feedback:
            blocks = self.residual.add_(blocks)
        mine = self._scales_of(blocks)
        found = mine.amax(0)
        agreed = torch.where(self._first, found, self.scales * CARRY) if self.carry else found
        self.scales.copy_(found)
        self._first.zero_()
        clips = agreed * self._factor
        clips = torch.where(clips < CLIP_LIMIT, clips, CLIP_LIMIT)
        symbols = self._levels_of(blocks, clips)
        if self.feedback:
            step = (clips / torch.full_like(clips, float(self.levels))).unsqueeze(1)
            self.residual.sub_((2 * symbols - self.levels).to(torch.float32) * step)
        return self._decoded(symbols.sum(0), clips)

    def _turned(self, blocks: Tensor) -> Tensor:
        assert self._signs is not None
        scaled = blocks * 2.0**-5 * self._signs
        return self._hadamard(scaled.view(-1, SUM_BLOCK)).view_as(blocks)

    def _scales_of(self, blocks: Tensor) -> Tensor:
        """By worker and block."""
        if not self.rotated:
            return blocks.abs().amax(2)
        squares = blocks.reshape(-1, SUM_BLOCK).to(torch.float64).square()
        return (pairwise_sum(squares).sqrt() * 2.0**-5).to(torch.float32).view(blocks.shape[:2])

    def _levels_of(self, blocks: Tensor, clips: Tensor) -> Tensor:
        lift = torch.where(clips > LARGE, 2.0**-64, torch.where(clips < TINY, 2.0**64, 1.0)).to(torch.float32)
        lifted, half = clips * lift, self.levels / 2
        inverse = torch.where(lifted > 0, torch.full_like(lifted, half) / lifted, 0.0).unsqueeze(1)
        offset = torch.where(lifted > 0, half + 0.5, 0.0).to(torch.float32).unsqueeze(1)
        t = (blocks * lift.unsqueeze(1)) * inverse + offset
        t = torch.where(t > 0, t, 0.0)
        return torch.where(t < self.levels, t, float(self.levels)).to(torch.int32)

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
    """In one pass where Triton can compile it, and it gives the reference's bits."""
    if device.type != "cuda":
        return hadamard
    try:
        from laconic.kernels.triton import rotation
    except ImportError as error:
        log.warning("rotations take ten passes on the GPU, which is slow: %s", error)
        return hadamard
    x = torch.randn(33, SUM_BLOCK, device=device)
    if not rotation.hadamard(x).equal(hadamard(x)):
        raise WrongResultError("the rotation by Triton differs from the reference's: please report this")
    return rotation.hadamard
