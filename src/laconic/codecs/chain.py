"""Chain: the codec. At most one selector, one value stage and one coder, in this order."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from laconic import counters, kernels
from laconic.codecs import spec as grammar
from laconic.codecs.base import ChannelStage, Coder, Quantizer, Selector, Stage, ValueStage, require_finite
from laconic.codecs.cast import Raw
from laconic.codecs.coded import Coded
from laconic.errors import ConfigError, FrameError, InputError
from laconic.kernels.known_amax import amax_is
from laconic.packet import EXACT, FLOATS, Arena, HeapArena, Packet, TensorSpec, allocate, oom_as_frame_error

__all__ = ["Chain", "assemble"]

_RAW = Raw()


def assemble(stages: list[Stage], spec: str) -> tuple[list[ChannelStage], Chain]:
    """Return the channel stages and the codec after them; ``ConfigError`` if the stages do not fit together."""
    channel_stages = [stage for stage in stages if isinstance(stage, ChannelStage)]
    rest = stages[len(channel_stages) :]
    for stage in rest:
        if isinstance(stage, ChannelStage):
            raise ConfigError(f"{stage.name!r} keeps memory around a codec: write it first, in {spec!r}")
    if len({stage.name for stage in channel_stages}) < len(channel_stages):
        raise ConfigError(f"{channel_stages[0].name!r} occurs twice in {spec!r}")
    if not rest:
        raise ConfigError(f"{spec!r} has no codec after {channel_stages[-1].name!r}: add one, such as 'topk:0.01'")
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
            _check_coder(values, stage, spec)
            coder = stage
        else:
            raise ConfigError(f"stage {stage.name!r} of kind {stage.kind!r} cannot be part of {spec!r}")
    if selector is not None and values is not None and values.needs_shape:
        raise ConfigError(f"{values.name!r} needs a whole matrix and cannot follow {selector.name!r} in {spec!r}")
    if channel_stages and selector is not None:
        selector = selector.without_gain()
    return channel_stages, Chain(selector, values, coder)


def _check_coder(values: ValueStage | None, coder: Coder, spec: str) -> None:
    if not isinstance(values, Quantizer):
        raise ConfigError(
            f"{coder.name!r} codes the symbols of a quantizer, such as 'qsgd:4': put one before it in {spec!r}"
        )
    if values.max_alphabet > coder.max_alphabet:
        raise ConfigError(
            f"{coder.name!r} codes at most {coder.max_alphabet} symbols, {values.name!r} has more in {spec!r}"
        )


def _saturate(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp values to the range of a narrower dtype: a quantizer's level may exceed the largest input value."""
    if dtype not in (torch.float16, torch.bfloat16) or values.dtype == dtype:
        return values
    largest = torch.finfo(dtype).max
    beyond = int((values.abs() > largest).sum())
    if beyond:
        name = str(dtype).removeprefix("torch.")
        counters.count("saturated", beyond, f"decoded values beyond the range of {name} saturate")
    return values.clamp(-largest, largest)


