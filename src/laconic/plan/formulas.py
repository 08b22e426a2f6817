"""Formulas of the planner, as functions of plain numbers and lists.

Every formula stands here once: ``bound``, ``paper``, ``costs`` and ``recommend`` call these functions, and
``laconic.report.javascript`` translates this file for the sliders of the report. So they keep to the part of Python
that the translator knows: arithmetic, comparisons, ``if``, ``for`` over ``zip`` or ``enumerate``, lists, ``min``,
``max``, ``len`` and calls of each other. Units are bytes, seconds, and bytes per second.
"""

from __future__ import annotations

import math


def ideal_s(workers: float, step_s: float, every: float) -> float:
    """Return i C / M: seconds between two exchanges if the network took no time."""
    return every * step_s / workers


def transfer_s(workers: float, nbytes: float, bandwidth: float) -> float:
    """Return M W / BW: seconds in which the dense models of all workers pass the shared link, one way."""
    return workers * nbytes / bandwidth


def slope(workers: float, nbytes: float, step_s: float, bandwidth: float, every: float) -> float:
    """Return k: the time of a dense exchange over the ideal time."""
    return workers**2 * nbytes / (every * step_s * bandwidth)


def r_min(k: float, rho: float, h: float) -> float:
    """Return the time of an update over the ideal time."""
    return h + k * rho


def over_one_node(k: float, workers: float, rho: float, h: float) -> float:
    """Return how many times as fast as one node with the dense model an update is."""
    return workers / r_min(k, rho, h)


def over_vanilla(k: float, rho: float, h: float) -> float:
    """Return how many times as fast as the same workers with the dense model an update is."""
    return r_min(k, 1.0, 1.0) / r_min(k, rho, h)


def limit_of_h(k: float, rho: float) -> float:
    """Return the h below which a compressed update is faster than a dense one."""
    return 1 + k * (1 - rho)


def homomorphic_update(compute_s: float, dense_transfer_s: float, rho: float, h: float) -> list[float]:
    """Return the seconds of computation and transfer if the model is compressed once and never decompressed."""
    return [h * compute_s, rho * dense_transfer_s]


def naive_update(
    compute_s: float, dense_transfer_s: float, rho: float, compress_s: float, decompress_s: float, at_server: float
) -> list[float]:
    """Return the seconds of computation, transfer, compression and decompression at every update."""
    return [compute_s, rho * dense_transfer_s, 2 * compress_s, (1 + at_server) * decompress_s]


def total_s(parts: list[float]) -> float:
    """Return the seconds of an update."""
    return sum(parts)


def training_s(update_s: float, iterations: float, every: float) -> float:
    """Return the seconds of a training of so many iterations."""
    return update_s * iterations / every


def crossover(nbytes: float, step_s: float, bandwidth: float, every: float) -> float:
    """Return the number of workers at which transfer and computation take as long: sqrt(i C BW / W)."""
    return math.sqrt(every * step_s * bandwidth / nbytes)


def served(times: list[float], shares: list[float], seconds: float) -> list[float]:
    """Return when each piece has left a stage that takes ``seconds`` for all pieces, one after the other.

    >>> served([0.0, 1.0, 4.0], [0.5, 0.25, 0.25], 4.0)
    [2.0, 3.0, 5.0]
    """
    return exchanged(times, shares, 0.0, seconds, 0.0, 0.0)


def exchanged(
    times: list[float], shares: list[float], out_s: float, back_s: float, each_s: float, wait_s: float
) -> list[float]:
    """Return when each piece has been exchanged between ranks, one after the other.

    Args:
        out_s: Seconds in which the first half of the exchange of all pieces passes a link.
        back_s: Seconds of the second half.
        each_s: Seconds of any piece that do not depend on its size.
        wait_s: Seconds of the round trips of a piece. They pass while its first half is sent, or the reverse.

    >>> exchanged([0.0, 1.0, 4.0], [0.5, 0.25, 0.25], 2.0, 2.0, 0.5, 0.75)
    [2.5, 4.25, 6.0]
    """
    ends: list[float] = []
    free = 0.0
    for time, share in zip(times, shares, strict=True):
        free = max(free, time) + each_s + max(share * out_s, wait_s) + share * back_s
        ends.append(free)
    return ends


def computed_s(step_s: float, every: float, spare_core: bool, encode_s: float) -> float:
    """Return when a worker has computed and encoded everything, from the start of the last iteration."""
    return step_s if spare_core and every == 1 else step_s + encode_s


def encoded_times(
    ready: list[float], shares: list[float], step_s: float, every: float, spare_core: bool, encode_s: float
) -> list[float]:
    """Return when each piece of a message is encoded, from the start of the last iteration.

    Args:
        ready: When each piece of the gradient is computed, as a share of the step.
        shares: Size of each piece as a share of the message.
        every: Iterations between two exchanges; above 1, encoding starts when the last iteration has ended.
        spare_core: Whether encoding has a core of its own while the model computes.
    """
    if every > 1:
        return served([step_s for _ in ready], shares, encode_s)
    if spare_core:
        return served([time * step_s for time in ready], shares, encode_s)
    return [time * (step_s + encode_s) for time in ready]


def payload_bytes_s(rate: float, goodput: float) -> float:
    """Return the payload bytes per second of a link of so many bits per second."""
    return rate * goodput / 8


def through_server_s(
    nbytes: float, workers: float, servers: float, worker_rate: float, server_rate: float, byte_s: float
) -> float:
    """Return the seconds in which all workers' messages of this size pass the servers, one way."""
    load = workers * nbytes / servers
    return max(nbytes / worker_rate, load / server_rate, load * byte_s)


