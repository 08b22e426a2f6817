"""Messages between two ranks by codecs: values, order, asynchrony, what is not finite, refused arguments."""

from __future__ import annotations

import pytest
import torch
from operation_values import COMPRESS_ALL, FLOATS, SPECS, relative_error, values

import laconic
from laconic import collective
from laconic.collective import PointToPoint
from ranks import run_ranks, run_threads


def messages(rank, world):
    results = {}
    other = 1 - rank
    for spec, limit in (SPECS | {"none": 0.0, "ef|qsgd:8": 0.02}).items():
        link = PointToPoint(spec, policy=COMPRESS_ALL)
        for step in range(3):
            for dtype in FLOATS:
                sent, got = values(0, 30, 40, dtype=dtype, seed=step), torch.zeros(40, 30, dtype=dtype).t()
                if rank == 0:
                    link.send([("h", sent)], other)
                else:
                    link.recv([("h", got)], other)
                    error = relative_error(got, sent)
                    results[f"message {spec} {step} {dtype}"] = error <= limit + (0.01 if limit else 0)
    # Both ranks send before they receive, as pipelines do, and receive in another order than was sent.
    link = PointToPoint("qsgd:8", policy=COMPRESS_ALL)
    for _ in range(3):
        works = [link.send([(f"mb{i}", values(rank, 5000, seed=i))], other, async_op=True) for i in range(3)]
        received = [torch.empty(5000) for _ in range(3)]
        works += [link.recv([(f"mb{i}", received[i])], other, async_op=True) for i in (2, 0, 1)]
        right = all(work.wait() for work in reversed(works))
        errors = [relative_error(x, values(other, 5000, seed=i)) for i, x in enumerate(received)]
        results["message both ways"] = right and max(errors) < 0.02 and all(work.is_completed() for work in works)
    for mode in ("spread", "skip", "raise"):
        link = PointToPoint("qsgd:4", policy=COMPRESS_ALL, nonfinite=mode)
        x = torch.full((300,), float("inf")) if rank == 0 else torch.ones(300)
        call = link.send if rank == 0 else link.recv
        if mode == "raise":
            with pytest.raises(laconic.NonFiniteError):
                call([("h", x)], other)
        else:
            call([("h", x)], other)
            right = rank == 0 or bool(x.isnan().all() if mode == "spread" else not x.any())
            results[f"message not finite {mode}"] = right and link.stats.skipped_nonfinite == 1
    if rank == 0:
        collective.send(torch.ones(300), other, "qsgd:4")
        collective.send(torch.ones(300), other, "sign")
    else:
        x = torch.empty(300)
        collective.recv(x, other, "qsgd:4")
        results["message function"] = bool(x.eq(1).all())
        with pytest.raises(laconic.InputError, match=r"'sign.*'qsgd:4'|announces"):
            collective.recv(x, other, "qsgd:4")
    with pytest.raises(laconic.InputError, match="another rank"):
        PointToPoint("qsgd:4").send([("h", torch.ones(3))], rank)
    return results


def test_messages_between_two_ranks(tmp_path):
    results = run_ranks(messages, 2, tmp_path)
    assert len(results[1]) > 100 and all(results[1].values()), {k: v for k, v in results[1].items() if not v}
    assert all(results[0].values()), results[0]


def test_threaded_group_has_no_messages():
    def refused(rank, world):
        with pytest.raises(laconic.ConfigError, match="no send and recv"):
            PointToPoint("qsgd:4")
        return {}

    run_threads(refused, 2)
