"""Launches every Triton kernel of laconic on tensors of small and odd sizes, and compares what comes back with the CPU.

It is what `tools/compute_sanitizer.sh` runs under compute-sanitizer, and takes seconds without it. On a CPU, with
TRITON_INTERPRET=1 and ``--device cpu``, the kernels are interpreted, which takes minutes.
"""

from __future__ import annotations

import argparse
import ast
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import laconic
from laconic import kernels
from laconic.collective.exchange import _uses_allreduce
from laconic.collective.reductions.allreduce import Reducer
from laconic.collective.reductions.device_codings import coding_of
from laconic.collective.reductions.two_shot import TwoShot
from laconic.kernels import cpu
from laconic.kernels.interface import NONFINITE
from laconic.kernels.sections import (
    GROUP,
    Coding,
    PackedIntCoding,
    coded_max_nbytes,
    num_buckets,
    packed_int_count,
    packed_nbytes,
    symbol_bits,
    symbol_dtype,
    trits_nbytes,
)
from laconic.residual_storage import ResidualStorage

SPECS = (
    "none", "fp16", "bf16", "qsgd:4", "qsgd:3,norm=l2", "qsgd:8,round=nearest", "qsgd:2,bucket=128",
    "qsgd:12,bucket=4096", "qsgd:6,bucket=0,norm=l2", "terngrad", "terngrad:128", "sign", "sign:128", "onebit:256",
    "bins:2", "bins:3,bucket=128", "uniform:8", "uniform:5", "uniform:30", "adaptive:5.0", "adaptive:3.0,tail=0.01",
    "adaptive:5.0,zero=true", "shared:8", "shared:5,round=stochastic", "thc:4", "thc:1,round=stochastic",
    "powersgd:2", "topk:0.01", "topk:0.3", "topk:0.05,approx=true", "topk:0.03,chunk=128",
    "topk:0.05,chunk=64,code=rank", "threshold:0.5", "randk:0.1", "randk:0.5|thc:7", "union", "topk:0.01|qsgd:4",
    "topk:0.25|uniform:6", "threshold:1.0|fp16",
)  # fmt: skip
CODED = (
    "topk:0.1,code=rans|sign", "uniform:8|huffman:auto", "adaptive:5.0|rans", "terngrad|rans",
    "topk:0.1|adaptive:5.0,zero=true|huffman",
)  # fmt: skip
SIZES = (1, 4999, 8192)
"""Triton compiles other code for 1 and for multiples of 16."""
PHASED = ("topk:0.01", "topk:0.3", "randk:0.1", "uniform:8", "adaptive:5.0", "threshold:0.5")
"""Codecs whose kernels run in phases: as one cooperative launch, or for large tensors as a launch per phase."""

ALPHABETS = (2, 92, 300, 4096)
SHARDS = (
    "qsgd:4",
    "qsgd:8,bucket=128",
    "sign",
    "onebit",
    "bins:2",
    "fp16",
    "bf16",
    "topk:0.1",
    "topk:0.1|qsgd:4",
    "topk:0.2|fp16",
)
EXCHANGES = (
    "ef|qsgd:4",
    "ef:0.9|topk:0.05|sign",
    "ef|thc:4",
    "ef|shared:3",
    "shared:8,round=stochastic",
    "ef|powersgd:2",
    "ef|bf16",
)
SHAPES = {"a": (20, 70), "b": (300,), "c": (1,), "d": (64, 64), "e": (1111, 9)}
SEED = 3

Case = tuple[str, Callable[[torch.device], None]]


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def same(found: Tensor, expected: Tensor, what: str) -> None:
    """Compare bits; unlike ``torch.equal``, +0 and -0 differ."""
    bits = [
        x.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
        for x in (found, expected)
    ]
    if not torch.equal(*bits):
        raise SystemExit(f"{what}: the kernel's bits are not those of the CPU")


def codec_case(spec: str, shape: tuple[int, ...], device: torch.device) -> None:
    """Encode, decode and accumulate a tensor."""
    codec, x = laconic.codec(spec), values(*shape)
    n, expected = x.numel(), codec.encode(x, seed=SEED)
    decoded, total = codec.decode(expected), torch.ones(shape)
    codec.accumulate(expected, total, -0.3)
    with kernels.use_backend("triton"):
        packet = codec.encode(x.to(device), seed=SEED)
        for section, other in zip(packet.sections, expected.sections, strict=True):
            same(section, other, f"{spec}, {n} values, encoded")
        same(codec.decode(packet), decoded, f"{spec}, {n} values, decoded")
        found = torch.ones(shape, device=device)
        codec.accumulate(packet, found, -0.3)
        same(found, total, f"{spec}, {n} values, accumulated")


