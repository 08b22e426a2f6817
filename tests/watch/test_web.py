from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import Folder, server

from laconic.errors import ConfigError
from laconic.watch.web import Site, check_loopback, split_address


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "run")
    made.config()
    made.status(server(at=1.0, version=3))
    return made


@pytest.fixture
def site(folder: Folder) -> Iterator[Site]:
    with Site(folder.watcher().look) as made:
        yield made


def ask(site: Site, path: str, *, host: str | None = None, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    if host != "":
        connection.putheader("Host", host or f"127.0.0.1:{site.port}")
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


@pytest.mark.parametrize(
    "path, kind, words",
    [
        ("/", "text/html", b"<title>laconic watch</title>"),
        ("/watch.js", "text/javascript", b"textContent"),
        ("/watch.css", "text/css", b"prefers-color-scheme: dark"),
        ("/icon.svg", "image/svg+xml", b"<svg"),
        ("/status", "application/json", b'"version": 3'),
        ("/metrics", "text/plain; version=0.0.4", b"laconic_rounds_total"),
    ],
)
def test_what_there_is(site: Site, path: str, kind: str, words: bytes) -> None:
    status, headers, body = ask(site, path)
    assert status == 200 and headers["Content-Type"].startswith(kind) and words in body
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers
    assert ask(site, path, method="HEAD")[2] == b""


def test_the_page_has_nothing_inline(site: Site) -> None:
    """What its policy would not allow, anyway."""
    page = ask(site, "/")[2].decode()
    assert "style=" not in page and "onclick" not in page and "http:" not in page and "https:" not in page
    assert page.count("<script") == page.count("<script src=") == 1 and "<style" not in page
    assert "innerHTML" not in ask(site, "/watch.js")[2].decode()


@pytest.mark.parametrize("path", ["/../status.json", "/%2e%2e/status.json", "/config.json", "/watch.html"])
def test_nothing_else_is_there(site: Site, path: str) -> None:
    assert ask(site, path)[0] == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "", "localhost:{port}.evil"]
)
def test_it_answers_to_its_own_names_only(site: Site, host: str) -> None:
    for path in ("/", "/status", "/metrics"):
        status, _, body = ask(site, path, host=host.format(port=site.port))
        assert status == 421 and b"version" not in body and b"laconic_" not in body
    assert ask(site, "/status", host=f"localhost:{site.port}")[0] == 200


def test_it_only_tells(site: Site) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(site, "/status", method=method)[0] == 501


def test_only_loopback(folder: Folder) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org", ""):
        with pytest.raises(ConfigError, match="loopback"):
            Site(folder.look, host)
        with pytest.raises(ConfigError, match="loopback"):
            check_loopback(host, option="--host")
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        check_loopback(host, option="--host")


def test_a_port_that_is_taken(folder: Folder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            Site(folder.look, "127.0.0.1", port)


def test_only_metrics_where_there_is_no_page(folder: Folder) -> None:
    with Site(folder.watcher().look, page=False) as site:
        assert ask(site, "/metrics")[0] == 200
        assert [ask(site, path)[0] for path in ("/", "/status", "/watch.js")] == [404, 404, 404]


def test_a_run_that_goes_on_is_seen_to(site: Site, folder: Folder) -> None:
    folder.status(server(at=2.0, version=4))
    assert json.loads(ask(site, "/status")[2])["version"] == 4


@pytest.mark.parametrize("text", ["9464", ":9464", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000", "0.0.0.0:9464"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--metrics"):
        split_address(text, option="--metrics")
    assert split_address("127.0.0.1:0", option="--metrics") == ("127.0.0.1", 0)
    assert split_address("[::1]:9464", option="--metrics") == ("::1", 9464)