@dataclass(frozen=True)
class Chain:
    """selector | value stage | coder.

    Each may be missing: without a selector all values are sent, without a value stage they are sent raw, without a
    coder symbols are packed.

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
        return grammar.format_stages(self.stages)

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
        """Return the value stage for a tensor; the values that a selector keeps have no shape."""
        return self._value_stage if self.selector is not None else self._value_stage.for_shape(spec.shape)

    @property
    def biased(self) -> bool:
        """Whether the mean over seeds differs from the input."""
        return any(stage.is_biased for stage in self.stages)

    @property
    def randomized(self) -> bool:
        """Whether the bytes depend on the seed."""
        return any(stage.randomized for stage in self.stages)

    @property
    def summable(self) -> bool:
        """Whether packets can be added without decoding (``laconic.summing``)."""
        return bool(self.stages) and all(stage.summable for stage in self.stages)

    @property
    def contractive(self) -> bool:
        """Whether the error of one encoding is smaller than its input, which error feedback needs."""
        return all(stage.contractive for stage in self.stages)

    @property
    def has_fixed_size(self) -> bool:
        """Whether the length of a frame follows from the number of values, unless all values are equal."""
        return self.selector is None and self.coder is None and self._value_stage.fixed_size

    @property
    def keeps_dtype(self) -> bool:
        """Whether values are sent in the dtype of the tensor, and not as float32 or less."""
        return self._value_stage.lossless

    @cached_property
    def host_only(self) -> bool:
        """Whether packets must be decoded on the host, because the coder has no kernels for devices."""
        return self.coder is not None and self.coder.host_only

    @cached_property
    def num_sections(self) -> int:
        """The sections of every packet that is not all zero."""
        return (self.selector is not None) + self._value_stage.num_sections

    # ------------------------------------------------------------------------------------------------------- encode

    def encode(
        self, x: Tensor, *, seed: int = 0, arena: Arena | None = None, exact: bool = False,
        gradient: Tensor | None = None,
    ) -> Packet:  # fmt: skip
        """Encode a tensor of any shape, stride and float dtype; ``x`` is not changed.

        Args:
            x: The tensor; float32, float64, float16 or bfloat16.
            seed: Decides all randomness: same input, seed and codec give the same bytes.
            arena: Where the sections are written; new memory by default.
            exact: Let a lossless codec take integers and booleans, too.
            gradient: The gradient of x, from which ``adaptive:by=grad`` computes the number of levels.
        """
        if self.values is not None and self.values.needs_gradient:
            tuned = replace(self, values=self.values.with_gradient(gradient))
            packet = tuned._encode(x, seed, arena, exact)
            return Packet(self.text, packet.spec, packet.sections)
        if gradient is not None:
            raise InputError(f"codec {self.text!r} takes no gradient: only adaptive:by=grad does")
        return self._encode(x, seed, arena, exact)

    def _encode(self, x: Tensor, seed: int, arena: Arena | None, exact: bool) -> Packet:
        spec = TensorSpec.of(x)
        unchanged = exact and self._value_stage.lossless and self.selector is None and spec.dtype in EXACT
        if spec.dtype not in FLOATS and not unchanged:
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
        """Encode residual + x in one pass and leave the error in the residual.

        Return None, with nothing changed, if no kernel does this in one pass: the caller then adds, encodes and
        subtracts. Both tensors are contiguous float32 of one shape. If the sum is not finite, the residual is
        undefined afterwards.
        """
        backend = kernels.backend_for(residual)
        if self.selector is not None or self.coder is not None or self.values is None:
            return None
        if backend is kernels.cpu:  # whose cache holds what the next pass reads
            return None
        sections = self.values.encode_feedback(x.view(-1), residual.view(-1), backend, HeapArena(x.device), seed)
        return None if sections is None else Packet(self.text, TensorSpec.of(residual), sections)

    def _sections(self, flat: Tensor, spec: TensorSpec, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        backend, stage = kernels.backend_for(flat), self._stage_for(spec)
        if self.selector is None:
            return self._encode_values(flat, stage, backend, arena, seed)
        selected = self.selector.for_shape(spec.shape).select(flat, backend, arena, seed)
        require_finite(selected.amax_bits, spec.numel)
        if selected.amax_bits == 0:
            return ()
        if stage.copies_values and backend is not kernels.cpu:
            # The values are known to be finite, so a copy saves a launch and a wait. On a CPU the core copies: its
            # threads survive a fork.
            copied = arena.take(selected.values.numel() * selected.values.element_size())
            return selected.section, copied.copy_(selected.values.view(torch.uint8))
        # On a CPU an encoder finds the largest magnitude while it reads; a GPU's would have to be waited for once more.
        known = backend is not kernels.cpu and self.selector.keeps_largest and selected.values.dtype == torch.float32
        with amax_is(selected.amax_bits) if known else nullcontext():
            encoded = self._encode_values(selected.values, stage, backend, arena, seed)
        return (selected.section, *encoded) if encoded else ()

    def _encode_values(
        self, values: Tensor, stage: ValueStage, backend: kernels.Kernels, arena: Arena, seed: int
    ) -> tuple[Tensor, ...]:
        if not stage.lossless and values.dtype != torch.float32:
            values = values.to(torch.float32)
        return stage.encode(values, backend, arena, seed)

    # ------------------------------------------------------------------------------------------------------- decode

    def decode(self, packet: Packet, *, out: Tensor | None = None) -> Tensor:
        """Decode a packet, into ``out`` if given (same shape; its dtype is converted to)."""
        spec = packet.spec
        _check_shape(out, spec)
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
                out.copy_(_saturate(flat, out.dtype).view(spec.shape))
        return out

    def accumulate(self, packet: Packet, out: Tensor, weight: float = 1.0) -> None:
        """Add ``weight`` times the decoded tensor to ``out``, contiguous float32, without a temporary tensor."""
        _check_shape(out, packet.spec)
        if out.dtype != torch.float32 or not out.is_contiguous():
            raise InputError(f"accumulation needs a contiguous float32 tensor, got {out.dtype}, strides {out.stride()}")
        if not abs(weight) <= torch.finfo(torch.float32).max:
            raise InputError(f"a weight must be finite in float32, got {weight}")
        k = self.check(packet)
        if packet.sections:
            self._fill(packet, k, out.view(-1), weight)

    def check(self, packet: Packet) -> int:
        """Check the sections' sizes before anything is allocated; return how many values the packet holds.

        Reading a section on a device waits for it. So if a selector always keeps the same number of values and the
        sizes agree with it, that number is assumed until the section is read.
        """
        sizes = tuple([section.numel() for section in packet.sections])
        if not sizes:
            return 0
        if len(sizes) != self.num_sections:
            raise FrameError(f"codec {self.text!r} has {self.num_sections} sections, the frame {len(sizes)}")
        n = packet.spec.numel
        if self.selector is None:
            self._check_sizes(packet, n, sizes)
            return n
        k = None if kernels.backend_for(packet.sections[0]) is kernels.cpu else self.selector.fixed_count(n)
        if k and self._stage_for(packet.spec).accepts(sizes[1:], k, packet.spec.dtype.itemsize):
            return k
        return self._count(packet)

    def _count(self, packet: Packet) -> int:
        """Return how many values the selector's section places, checked against the other sections."""
        assert self.selector is not None
        n = packet.spec.numel
        k = self.selector.count(packet.sections[0], n)
        if k > self.selector.max_kept(n):
            raise FrameError(f"{k} of {n} values are more than codec {self.text!r} keeps")
        self._check_sizes(packet, k, tuple([section.numel() for section in packet.sections[1:]]))
        return k

    def _check_sizes(self, packet: Packet, k: int, sizes: tuple[int, ...]) -> None:
        stage, itemsize = self._stage_for(packet.spec), packet.spec.dtype.itemsize
        if packet.spec.numel == 0 or not stage.accepts(sizes, k, itemsize):
            expected = stage.section_nbytes(k, itemsize)
            raise FrameError(f"codec {self.text!r} codes {k} values in {expected} bytes, the frame has {sizes}")

    def _fill(self, packet: Packet, k: int, out: Tensor, weight: float | None) -> None:
        with oom_as_frame_error(packet.spec.numel):
            if self.selector is None:
                stage, backend = self._stage_for(packet.spec), kernels.backend_for(packet.sections[0])
                stage.decode(packet.sections, packet.spec.dtype, backend, out, weight)
                return
            try:
                scattered = self._scatter(packet, k, out, weight)
            except FrameError:  # off the CPU k is assumed, see check(): the section may place another number
                if self._count(packet) == k:
                    raise
                scattered = False
            if not scattered:
                scattered = self._scatter(packet, self._count(packet), out, weight)
                assert scattered

    def _scatter(self, packet: Packet, k: int, out: Tensor, weight: float | None) -> bool:
        """Write k decoded values to their positions; False if the section places another number."""
        assert self.selector is not None
        (section, *encoded), dtype, stage = packet.sections, packet.spec.dtype, self._value_stage
        backend = kernels.backend_for(section)
        if stage.copies_values:
            raw = encoded[0]
            values = (raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()).view(dtype)
        else:
            values = torch.empty(k, dtype=dtype if stage.lossless else torch.float32, device=section.device)
            stage.decode(tuple(encoded), dtype, backend, values, None)
        return self.selector.scatter(section, values, backend, out, weight)

    def positions(self, packet: Packet) -> Tensor | None:
        """Return the ascending positions of a packet's values; None if it holds all of them."""
        if self.selector is None or not packet.sections:
            return None
        section = packet.sections[0]
        return self.selector.positions(section, packet.spec.numel, kernels.backend_for(section))

    def num_kept(self, packet: Packet) -> int:
        """Return how many values a packet holds; 0 if it is all zero."""
        n = packet.spec.numel
        if not packet.sections:
            return 0
        return n if self.selector is None else self.selector.count(packet.sections[0], n)

    # -------------------------------------------------------------------------------------------------------- sizes

    def max_section_nbytes(self, spec: TensorSpec) -> tuple[int, ...]:
        """Return the most bytes that each section of this codec can take for such a tensor."""
        n = spec.numel
        if n == 0:
            return ()
        if self.selector is None:
            return self._stage_for(spec).section_nbytes(n, spec.dtype.itemsize)
        encoded = self._value_stage.section_nbytes(self.selector.max_kept(n), spec.dtype.itemsize)
        return (self.selector.max_section_nbytes(n), *encoded)


def _check_shape(out: Tensor | None, spec: TensorSpec) -> None:
    if out is not None and out.shape != spec.shape:
        raise FrameError(f"expected a tensor of shape {list(out.shape)}, the frame holds {list(spec.shape)}")