def phases_case(spec: str, device: torch.device) -> None:
    """Run each phase as a launch of its own, as for large tensors."""
    from laconic.kernels.triton import grid_sync, launch_cache

    count = grid_sync._multiprocessors
    grid_sync._multiprocessors = lambda device: 0
    launch_cache.launches_for.cache_clear()
    try:
        codec_case(spec, (4999,), device)
    finally:
        grid_sync._multiprocessors = count
        launch_cache.launches_for.cache_clear()


def coder_case(coding: Coding, alphabet: int, n: int, device: torch.device, *, even: bool = False) -> None:
    """Code symbols, decode them, and decode them to values of a table.

    Args:
        even: All symbols are as frequent, so that chunks are not worth coding; else most symbols are small.
    """
    from laconic.kernels.triton import backend

    drawn = values(n).mul_(1e4).remainder_(alphabet) if even else values(n).abs() * alphabet / 5
    symbols = drawn.clamp(0, alphabet - 1).to(symbol_dtype(alphabet))
    expected = torch.zeros(coded_max_nbytes(n, alphabet), dtype=torch.uint8)
    nbytes = cpu.encode_symbols(symbols, alphabet, coding, expected)
    section = torch.zeros(coded_max_nbytes(n, alphabet), dtype=torch.uint8, device=device)
    what = f"{coding.name}, {n} symbols of {alphabet}"
    if backend.encode_symbols(symbols.to(device), alphabet, coding, section) != nbytes:
        raise SystemExit(f"{what}: another size than the CPU's")
    section = section[:nbytes].clone()
    same(section, expected[:nbytes], what)
    same(backend.decode_symbols(section, n, alphabet), symbols, what)
    for weight in (None, 0.5):
        table, out, on_device = values(alphabet), torch.ones(n), torch.ones(n, device=device)
        cpu.decode_values(expected[:nbytes], table, out, weight)
        backend.decode_values(section, table.to(device), on_device, weight)
        same(on_device, out, what)


