"""Serves metrics and probes over HTTP, in threads beside the event loop."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry

from baton_common.exposition import exposition

_LOOP_TIMEOUT_S = 10.0


class MetricsServer(ThreadingHTTPServer):
    """Listens as soon as it is created, and serves in a thread that ends with the process."""

    daemon_threads = True

    def __init__(self, registry: CollectorRegistry, host: str, port: int, ready: Callable[[], bool]) -> None:
        """port: 0 = any free port. ready: whether the worker takes work; called in the event loop. Raises OSError."""
        self.registry = registry
        self._ready = ready
        self._loop = asyncio.get_running_loop()
        self.address_family, *_, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        super().__init__((str(address[0]), port), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def probe(self, path: str) -> bool:
        """Return the answer to /live, which is whether the event loop still runs, or to /ready."""

        async def ask() -> bool:
            return path == "/live" or self._ready()

        try:
            return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(_LOOP_TIMEOUT_S)
        except TimeoutError:
            return False


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer

    def do_GET(self) -> None:
        if self.path in ("/live", "/ready"):
            self._answer(200 if self.server.probe(self.path) else 503, "text/plain", b"")
            return
        body, content_type = exposition(self.server.registry, self.headers.get("accept"))
        self._answer(200, content_type, body)

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        # A client may leave before it has read the answer, which is not an error.
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because each scrape would add a line."""
