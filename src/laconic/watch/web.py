"""A run as a page on this host that keeps itself up to date, and its metrics.

Nobody else is served: it listens on loopback only, and answers only to its own names, so that no other page can read it
through a name that it has pointed here (DNS rebinding). What a run's folder says is data to the page, never markup.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from laconic.errors import ConfigError
from laconic.watch.metrics import CONTENT_TYPE, metrics
from laconic.watch.view import View

__all__ = ["Site", "check_loopback", "split_address"]

log = logging.getLogger("laconic")

PAGE = {
    "/": ("watch.html", "text/html; charset=utf-8"),
    "/watch.css": ("watch.css", "text/css; charset=utf-8"),
    "/watch.js": ("watch.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def split_address(text: str, *, option: str) -> tuple[str, int]:
    """``HOST:PORT``, where port 0 takes a free one; only loopback is allowed."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{option} must be HOST:PORT, such as 127.0.0.1:9090, got {text!r}")
    host = host.removeprefix("[").removesuffix("]")
    check_loopback(host, option=option)
    return host, int(port)


def check_loopback(host: str, *, option: str) -> None:
    try:
        fine = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        fine = False
    if not fine:
        raise ConfigError(
            f"{option} takes an address of this host's own loopback, such as 127.0.0.1, got {host!r}: from elsewhere "
            "come by ssh -L"
        )


class Site:
    """Serves until it is closed.

    Args:
        look: How the run is now.
        host: An address of loopback.
        port: 0 takes a free one (see ``port``).
        page: Whether there is a page, or only ``/metrics``.
    """

    def __init__(self, look: Callable[[], View], host: str = "127.0.0.1", port: int = 0, *, page: bool = True) -> None:
        check_loopback(host, option="the page")
        self._look, self._page = look, page
        self._lock = threading.Lock()
        server = type("_Server", (_Server,), {"address_family": socket.AF_INET6 if ":" in host else socket.AF_INET})
        try:
            self._server: ThreadingHTTPServer = server((host, port), self._handler())
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}): choose another port") from None
        self.port = int(self._server.server_address[1])
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.port}/"
        self.names = frozenset(f"{name}:{self.port}" for name in (shown, "localhost", "127.0.0.1", "[::1]"))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="laconic-web", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        """Status, content type and body."""
        if path == "/metrics":
            return HTTPStatus.OK, CONTENT_TYPE, metrics(self.look()).encode()
        if self._page and path == "/status":
            text = json.dumps(self.look().to_json(), allow_nan=False)
            return HTTPStatus.OK, "application/json", text.encode()
        if self._page and path in PAGE:
            name, kind = PAGE[path]
            return HTTPStatus.OK, kind, (files("laconic.watch") / "page" / name).read_bytes()
        return HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"nothing is here\n"

    def look(self) -> View:
        with self._lock:  # it reads on from where it was
            return self._look()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        site = self

        class Handler(BaseHTTPRequestHandler):
            server_version, sys_version = "laconic", ""
            timeout = 10  # who says nothing holds a thread for nobody

            def do_GET(self) -> None:
                if (self.headers.get("Host") or "").lower() not in site.names:
                    self._send(HTTPStatus.MISDIRECTED_REQUEST, "text/plain; charset=utf-8", b"not under this name\n")
                    return
                try:
                    self._send(*site.answer(self.path.partition("?")[0]))
                except (BrokenPipeError, ConnectionResetError):
                    return
                except Exception as error:
                    log.exception("the page failed")
                    self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", f"{error}\n".encode())

            do_HEAD = do_GET  # noqa: N815 - http.server's name

            def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
                self.send_response(status)
                for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
                log.debug(format, *args)

        return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a visitor of the page broke off")