def shards_case(spec: str, device: torch.device) -> None:
    """Encode and decode shards together, with and without residuals; one of them is to be skipped."""
    from laconic.kernels.triton import backend

    coding = coding_of(laconic.codec(spec))
    assert coding is not None
    sizes = [numel for shape in SHAPES.values() if (numel := torch.Size(shape).numel())]
    keys = torch.zeros(len(sizes), 2, dtype=torch.int32, device=device)
    rounds, inner = torch.zeros(2, len(sizes), dtype=torch.int64, device=device)
    backend.next_round_keys(rounds, inner, keys)
    for with_residuals in (False, True):
        tensors = [values(n).to(device) for n in sizes]
        tensors[1][7] = float("inf")
        residuals = [values(n, seed=1).to(device) for n in sizes] if with_residuals else None
        # Sections with an allocation each, so that a byte written outside of one is found.
        sections = [
            [
                torch.zeros(-(-nbytes // 16) * 16, dtype=torch.uint8, device=device)
                for nbytes in coding.section_nbytes(n)
            ]
            for n in sizes
        ]
        addresses = [[section.data_ptr() for section in part] for part in zip(*sections, strict=True)]
        counts = torch.zeros(5, dtype=torch.int32, device=device)
        skip = backend.amax_bits_all(tensors)
        if residuals is not None:
            backend.scale_all(residuals, 0.9, skip)
        sums = [x if residuals is None else residuals[i] + x for i, x in enumerate(tensors)]
        bits = coding.encode(tensors, residuals, backend, keys, addresses, skip, counts)
        outs = [torch.zeros(n, device=device) for n in sizes]
        unusable = torch.maximum(bits, skip)
        if int(coding.decode(addresses, backend, outs, None, unusable)):
            raise SystemExit(f"{spec}: a section that was just encoded is invalid")
        halves = [torch.zeros(n, device=device) for n in sizes]
        coding.decode(addresses, backend, halves, 0.5, unusable)
        for i, (out, half) in enumerate(zip(outs, halves, strict=True)):
            same(half, 0.5 * out, f"{spec}, added")
            if residuals is not None and int(unusable[i]) < NONFINITE:
                torch.testing.assert_close(residuals[i] + out, sums[i], msg=f"{spec}: residual {i}")
        backend.copy_all(outs, halves, skip)
        backend.add_all(outs, halves)
        backend.fill_all(halves, skip, float("nan"))
        backend.amax_bits_all(outs, only=skip)


def exchange_case(spec: str, storage: ResidualStorage, device: torch.device) -> None:
    """Exchange tensors in a group of one rank, on the device and by the host: two rounds with a residual."""
    by_sums = _uses_allreduce(spec)

    def means(device: torch.device, on_device: bool) -> list[Tensor]:
        reduction = (
            Reducer(spec, nonfinite="spread", storage=storage)
            if by_sums
            else TwoShot(spec, on_device=on_device, storage=storage)
        )
        found = []
        for step in range(2):
            tensors = [(name, values(*shape, seed=step).to(device)) for name, shape in SHAPES.items()]
            reduction.reduce_all(tensors)
            found += [x.cpu() for _, x in tensors]
        reduction.settle()
        return found

    with kernels.use_backend("triton"):
        on_device = means(device, True)
    if "stochastic" in spec:
        return  # rounding seeds depend on what is reduced together
    for found, expected in zip(on_device, means(torch.device("cpu"), False), strict=True):
        same(found, expected, f"{spec}, exchanged")


def other_case(device: torch.device) -> None:
    """What no codec above launches."""
    from laconic.kernels.triton import backend, rotation

    for n in SIZES:
        velocity, residual, x = (values(n, seed=i) for i in range(3))
        on_device = [y.to(device) for y in (velocity, residual, x)]
        cpu.add_momentum(x, 0.9, velocity, residual)
        backend.add_momentum(on_device[2], 0.9, on_device[0], on_device[1])
        same(on_device[1], residual, "momentum")
        short = [torch.empty(n, dtype=torch.bfloat16, device=where) for where in ("cpu", device)]
        cpu.stochastic_bf16(x, SEED, short[0])
        backend.stochastic_bf16(x.to(device), SEED, short[1])
        same(short[1], short[0], f"{n} values, rounded stochastically")
        if not backend.all_finite(on_device[2]):
            raise SystemExit("finite values are said not to be finite")
        for width, lane in ((4, 8), (3, 16)):
            packed = torch.full((packed_nbytes(n, width),), 0x11, dtype=torch.uint8)
            both = []
            for kernel, integers in ((cpu, packed), (backend, packed.to(device))):
                total = torch.zeros(num_buckets(n, GROUP) * 32 * lane, dtype=torch.uint8, device=integers.device)
                kernel.packed_int_accumulate(integers, n, width, lane, total)
                again = torch.zeros_like(integers)
                kernel.packed_int_repack(total, n, lane, width, again)
                largest = kernel.packed_int_max(integers, n, PackedIntCoding((1 << width) - 1, width, True))
                both.append((total, again, torch.tensor(largest)))
            for expected, found in zip(*both, strict=True):
                same(found, expected, f"sums of {n} integers")
        for alphabet, trits in ((3, True), (5, False), (300, False)):
            symbols = (values(n).abs() * 2).clamp(0, 2).to(symbol_dtype(alphabet))
            nbytes = trits_nbytes(n) if trits else packed_nbytes(n, symbol_bits(alphabet))
            packed = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            backend.pack_symbols(symbols.to(device), alphabet, trits, packed)
            same(backend.unpack_symbols(packed, n, alphabet, trits), symbols, f"{n} symbols of {alphabet}")
        rotated = [torch.empty(packed_int_count(n, True), device=where) for where in ("cpu", device)]
        cpu.rotate(x, SEED, None, rotated[0])
        backend.rotate(x.to(device), SEED, None, rotated[1])
        same(rotated[1], rotated[0], f"{n} values, rotated")
        out, at = torch.ones(2 * n, device=device), 2 * torch.arange(n, dtype=torch.int32, device=device)
        backend.scatter(at, x.to(device), out, None)
        same(out[::2], x, f"{n} values, scattered")
    rows = values(37, 1024).to(device)
    torch.testing.assert_close(rotation.hadamard(rotation.hadamard(rows)) / 1024, rows)


def cases(device: torch.device) -> Iterator[Case]:
    for spec in SPECS:
        for n in SIZES:
            yield f"{spec}, {n} values", partial(codec_case, spec, (n,))
    yield "powersgd:2, 40 x 31", partial(codec_case, "powersgd:2", (40, 31))
    yield "topk:0.01,approx=true, by a sample", partial(codec_case, "topk:0.01,approx=true", (70_001,))
    for spec in PHASED:
        yield f"{spec}, in phases", partial(phases_case, spec)
    on_gpu = device.type == "cuda"  # the interpreter decodes coded symbols one by one
    for n in (1, 5003, 70_000) if on_gpu else (1, 60):
        for spec in CODED:
            yield f"{spec}, {n} values", partial(codec_case, spec, (n,))
        for coding in (Coding.HUFFMAN, Coding.RANS, Coding.RANS_AUTO):
            for alphabet in ALPHABETS if on_gpu else (92,):
                yield f"{coding.name}, {n} of {alphabet}", partial(coder_case, coding, alphabet, n)
        yield f"RANS_AUTO, {n} of 256, all as frequent", partial(coder_case, Coding.RANS_AUTO, 256, n, even=True)
    if on_gpu:
        yield "HUFFMAN, two chunks", partial(coder_case, Coding.HUFFMAN, 92, (1 << 19) + 100)
        yield "RANS, two chunks", partial(coder_case, Coding.RANS, 92, (1 << 19) + 100)
    for spec in SHARDS:
        yield f"{spec}, shards", partial(shards_case, spec)
    for spec in EXCHANGES:
        yield f"{spec}, exchanged", partial(exchange_case, spec, ResidualStorage())
    for spec in EXCHANGES[:3]:
        for dtype in (torch.float32, torch.bfloat16):
            storage = ResidualStorage(dtype, torch.device("cpu"))
            yield f"{spec}, residuals {dtype} on the host, exchanged", partial(exchange_case, spec, storage)
    yield "others", other_case


# ---------------------------------------------------------------------------------------- which kernels were launched


def record_launches(launched: set[str]) -> None:
    """Note the kernels that are launched from now on, as ``module.name``; repeated launches do not pass here."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for kind in (JITFunction, InterpretedFunction):
        run = kind.run

        def recorded(self: Any, *args: Any, run: Any = run, **kwargs: Any) -> Any:
            for each in (self, *args, *kwargs.values()):  # a kernel may be given the function that encodes its part
                if isinstance(each, JITFunction | InterpretedFunction):
                    launched.add(f"{each.fn.__module__.rpartition('.')[2]}.{each.fn.__name__}")
            return run(self, *args, **kwargs)

        kind.run = recorded


def all_kernels() -> set[str]:
    """Return the functions of laconic/kernels/triton that no other kernel calls, as ``module.name``."""
    functions: dict[str, ast.FunctionDef] = {}
    names: dict[str, dict[str, str]] = {}
    for path in sorted((Path(laconic.__file__).parent / "kernels" / "triton").glob("*.py")):
        module = names.setdefault(path.stem, {})
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module and "kernels.triton" in node.module:
                source = node.module.partition("kernels.triton")[2].removeprefix(".")
                for each in node.names:
                    module[each.asname or each.name] = f"{source}.{each.name}" if source else each.name
            elif isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                functions[f"{path.stem}.{node.name}"] = node
                module[node.name] = f"{path.stem}.{node.name}"
    called = set()
    for name, function in functions.items():
        known = names[name.partition(".")[0]]
        for node in ast.walk(function):
            if isinstance(node, ast.Name):
                called.add(known.get(node.id, ""))
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                called.add(f"{known.get(node.value.id, '')}.{node.attr}")
    return set(functions) - called


def passes(name: str, run: Callable[[torch.device], None], device: torch.device, verbose: bool) -> bool:
    """Run a case; print what is wrong and go on with the next one, because a GPU may be at hand only once."""
    if verbose:
        print(name, flush=True)
    try:
        run(device)
    except (Exception, SystemExit):
        print(f"FAILED {name}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--part", default="0/1", help="which of how many equal parts of the cases to run")
    parser.add_argument("--only", default="", help="run the cases whose name has this text")
    parser.add_argument("--launched", type=Path, help="write the names of the launched kernels to this file")
    parser.add_argument("--check", type=Path, nargs="+", help="compare such files with all kernels, and run nothing")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args(arguments)
    if options.check:
        missing = all_kernels() - {name for path in options.check for name in path.read_text().split()}
        if missing:
            print(f"kernels that no case launches: {', '.join(sorted(missing))}", file=sys.stderr)
        return 1 if missing else 0
    part, parts = map(int, options.part.split("/"))
    launched: set[str] = set()
    record_launches(launched)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device(options.device)
    chosen = [case for case in cases(device) if options.only in case[0]][part::parts]
    failed = [name for name, run in chosen if not passes(name, run, device, options.verbose)]
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.destroy_process_group()
    fallbacks = laconic.counters.counts().get("hosted_kernels", 0) + laconic.counters.counts().get(
        "reference_kernels", 0
    )
    if options.launched:
        options.launched.write_text("\n".join(sorted(launched)) + "\n")
    print(f"{len(chosen)} cases, {len(failed)} failed, {len(launched)} kernels, {fallbacks} calls left to torch")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
