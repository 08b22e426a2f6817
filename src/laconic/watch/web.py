"""A run's status as a page on this host, and its Prometheus metrics.

The server listens on loopback only and answers only to its own host names, so that no other site can read it through a
name that points here (DNS rebinding). The page shows the folder's texts as text, never as markup.
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
from laconic.watch.view import View

__all__ = ["WatchServer", "check_loopback", "split_address"]

log = logging.getLogger("laconic")

TEXT = "text/plain; charset=utf-8"
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
    """Parse ``HOST:PORT``. The host must be a loopback address; port 0 takes a free port."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{option} must be HOST:PORT, such as 127.0.0.1:9090, got {text!r}")
    host = host.removeprefix("[").removesuffix("]")
    check_loopback(host, option=option)
    return host, int(port)


def check_loopback(host: str, *, option: str) -> None:
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            f"{option} must be a loopback address such as 127.0.0.1, got {host!r}: use ssh -L from other hosts"
        )


class WatchServer:
    """Serves a run's page until it is closed.

    Args:
        read_view: Returns the status of the run.
        host: A loopback address.
        port: 0 takes a free port (see ``port``).
        page: Whether to serve the page, or only ``/metrics``.
    """

    def __init__(
        self, read_view: Callable[[], View], host: str = "127.0.0.1", port: int = 0, *, page: bool = True
    ) -> None:
        check_loopback(host, option="the page")
        self._read_view, self._page = read_view, page
        self._lock = threading.Lock()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server_class = type("_Server", (_Server,), {"address_family": family})
        try:
            self._server: ThreadingHTTPServer = server_class((host, port), self._handler())
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}): choose another port") from None
        self.port = int(self._server.server_address[1])
        url_host = f"[{host}]" if ":" in host else host
        self.url = f"http://{url_host}:{self.port}/"
        self.host_names = frozenset(f"{name}:{self.port}" for name in (url_host, "localhost", "127.0.0.1", "[::1]"))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="laconic-web", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def __enter__(self) -> WatchServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def response(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        """Return status, content type and body."""
        if path == "/metrics":
            from laconic.watch.metrics import CONTENT_TYPE, metrics

            try:
                return HTTPStatus.OK, CONTENT_TYPE, metrics(self.view())
            except ConfigError as error:  # prometheus_client is not installed
                return HTTPStatus.NOT_IMPLEMENTED, TEXT, f"{error}\n".encode()
        if self._page and path == "/status":
            text = json.dumps(self.view().to_json(), allow_nan=False)
            return HTTPStatus.OK, "application/json", text.encode()
        if self._page and path in PAGE:
            name, kind = PAGE[path]
            return HTTPStatus.OK, kind, (files("laconic.watch") / "page" / name).read_bytes()
        return HTTPStatus.NOT_FOUND, TEXT, b"not found\n"

    def view(self) -> View:
        with self._lock:  # a watcher reads on from its last position
            return self._read_view()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            server_version, sys_version = "laconic", ""
            timeout = 10  # a silent client must not hold a thread

            def do_GET(self) -> None:
                if (self.headers.get("Host") or "").lower() not in server.host_names:
                    self._send(HTTPStatus.MISDIRECTED_REQUEST, TEXT, b"unknown host name\n")
                    return
                try:
                    self._send(*server.response(self.path.partition("?")[0]))
                except (BrokenPipeError, ConnectionResetError):
                    return
                except Exception as error:
                    log.exception("cannot serve %s", self.path)
                    self._send(HTTPStatus.INTERNAL_SERVER_ERROR, TEXT, f"{error}\n".encode())

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
        log.debug("a client of the page disconnected")
