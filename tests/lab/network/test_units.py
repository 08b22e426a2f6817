from __future__ import annotations

import subprocess
import sys

import pytest
from alone import ALONE

from laconic.errors import ConfigError
from laconic.units import parse_rate, parse_time, queue_time, shaper_burst, show_rate, show_time
from laconic_lab.network import Host, Lab, Link, state, tools


@pytest.mark.parametrize("text, bits", [("100mbit", 1e8), ("1gbit", 1e9), ("1.5 Mbit", 1.5e6), ("64kbit", 64e3)])
def test_parse_rate(text, bits):
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", [
    "", "fast", "100", "100mb", "-1mbit", "1e9bit", "nanmbit", "0mbit", "7kbit", "9" * 400 + "bit", "9" * 30 + "mbit",
])  # fmt: skip
def test_invalid_rate_raises_config_error(text):
    with pytest.raises(ConfigError, match="a rate"):
        Host(rate=text)


@pytest.mark.parametrize("text, seconds", [("5ms", 0.005), ("250us", 0.00025), ("1s", 1.0), ("0", 0.0), ("0ms", 0.0)])
def test_parse_time(text, seconds):
    assert parse_time(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "-5ms", "5m", "soon", "9" * 400 + "s"])
def test_invalid_time_raises_config_error(text):
    with pytest.raises(ConfigError, match="a time"):
        Host(delay=text)


@pytest.mark.parametrize("percent", [-0.1, 100.1, float("nan")])
def test_loss_and_corruption_outside_percent_raise_config_error(percent):
    with pytest.raises(ConfigError, match="loss must be a percentage"):
        Host(loss=percent)
    with pytest.raises(ConfigError, match="corrupt must be a percentage"):
        Host(corrupt=percent)


def test_shaper_burst_and_queue_time():
    assert [shaper_burst(rate) // 1024 for rate in (10e6, 100e6, 1e9)] == [32, 64, 256]
    assert [queue_time(rate) for rate in (10e6, 100e6, 1e9)] == [0.4, 0.05, 0.05]


def test_show_rate_and_show_time():
    assert [show_rate(rate) for rate in (1e9, 95.6e6, 8e3, None)] == [
        "1 Gbit/s", "95.6 Mbit/s", "8 kbit/s", "unlimited",
    ]  # fmt: skip
    assert [show_time(seconds) for seconds in (0.02, 1.5)] == ["20 ms", "1.5 s"]


@pytest.mark.parametrize(
    "goodput, valid", [(95.6e6, True), (90.0e6, True), (101.0e6, True), (89.0e6, False), (0, False)]
)
def test_link_is_valid_within_tolerance(goodput, valid):
    link = Link(rate=100e6, goodput=goodput, round_trip=0.001, congestion="bbr")
    assert link.valid is valid and link.values()["valid"] is valid
    assert ("not the requested" in str(link)) is not valid
    assert Link(rate=None, goodput=goodput, round_trip=0.001, congestion="bbr").valid


@pytest.mark.parametrize("name", ["", "-a", "A", "a b", "../a", "a" * 33])
def test_invalid_lab_name_raises_config_error(name):
    with pytest.raises(ConfigError, match="name"):
        Lab(name, [Host()])


@pytest.mark.parametrize("count", [0, 251])
def test_number_of_hosts_is_limited(count):
    with pytest.raises(ConfigError, match="1 to 250 hosts"):
        Lab("a", [Host()] * count)


def test_lab_without_root_raises_config_error(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr(tools.shutil, "which", lambda program, path=None: f"/sbin/{program}")
    with pytest.raises(ConfigError, match=r"need root.*laconic_lab.network.paced_proxy"):
        Lab("a", [Host()]).up()


@pytest.mark.parametrize("program, package", [("ip", "iproute2"), ("tc", "iproute2"), ("nft", "nftables")])
def test_missing_program_is_named_with_its_package(monkeypatch, program, package):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(tools.shutil, "which", lambda name, path=None: None if name == program else f"/sbin/{name}")
    with pytest.raises(ConfigError, match=f"'{program}' is missing.*{package}"):
        Lab("a", [Host(loss=1.0)]).up()


def test_state_folder_of_another_user_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(state.tempfile, "gettempdir", lambda: str(tmp_path))
    assert state.known() == []
    state.claim("a", owner=None, congestion=None, hosts=[{"rate": "1mbit"}])
    assert state.known() == ["a"] and state.load("a")["hosts"] == [Host(rate="1mbit")]
    with pytest.raises(ConfigError, match="lab 'a' exists already"):
        state.claim("a")
    (tmp_path / "laconic-lab" / "b.json").write_text('{"hosts": 3}')
    with pytest.raises(OSError, match="cannot be read"):
        state.load("b")
    (tmp_path / "laconic-lab").chmod(0o777)
    with pytest.raises(OSError, match="others may write"):
        state.load("a")


def test_network_package_imports_nothing_heavy():
    code = """
import laconic_lab.network, laconic.link_probe
from laconic_lab.network import delay_relay, paced_proxy, paced_proxy_process
found = {name if name.startswith("laconic.") else name.split(".")[0] for name in sys.modules}
found = {name for name in found - set(sys.stdlib_module_names) if not name.startswith("laconic_lab.network")}
print(sorted(found - {"laconic", "laconic.errors", "laconic.link_probe", "laconic.units", "laconic_lab", "__main__"}))
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", ALONE + code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
