from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from run_folders import Folder, server

from laconic.errors import ConfigError
from laconic.watch.web import WatchServer, check_loopback, split_address

NEEDS_PROMETHEUS = pytest.mark.skipif(find_spec("prometheus_client") is None, reason="no prometheus_client")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path / "run")
    folder.config()
    folder.status(server(at=1.0, version=3))
    return folder


@pytest.fixture
def site(folder: Folder) -> Iterator[WatchServer]:
    with WatchServer(folder.watcher().view) as site:
        yield site


def request(
    site: WatchServer, path: str, *, host: str | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    if host != "":
        connection.putheader("Host", host or f"127.0.0.1:{site.port}")
    connection.endheaders()
    response = connection.getresponse()
    result = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return result


@pytest.mark.parametrize("path, kind, words", [
    ("/", "text/html", b"<title>laconic watch</title>"), ("/watch.js", "text/javascript", b"textContent"),
    ("/watch.css", "text/css", b"prefers-color-scheme: dark"), ("/icon.svg", "image/svg+xml", b"<svg"),
    ("/status", "application/json", b'"version": 3'),
    pytest.param("/metrics", "text/plain; version=0.0.4", b"laconic_rounds_total", marks=NEEDS_PROMETHEUS),
])  # fmt: skip
def test_page_is_served_with_strict_headers(site: WatchServer, path: str, kind: str, words: bytes) -> None:
    status, headers, body = request(site, path)
    assert status == 200 and headers["Content-Type"].startswith(kind) and words in body
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers
    assert request(site, path, method="HEAD")[2] == b""


def test_page_has_no_inline_script_or_style(site: WatchServer) -> None:
    page = request(site, "/")[2].decode()
    assert "style=" not in page and "onclick" not in page and "http:" not in page and "https:" not in page
    assert page.count("<script") == page.count("<script src=") == 1 and "<style" not in page
    assert "innerHTML" not in request(site, "/watch.js")[2].decode()


@pytest.mark.parametrize("path", ["/../status.json", "/%2e%2e/status.json", "/config.json", "/watch.html"])
def test_other_paths_are_not_found(site: WatchServer, path: str) -> None:
    assert request(site, path)[0] == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "", "localhost:{port}.evil"]
)
def test_foreign_host_names_are_rejected(site: WatchServer, host: str) -> None:
    for path in ("/", "/status", "/metrics"):
        status, _, body = request(site, path, host=host.format(port=site.port))
        assert status == 421 and b"version" not in body and b"laconic_" not in body
    assert request(site, "/status", host=f"localhost:{site.port}")[0] == 200


def test_other_methods_are_rejected(site: WatchServer) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert request(site, "/status", method=method)[0] == 501


def test_only_loopback_addresses_are_allowed(folder: Folder) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org", ""):
        with pytest.raises(ConfigError, match="loopback"):
            WatchServer(folder.view, host)
        with pytest.raises(ConfigError, match="loopback"):
            check_loopback(host, option="--host")
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        check_loopback(host, option="--host")


def test_port_in_use_raises_config_error(folder: Folder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            WatchServer(folder.view, "127.0.0.1", port)


def test_without_page_only_metrics_are_served(folder: Folder) -> None:
    with WatchServer(folder.watcher().view, page=False) as site:
        assert request(site, "/metrics")[0] in (200, 501)
        assert [request(site, path)[0] for path in ("/", "/status", "/watch.js")] == [404, 404, 404]


def test_metrics_without_prometheus_client_say_what_to_install(
    site: WatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laconic.watch.metrics.find_spec", lambda name: None)
    status, _, body = request(site, "/metrics")
    assert status == 501 and b"pip install 'laconic[watch]'" in body


def test_status_follows_the_run(site: WatchServer, folder: Folder) -> None:
    folder.status(server(at=2.0, version=4))
    assert json.loads(request(site, "/status")[2])["version"] == 4


@pytest.mark.parametrize("text", ["9464", ":9464", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000", "0.0.0.0:9464"])
def test_invalid_address_raises_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="--metrics"):
        split_address(text, option="--metrics")
    assert split_address("127.0.0.1:0", option="--metrics") == ("127.0.0.1", 0)
    assert split_address("[::1]:9464", option="--metrics") == ("::1", 9464)
