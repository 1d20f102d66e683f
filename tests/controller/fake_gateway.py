"""A gateway's admin port: the metrics of revisions, and the pods that a test sets."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class FakeGateway:
    """Use it as a context manager. pods: as /pods lists them."""

    def __init__(self) -> None:
        self.pods: list[dict[str, Any]] = []
        self.restart()
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                pods = json.dumps({"pods": gateway.pods}).encode()
                body = {"/metrics": generate_latest(gateway.registry), "/pods": pods}[self.path]
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True

    def __enter__(self) -> "FakeGateway":
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def port(self) -> int:
        return int(self._http.server_address[1])

    def restart(self) -> None:
        """Reset all counters."""
        self.registry = registry = CollectorRegistry()
        labels = ["model", "revision"]
        prefix = "baton_gateway_"
        self._requests = Counter(prefix + "revision_requests", "", [*labels, "outcome"], registry=registry)
        ttft, tpot = prefix + "revision_time_to_first_token_seconds", prefix + "revision_time_per_output_token_seconds"
        self._ttft = Histogram(ttft, "", labels, buckets=BUCKETS, registry=registry)
        self._tpot = Histogram(tpot, "", labels, buckets=BUCKETS, registry=registry)
        self._waiting = Gauge(prefix + "requests_waiting", "", ["model", "pool"], registry=registry)

    def serve(
        self, revision: str, count: int, errors: int = 0, ttft: float = 0.2, tpot: float = 0.015, model: str = "llama"
    ) -> None:
        """Count requests, of which some fail."""
        self._requests.labels(model, revision, "error").inc(errors)
        self._requests.labels(model, revision, "ok").inc(count - errors)
        for _ in range(count - errors):
            self._ttft.labels(model, revision).observe(ttft)
            self._tpot.labels(model, revision).observe(tpot)

    def wait(self, count: int, model: str = "llama") -> None:
        self._waiting.labels(model, "default").set(count)
