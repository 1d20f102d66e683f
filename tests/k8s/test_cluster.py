"""How the end-to-end tests send requests through the API server, tested with a fake one."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from kubernetes.config import kube_config

from . import cluster as module
from .cluster import Cluster

STREAM = b'data: {"choices": [{"delta": {"content": "hello"}}]}\n\ndata: [DONE]\n\n'
PODS = [
    {"role": "prefill", "revision": "stable", "dispatched": 9},
    {"role": "decode", "revision": "stable", "dispatched": 2},
    {"role": "decode", "revision": "stable", "dispatched": 3},
    {"role": "decode", "revision": "next", "dispatched": 4},
]


class Proxy:
    """Use it as a context manager. statuses: of the next answers; 200 after these. closes: answers end connections."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.closes = False
        self.connections = 0
        self.requests = 0
        self.late_requests = 0
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                proxy.connections += 1
                self.announced = False

            def do_GET(self) -> None:
                self.answer(json.dumps({"pods": PODS}).encode())

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.answer(STREAM)

            def answer(self, body: bytes) -> None:
                proxy.requests += 1
                proxy.late_requests += self.announced
                status = proxy.statuses.pop(0) if proxy.statuses else 200
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                if proxy.closes:
                    self.send_header("connection", "close")
                    self.announced = True
                    self.close_connection = False  # so that a client that ignores this is detected
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"


@pytest.fixture
def proxy(processes: None) -> Iterator[Proxy]:
    with Proxy() as proxy:
        yield proxy


@pytest.fixture
def cluster(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": proxy.url}}],
        "users": [{"name": "c", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
    }
    (tmp_path / "config").write_text(json.dumps(config))  # YAML is a superset of JSON
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    cluster = Cluster("default")
    yield cluster
    cluster.http.close()


def test_an_error_of_the_proxy_is_asked_again(cluster: Cluster, proxy: Proxy) -> None:
    proxy.statuses = [503, 502]
    assert cluster.dispatched() == {"stable": 5, "next": 4}
    assert proxy.requests == 3


def test_an_error_that_stays_is_raised(cluster: Cluster, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROXY_S", 0.3)
    proxy.statuses = [503] * 100
    with pytest.raises(httpx.HTTPStatusError):
        cluster.dispatched()
    proxy.statuses = [404]
    asked = proxy.requests
    with pytest.raises(httpx.HTTPStatusError):
        cluster.dispatched()
    assert proxy.requests == asked + 1, "an answer of the gateway was asked for again"


def test_the_load_is_never_asked_again(cluster: Cluster, proxy: Proxy) -> None:
    proxy.statuses = [503]
    with pytest.raises(RuntimeError, match="503"):
        cluster.ask("hi")
    assert cluster.ask("hi") == "hello"


def test_no_request_follows_where_the_server_closes(cluster: Cluster, proxy: Proxy) -> None:
    assert [cluster.ask("hi") for _ in range(3)] == ["hello"] * 3
    assert proxy.connections == 1
    proxy.closes = True
    assert [cluster.ask("hi") for _ in range(3)] == ["hello"] * 3
    assert proxy.late_requests == 0
    assert proxy.connections == 3  # the first such answer still comes on the old connection
