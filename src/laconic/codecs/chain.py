"""Chain: the codec. At most one selector, one value stage and one coder, in this order, checked to fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from laconic import counters, kernels
from laconic.codecs import spec as grammar
from laconic.codecs.adaptive import Adaptive
from laconic.codecs.base import ChannelStage, Coder, Quantizer, Selector, Stage, ValueStage, refuse_nonfinite
from laconic.codecs.cast import Raw
from laconic.codecs.coded import Coded
from laconic.codecs.powersgd import PowerSGD
from laconic.codecs.qsgd import QSGD
from laconic.codecs.randk import RandK
from laconic.errors import ConfigError, FrameError, InputError
from laconic.kernels.sections import MAX_ALPHABET
from laconic.packet import EXACT, FLOATS, Arena, HeapArena, Packet, TensorSpec, allocate, oom_as_frame_error

__all__ = ["Chain", "split"]

_RAW = Raw()


def split(stages: list[Stage], spec: str) -> tuple[list[ChannelStage], Chain]:
    """Channel stages and the codec behind them; ``ConfigError`` when they do not fit together."""
    memories = [stage for stage in stages if isinstance(stage, ChannelStage)]
    rest = stages[len(memories) :]
    for stage in rest:
        if isinstance(stage, ChannelStage):
            raise ConfigError(f"{stage.name!r} keeps memory around a codec: write it first, in {spec!r}")
    if len({stage.name for stage in memories}) < len(memories):
        raise ConfigError(f"{memories[0].name!r} stands twice in {spec!r}")
    if not rest:
        raise ConfigError(f"{spec!r} has no codec behind {memories[-1].name!r}: add one, such as 'topk:0.01'")
    selector: Selector | None = None
    values: ValueStage | None = None
    coder: Coder | None = None
    for stage in rest:
        if coder is not None:
            raise ConfigError(f"{stage.name!r} cannot follow {coder.name!r}, which comes last, in {spec!r}")
        if isinstance(stage, Selector):
            if values is not None:
                raise ConfigError(f"{stage.name!r} selects and cannot follow {values.name!r}, which codes, in {spec!r}")
            if selector is not None:
                raise ConfigError(f"two selectors, {selector.name!r} and {stage.name!r}, in {spec!r}: keep one")
            selector = stage
        elif isinstance(stage, ValueStage):
            if values is not None:
                raise ConfigError(f"{stage.name!r} cannot follow {values.name!r} in {spec!r}: values are coded once")
            values = stage
        elif isinstance(stage, Coder):
            coder = _coder_behind(values, stage, spec)
        else:
            raise ConfigError(f"stage {stage.name!r} of kind {stage.kind!r} cannot stand in {spec!r}")
    if selector is not None and isinstance(values, PowerSGD):
        raise ConfigError(f"{values.name!r} needs a whole matrix and cannot follow {selector.name!r} in {spec!r}")
    if memories and isinstance(selector, RandK) and selector.scale:
        selector = replace(selector, scale=False)
    return memories, Chain(selector, values, coder)


def _coder_behind(values: ValueStage | None, coder: Coder, spec: str) -> Coder:
    if not isinstance(values, Quantizer):
        raise ConfigError(
            f"{coder.name!r} codes the symbols of a quantizer, such as 'qsgd:4': put one before it in {spec!r}"
        )
    if values.max_alphabet > MAX_ALPHABET:
        raise ConfigError(f"{coder.name!r} codes at most {MAX_ALPHABET} symbols, {values.name!r} has more in {spec!r}")
    return coder


def _saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values that fit a narrower dtype: a quantizer's level may lie past the largest value that came in."""
    if dtype not in (torch.float16, torch.bfloat16) or values.dtype == dtype:
        return values
    largest = torch.finfo(dtype).max
    beyond = int((values.abs() > largest).sum())
    if beyond:
        counters.count(
            "saturated", beyond, f"decoded values lie beyond {str(dtype).removeprefix('torch.')} and saturate"
        )
    return values.clamp(-largest, largest)


