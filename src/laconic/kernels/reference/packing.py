"""Vertical bit packing, five ternary values per byte, and plain bits."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.kernels import random
from laconic.kernels.sections import GROUP, TRIT_GROUP_NBYTES


def bits_to_bytes(bits: Tensor) -> Tensor:
    """Pack 0/1 values into bytes, least significant bit first."""
    padded = torch.zeros(-(-bits.numel() // 8) * 8, dtype=torch.int32, device=bits.device)
    padded[: bits.numel()] = bits
    weights = 1 << torch.arange(8, dtype=torch.int32, device=bits.device)
    return (padded.view(-1, 8) * weights).sum(1).to(torch.uint8)


def bytes_to_bits(section: Tensor) -> Tensor:
    return (section.to(torch.int32).unsqueeze(1) >> torch.arange(8, dtype=torch.int32, device=section.device)).view(
        -1
    ) & 1


def pack(symbols: Tensor, bits: int, out: Tensor) -> None:
    """Pack groups of 256 symbols vertically, and the rest as one plain bit stream.

    A group is 32 rows of 8 lanes. Each lane is a bit stream of its 32 symbols, least significant bit first; word m of
    lane i is the group's 32-bit word 8 m + i.
    """
    n = symbols.numel()
    if bits == 0 or n == 0:
        return
    symbols = symbols.to(torch.int64)
    groups = n // GROUP
    if groups:
        rows = symbols[: groups * GROUP].view(groups, 32, 8)
        words = torch.zeros(groups, bits + 1, 8, dtype=torch.int64, device=symbols.device)
        for row in range(32):
            word, shift = divmod(row * bits, 32)
            words[:, word] |= (rows[:, row] << shift) & random.M32
            if shift + bits > 32:
                words[:, word + 1] |= rows[:, row] >> (32 - shift)
        signed = (words[:, :bits] ^ 0x80000000) - 0x80000000
        out[: groups * 32 * bits] = signed.to(torch.int32).contiguous().view(-1).view(torch.uint8)
    tail = symbols[groups * GROUP :]
    if tail.numel():
        stream = (tail.unsqueeze(1) >> torch.arange(bits, device=tail.device)) & 1
        out[groups * 32 * bits :] = bits_to_bytes(stream.view(-1))


def unpack(packed: Tensor, n: int, bits: int) -> Tensor:
    out = torch.zeros(n, dtype=torch.int64, device=packed.device)
    if bits == 0 or n == 0:
        return out.to(torch.int32)
    groups = n // GROUP
    mask = (1 << bits) - 1
    if groups:
        words = (
            packed[: groups * 32 * bits].clone().view(torch.int32).view(groups, bits, 8).to(torch.int64) & random.M32
        )
        rows = out[: groups * GROUP].view(groups, 32, 8)
        for row in range(32):
            word, shift = divmod(row * bits, 32)
            value = words[:, word] >> shift
            if shift + bits > 32:
                value = value | (words[:, word + 1] << (32 - shift))
            rows[:, row] = value & mask
    tail = n - groups * GROUP
    if tail:
        stream = bytes_to_bits(packed[groups * 32 * bits :])[: tail * bits].view(tail, bits).to(torch.int64)
        out[groups * GROUP :] = (stream << torch.arange(bits, device=packed.device)).sum(1)
    return out.to(torch.int32)


def pack_trits(symbols: Tensor, out: Tensor) -> None:
    """Pack five values of 0, 1, 2 per byte: i, 64 + i, … 256 + i of a full group of 320, neighbours in the tail."""
    n, span = symbols.numel(), 5 * TRIT_GROUP_NBYTES
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.int64, device=symbols.device)
    full = n // span * span
    grouped = symbols[:full].to(torch.int64).view(-1, 5, TRIT_GROUP_NBYTES)
    head = (grouped * powers.view(1, 5, 1)).sum(1).view(-1)
    rest = torch.zeros(-(-(n - full) // 5) * 5, dtype=torch.int64, device=symbols.device)
    rest[: n - full] = symbols[full:]
    out[:] = torch.cat([head, (rest.view(-1, 5) * powers).sum(1)]).to(torch.uint8)


def unpack_trits(packed: Tensor, n: int) -> Tensor:
    span = 5 * TRIT_GROUP_NBYTES
    full = n // span * span
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.int64, device=packed.device)
    wide = packed.to(torch.int64)
    head = (wide[: full // 5].view(-1, 1, TRIT_GROUP_NBYTES) // powers.view(1, 5, 1) % 3).view(-1)
    tail = (wide[full // 5 :].unsqueeze(1) // powers % 3).view(-1)[: n - full]
    return torch.cat([head, tail])