def server_exchange_end(
    encoded: list[float], shares: list[float], computed: float, workers: float, push_s: float, add_s: float,
    encode_s: float, step_s: float, pull_s: float, own_s: float, summable: bool,
) -> float:  # fmt: skip
    """Return when the last reply has arrived, from the start of the last iteration.

    Sums of packets are made and returned slot by slot while others still arrive. A mean is made when all messages have
    arrived, then encoded and returned from the first layer on; the last piece waits for the server's optimizer step.
    What is pushed for the next exchange meanwhile is subtracted: see ``next_push_s``.
    """
    arrived = served(encoded, shares, push_s)
    if summable:
        return max(computed, served(served(arrived, shares, add_s), shares, pull_s)[-1])
    begin = max(arrived[-1], computed) + add_s
    back = shares[::-1]
    made = served([begin for _ in back], back, encode_s)
    made[-1] = made[-1] + step_s
    return max(computed, served(made, back, pull_s)[-1] - next_push_s(workers, push_s, pull_s, own_s))


def next_push_s(workers: float, push_s: float, pull_s: float, own_s: float) -> float:
    """Return the seconds of the next pushes that pass the server's link while others still receive their replies.

    Replies that share a link do not end at the same time: a worker that has its own computes and pushes again. The
    share of the replies' time, 6 % for each further worker up to the 18 % of four, was measured with two and four.

    Args:
        own_s: Seconds of ``pull_s`` that a worker's reply alone would take.
    """
    if own_s <= 0:
        return 0.0
    sharing = min(workers, pull_s / own_s)
    return min(0.06 * min(sharing - 1, 3) * pull_s, push_s * (1 - 1 / workers))


def overlapped_end(computed: float, end: float, overlap_s: float) -> float:
    """Return when a worker need no longer wait for an exchange that may go on during ``overlap_s`` of later steps."""
    return max(computed, end - overlap_s)


def iteration_s(step_s: float, every: float, end: float) -> float:
    """Return the seconds of one iteration, of ``every`` of which the last ends with an exchange."""
    return ((every - 1) * step_s + end) / every


def server_iteration_s(
    ready: list[float], shares: list[float], step_s: float, every: float, spare_core: bool, workers: float, rate: float,
    byte_s: float, fixed_s: float, push: float, pull: float, encode_s: float, decode_s: float, add_s: float,
    summable: bool, overlap: float,
) -> float:  # fmt: skip
    """Return the seconds of one iteration with one parameter server, whose link has the same rate as the workers'.

    After local steps an exchange may go on during ``overlap`` of the following ones.
    """
    if workers == 1:
        return step_s
    encoded = encoded_times(ready, shares, step_s, every, spare_core, encode_s)
    computed = computed_s(step_s, every, spare_core, encode_s)
    push_s = through_server_s(push, workers, 1, rate, rate, byte_s)
    pull_s = through_server_s(pull, workers, 1, rate, rate, byte_s)
    end = server_exchange_end(
        encoded, shares, computed, workers, push_s, workers * add_s, encode_s, decode_s, pull_s, pull / rate, summable
    )
    return iteration_s(step_s, every, overlapped_end(computed, end + fixed_s, overlap * step_s) + decode_s)


def speed_up(before_s: float, after_s: float) -> float:
    """Return how many times as fast the shorter time is."""
    return before_s / after_s


def fastest(seconds: list[float], fits: list[bool]) -> int:
    """Return the position of the shortest time among codecs that fit into memory, -1 if none does."""
    best = -1
    for place, time in enumerate(seconds):
        if fits[place] and (best < 0 or time < seconds[best]):
            best = place
    return best


def worth_its_loss(plain_s: float, compressed_s: float) -> bool:
    """Return whether a measured codec saves enough to be advised: at least 5 % over float32."""
    return plain_s >= 1.05 * compressed_s


def exceeds_error(plain_s: float, compressed_s: float, error: float) -> bool:
    """Return whether a codec saves more than the relative error of such predictions, and at least 5 %."""
    return plain_s >= (1 + max(0.05, error)) * compressed_s


def fewest_workers(numels: list[float], counts: list[float], numel: float, workers: float) -> float:
    """Return the smallest number of workers, but at least ``workers``, with which a model was trained; 0 if with none.

    >>> fewest_workers([1e6, 1e6, 1e6, 2e6], [2.0, 4.0, 8.0, 3.0], 1e6, 3.0)
    4.0
    """
    fewest = 0.0
    for place, count in enumerate(counts):
        if numels[place] == numel and count >= workers and (fewest == 0 or count < fewest):
            fewest = count
    return fewest


def worst_training(
    given_up: list[float], numels: list[float], counts: list[float], local: bool, numel: float, workers: float
) -> int:
    """Return the position of the training that gave up most among those that count, -1 if none does.

    Args:
        given_up: What each training gave up.
        numels: Parameters of its model, which count for models of at most 32 times as many.
        counts: Its workers. If steps were local, it counts for at most as many, and not where a training of such a
            model by fewer counts.
        local: Whether steps were local.
        numel: Parameters of the model in question.
        workers: Workers in question.
    """
    worst = -1
    for place, lost in enumerate(given_up):
        closest = not local or counts[place] == fewest_workers(numels, counts, numels[place], workers)
        counted = 32 * numels[place] >= numel and closest
        if counted and (worst < 0 or lost > given_up[worst]):
            worst = place
    return worst


def keeps_quality(given_up: float, noise: float, give_up: float) -> bool:
    """Return whether a training gave up no more than allowed, apart from the noise between seeds.

    The noise counts up to 0.25, and 0.05 in any case: no training here resolves such a difference.
    """
    return given_up <= give_up + max(0.05, min(noise, 0.25))
