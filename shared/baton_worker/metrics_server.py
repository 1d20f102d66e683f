"""Serves metrics over HTTP, beside the event loop."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry

from baton_common.exposition import exposition


class MetricsServer(ThreadingHTTPServer):
    """Listens from the start on, and serves in a thread that ends with the process."""

    daemon_threads = True

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """port: 0 = any free one. Raises OSError."""
        self.registry = registry
        self.address_family, *_, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        super().__init__((str(address[0]), port), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer

    def do_GET(self) -> None:
        body, content_type = exposition(self.server.registry, self.headers.get("accept"))
        self.send_response(200)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Leave scrapes out of the log."""