@dataclass(frozen=True)
class Chain:
    """selector | value stage | coder. Each may be missing: all values travel then, or raw, or with packed symbols.

    >>> import laconic, torch
    >>> codec = laconic.codec("topk:0.5")
    >>> codec.decode(codec.encode(torch.tensor([1.0, -4.0, 0.5, 3.0])))
    tensor([ 0., -4.,  0.,  3.])
    """

    selector: Selector | None
    values: ValueStage | None
    coder: Coder | None = None

    def __str__(self) -> str:
        return self.text

    @cached_property
    def text(self) -> str:
        """The canonical spec."""
        return grammar.text(self.stages)

    @property
    def stages(self) -> list[Stage]:
        return [stage for stage in (self.selector, self.values, self.coder) if stage is not None]

    @cached_property
    def _value_stage(self) -> ValueStage:
        if self.coder is not None:
            assert isinstance(self.values, Quantizer)
            return Coded(self.values, self.coder)
        return self.values if self.values is not None else _RAW

    def _stage_for(self, spec: TensorSpec) -> ValueStage:
        """What codes the values of such a tensor; those a selector keeps have no shape."""
        return self._value_stage if self.selector is not None else self._value_stage.shaped(spec.shape)

    @property
    def biased(self) -> bool:
        """Whether the mean over seeds is another than the input."""
        return any(stage.is_biased for stage in self.stages)

    @property
    def summable(self) -> bool:
        """Whether packets can be added without decoding (``laconic.summing``)."""
        return bool(self.stages) and all(stage.summable for stage in self.stages)

    @property
    def contractive(self) -> bool:
        return all(stage.contractive for stage in self.stages)

    @property
    def num_sections(self) -> int:
        """Sections of every packet that is not all zero."""
        return (self.selector is not None) + self._value_stage.num_sections

    # ------------------------------------------------------------------------------------------------------- encode

    def encode(
        self,
        x: Tensor,
        *,
        seed: int = 0,
        arena: Arena | None = None,
        exact: bool = False,
        gradient: Tensor | None = None,
    ) -> Packet:
        """Encode a tensor of any shape, stride and float dtype. ``x`` is left alone.

        Args:
            x: The tensor; float32, float64, float16 or bfloat16.
            seed: Decides all randomness: same input, seed and codec, same bytes.
            arena: Where the sections go; fresh memory by default.
            exact: Let a lossless codec take integers and booleans, too.
            gradient: What ``adaptive:by=grad`` takes the number of levels from.
        """
        if isinstance(self.values, Adaptive) and self.values.by == "grad":
            tuned = replace(self, values=self.values.given(gradient))
            packet = tuned._encode(x, seed, arena, exact)
            return Packet(self.text, packet.spec, packet.sections)
        if gradient is not None:
            raise InputError(f"codec {self.text!r} has no use for a gradient: only adaptive:by=grad does")
        return self._encode(x, seed, arena, exact)

    def _encode(self, x: Tensor, seed: int, arena: Arena | None, exact: bool) -> Packet:
        spec = TensorSpec.of(x)
        as_it_is = exact and self._value_stage.lossless and self.selector is None and spec.dtype in EXACT
        if spec.dtype not in FLOATS and not as_it_is:
            raise InputError(
                "expected a float32, float64, float16 or bfloat16 tensor, got "
                f"{str(spec.dtype).removeprefix('torch.')} of shape {list(spec.shape)}. "
                "Convert it first, or leave it out of compression."
            )
        n = spec.numel
        flat = x if x.dim() == 1 and not x.requires_grad else x.detach().reshape(-1)
        if not flat.is_contiguous() or flat.is_neg():  # a lazily negated tensor has other bytes than values
            flat = flat.resolve_neg().contiguous()
        return Packet(self.text, spec, self._sections(flat, spec, arena or HeapArena(x.device), seed) if n else ())

    def encode_feedback(self, x: Tensor, residual: Tensor, *, seed: int = 0) -> Packet | None:
        """Encode residual + x and leave in the residual what the packet lacks, in one pass over both.

        None, and nothing has happened, where that takes several passes: the caller then adds, encodes and takes away.
        Both are contiguous float32 of one shape. Should the sum not be finite, the residual is spent.
        """
        backend = kernels.backend_for(residual)
        if self.selector is not None or self.coder is not None or not isinstance(self.values, QSGD):
            return None
        if backend is kernels.cpu:  # whose cache holds what the next pass reads
            return None
        sections = self.values.encode_feedback(x.view(-1), residual.view(-1), backend, HeapArena(x.device), seed)
        return Packet(self.text, TensorSpec.of(residual), sections)

    def _sections(self, flat: Tensor, spec: TensorSpec, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        backend, stage = kernels.backend_for(flat), self._stage_for(spec)
        if self.selector is None:
            return self._encode_values(flat, stage, backend, arena, seed)
        chosen = self.selector.select(flat, backend, arena, seed)
        refuse_nonfinite(chosen.amax_bits, spec.numel)
        if chosen.amax_bits == 0:
            return ()
        if isinstance(stage, Raw) and backend is not kernels.cpu:
            # The key says that they are finite: another launch and a wait less. (On a CPU the core copies, whose
            # threads survive a fork.)
            return chosen.section, stage.copy(chosen.values, arena)
        coded = self._encode_values(chosen.values, stage, backend, arena, seed)
        return (chosen.section, *coded) if coded else ()

    def _encode_values(
        self, values: Tensor, stage: ValueStage, backend: kernels.Kernels, arena: Arena, seed: int
    ) -> tuple[Tensor, ...]:
        if not stage.lossless and values.dtype != torch.float32:
            values = values.to(torch.float32)
        return stage.encode(values, backend, arena, seed)

    # ------------------------------------------------------------------------------------------------------- decode

    def decode(self, packet: Packet, *, out: Tensor | None = None) -> Tensor:
        """The tensor back, into ``out`` when given (same shape; another dtype is converted to)."""
        spec = packet.spec
        if out is not None and tuple(out.shape) != spec.shape:
            raise FrameError(f"expected a tensor of shape {list(out.shape)}, the frame holds {list(spec.shape)}")
        k = self.check(packet)
        if not packet.sections:
            return allocate(spec, None, zero=True) if out is None else out.zero_()
        if out is None:
            out = allocate(spec, packet.sections[0].device)
        native = spec.dtype if self._value_stage.lossless else torch.float32
        direct = out.dtype == native and out.is_contiguous()
        if not direct:
            flat = allocate(TensorSpec((spec.numel,), native), packet.sections[0].device)
        else:
            flat = out if out.dim() == 1 else out.view(-1)
        self._fill(packet, k, flat, None)
        if not direct:
            with oom_as_frame_error(spec.numel):
                out.copy_(_saturated(flat, out.dtype).view(spec.shape))
        return out

    def accumulate(self, packet: Packet, out: Tensor, weight: float = 1.0) -> None:
        """out += weight * decoded, without decoding into a tensor of its own. ``out`` is contiguous float32."""
        if tuple(out.shape) != packet.spec.shape:
            raise FrameError(f"expected a tensor of shape {list(out.shape)}, the frame holds {list(packet.spec.shape)}")
        if out.dtype != torch.float32 or not out.is_contiguous():
            raise InputError(f"accumulation needs a contiguous float32 tensor, got {out.dtype}, strides {out.stride()}")
        if not abs(weight) <= torch.finfo(torch.float32).max:
            raise InputError(f"a weight must be finite in float32, got {weight}")
        k = self.check(packet)
        if packet.sections:
            self._fill(packet, k, out.view(-1), weight)

    def check(self, packet: Packet) -> int:
        """Whether the sections can hold what the packet says, before anything is allocated for it.

        Returns how many values it holds. To ask a section on a device is to wait, so where a selector always keeps as
        many, and sizes agree, that number stands until the section is read.
        """
        found = tuple(section.numel() for section in packet.sections)
        if not found:
            return 0
        if len(found) != self.num_sections:
            raise FrameError(f"codec {self.text!r} has {self.num_sections} sections, the frame {len(found)}")
        n = packet.spec.numel
        if self.selector is None:
            self._check_sizes(packet, n)
            return n
        place, stage = packet.sections[0], self._stage_for(packet.spec)
        k = None if kernels.backend_for(place) is kernels.cpu else self.selector.expected(n)
        if k and stage.fits(found[1:], k, packet.spec.dtype.itemsize):
            return k
        return self._count(packet)

    def _count(self, packet: Packet) -> int:
        """How many values a selector's section says that it places, checked against the others."""
        assert self.selector is not None
        n = packet.spec.numel
        k = self.selector.head(packet.sections[0], n).kept
        if k > self.selector.max_kept(n):
            raise FrameError(f"{k} of {n} values are more than codec {self.text!r} keeps")
        self._check_sizes(packet, k)
        return k

    def _check_sizes(self, packet: Packet, k: int) -> None:
        coded = tuple(section.numel() for section in packet.sections[self.selector is not None :])
        stage, itemsize = self._stage_for(packet.spec), packet.spec.dtype.itemsize
        if packet.spec.numel == 0 or not stage.fits(coded, k, itemsize):
            wanted = stage.section_nbytes(k, itemsize)
            raise FrameError(f"codec {self.text!r} codes {k} values in {wanted} bytes, the frame has {coded}")

    def _fill(self, packet: Packet, k: int, out: Tensor, weight: float | None) -> None:
        with oom_as_frame_error(packet.spec.numel):
            if self.selector is None:
                stage, backend = self._stage_for(packet.spec), kernels.backend_for(packet.sections[0])
                stage.decode(packet.sections, packet.spec.dtype, backend, out, weight)
            elif not self._put(packet, k, out, weight):
                placed = self._put(packet, self._count(packet), out, weight)
                assert placed

    def _put(self, packet: Packet, k: int, out: Tensor, weight: float | None) -> bool:
        """k selected values where they belong; False when the section has places for another number."""
        assert self.selector is not None
        (place, *coded), dtype, stage = packet.sections, packet.spec.dtype, self._value_stage
        backend = kernels.backend_for(place)
        if isinstance(stage, Raw):
            values = stage.view(coded[0], dtype)
        else:
            values = torch.empty(k, dtype=torch.float32, device=place.device)
            stage.decode(tuple(coded), dtype, backend, values, None)
        return self.selector.put(place, values, backend, out, weight)

    def positions(self, packet: Packet) -> Tensor | None:
        """Where a packet's values stand, ascending; None when it holds all of them."""
        if self.selector is None or not packet.sections:
            return None
        place, n = packet.sections[0], packet.spec.numel
        return self.selector.positions(place, n, self.selector.head(place, n), kernels.backend_for(place))

    # -------------------------------------------------------------------------------------------------------- sizes

    def max_section_nbytes(self, spec: TensorSpec) -> tuple[int, ...]:
        """The most bytes each section of this codec can take for such a tensor."""
        n = spec.numel
        if n == 0:
            return ()
        if self.selector is None:
            return self._stage_for(spec).section_nbytes(n, spec.dtype.itemsize)
        coded = self._value_stage.section_nbytes(self.selector.max_kept(n), spec.dtype.itemsize)
        return (self.selector.max_section_nbytes(n), *coded)
