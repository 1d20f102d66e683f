"""The port for operators: /metrics, /live and /ready."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest


class AdminServer:
    """An HTTP server that runs in its own thread."""

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, live: Callable[[], bool], ready: Callable[[], bool]
    ) -> None:
        """Raises OSError when the address cannot be bound."""

        class Handler(_Handler):
            probes = {"/live": live, "/ready": ready}
            metrics = registry

        class Server(ThreadingHTTPServer):
            address_family = AF_INET6 if ":" in host else AF_INET
            daemon_threads = True

        self._http = Server((host, port), Handler)

    @property
    def port(self) -> int:
        return int(self._http.server_address[1])

    def start(self) -> None:
        threading.Thread(target=self._http.serve_forever, name="admin", daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    timeout = 10
    probes: dict[str, Callable[[], bool]]
    metrics: CollectorRegistry

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, generate_latest(self.metrics), CONTENT_TYPE_LATEST)
        elif path in self.probes:
            self._answer(200 if self.probes[path]() else 503)
        else:
            self._answer(404)

    def _answer(self, status: int, body: bytes = b"", kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...
