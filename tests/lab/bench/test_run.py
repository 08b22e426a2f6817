from __future__ import annotations

import pytest
import torch

from laconic.codecs import codec
from laconic.errors import ConfigError
from laconic.records import Record
from laconic_lab.bench import SETS, SPECS, Settings, run
from laconic_lab.bench.codec_results import FLOORS
from laconic_lab.bench.codecs import gradient_like
from laconic_lab.bench.peers import PLAIN, Peer, general, message_nbytes, peers_of


def test_report_contains_every_codec_and_its_torch_version() -> None:
    report = run(settings=Settings(numel=5000, repeat=1))
    assert [result.spec for result in report.codecs if result.data == "gaussian"] == list(SPECS)
    assert {peer.of for peer in report.peers if peer.name == PLAIN} == set(SETS["codecs"])
    for result in report.codecs:
        summable = {"sum", "collect"} if result.spec.startswith(("shared", "thc")) else set()
        assert result.timings.keys() - {"encode_2_threads", "decode_2_threads"} == summable | {
            "encode", "encode_kernel", "decode", "decode_kernel", "accumulate", "encode_bytes", "decode_bytes",
        }  # fmt: skip
        assert result.nbytes > 0 and result.small_encode_us > 0
    for record in report.records():
        assert Record.from_json(record.to_json()) == record


def test_thread_count_is_restored() -> None:
    before = torch.get_num_threads()
    run(["none"], Settings(numel=1000, repeat=1, threads=before + 1), with_peers=False)
    assert torch.get_num_threads() == before


def test_progress_ends_at_its_total() -> None:
    seen: list[tuple[str, int, int]] = []
    run(["none"], Settings(numel=1000, repeat=1), with_peers=False, progress=lambda *step: seen.append(step))
    assert seen == [("memory", 0, 2), ("none", 1, 2), ("done", 2, 2)]


@pytest.mark.parametrize("settings", [{"numel": 10}, {"repeat": 0}, {"threads": 0}])
def test_settings_are_checked(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least"):
        Settings(**settings)


def test_command_omits_defaults() -> None:
    assert Settings().command(SPECS) == "laconic bench"
    assert Settings(threads=2).command(["topk:0.1|sign"]) == "laconic bench 'topk:0.1|sign' --threads 2"


def test_goals_name_known_codecs() -> None:
    assert all(codec(spec) for spec in FLOORS)


def test_goals_apply_to_large_tensors_and_one_thread() -> None:
    assert Settings().judges() and not Settings(threads=2).judges() and not Settings(numel=1_000_000).judges()


@pytest.mark.filterwarnings("ignore")  # torch deprecates its quantized tensors
@pytest.mark.parametrize("spec", SETS["codecs"])
def test_alternatives_stay_within_their_error(spec: str) -> None:
    x = gradient_like(20_011, 0)
    for peer in peers_of(codec(spec), x.numel()):
        message = peer.encode(x)
        assert message_nbytes(message) > 0
        if peer.decode is not None:
            y = peer.decode(message)
            assert y.shape == x.shape and y.dtype == x.dtype
            assert float((x - y).square().sum() / x.square().sum()) <= peer.max_error


def test_lossless_tools_are_lossless() -> None:
    x = gradient_like(5000, 0)
    for peer in general(x.numel()):
        assert peer.decode is not None and torch.equal(peer.decode(peer.encode(x)), x)


def test_wrong_alternative_raises_wrong_result_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from laconic_lab.bench import peers
    from laconic_lab.bench.checks import WrongResultError

    monkeypatch.setattr(peers, "peers_of", lambda chain, n: [Peer("zeros", lambda x: x, torch.zeros_like, 0.5)])
    with pytest.raises(WrongResultError, match="zeros beside none"):
        run(["none"], Settings(numel=1000, repeat=1))
