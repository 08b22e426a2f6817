"""Triton's compiler without a GPU: launches become compilations for sm_90, and what they would run can be read.

The interpreter forgives what the compiler does not; this shows the other half. Nothing is launched, so what a kernel
writes stays as it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime import jit

import laconic
import laws
from laconic import kernels

# Compiling for a device that is not here takes what Triton keeps to itself, and may name otherwise tomorrow.
KNOWN = all(hasattr(jit, name) for name in ("JITFunction", "create_function_from_signature")) and hasattr(
    jit.JITFunction, "_pack_args"
)

H100 = GPUTarget("cuda", 90, 32)


@contextmanager
def compiling() -> Iterator[dict[str, str]]:
    """Within, every launch is compiled in place of run; yields the PTX by kernel and by what it was made for."""
    backend, made, before, empty = make_backend(H100), {}, jit.JITFunction.run, torch.empty

    def compile_only(self, *args, grid, warmup, **kwargs):
        kwargs.setdefault("debug", False)
        bind = jit.create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, options = bind(*args, **kwargs)
        name = f"{self.__name__} {specialization} {options}"
        if name not in made:
            options, signature, constants, attributes = self._pack_args(backend, kwargs, bound, specialization, options)
            source = ASTSource(self, signature, constants, attributes)
            made[name] = triton.compile(source, target=H100, options=options.__dict__).asm["ptx"]

    jit.JITFunction.run = compile_only
    torch.empty = torch.zeros  # what nothing writes must not decide what is called next
    try:
        yield made
    finally:
        jit.JITFunction.run, torch.empty = before, empty


def inexact(ptx: str) -> set[str]:
    """Instructions that round otherwise than the reference: fused, approximate, or with subnormals cut off."""
    floats = re.findall(r"\b((?:add|sub|mul|div|fma|mad|sqrt|rcp|cvt|max|min)\.[a-z0-9.]*f(?:32|64)[a-z0-9.]*)", ptx)
    return {each for each in floats if each.startswith(("fma", "mad")) or "ftz" in each or "approx" in each
            or "full" in each}  # fmt: skip


def compile_codec(spec: str, n: int) -> dict[str, str]:
    """What encoding, decoding and adding such a packet launches."""
    x, codec = laws.normal(n), laconic.codec(spec)
    packet = codec.encode(x)
    with kernels.use_backend("triton"), compiling() as made:
        codec.encode(x)
        codec.decode(packet, out=torch.zeros(n))
        codec.accumulate(packet, torch.zeros(n), 0.5)
    return made
