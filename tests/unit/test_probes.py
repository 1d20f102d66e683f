"""What a worker answers to probes."""

import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry

from baton_worker import metrics_server
from baton_worker.metrics_server import MetricsServer

pytestmark = pytest.mark.processes


async def test_a_hanging_event_loop_is_not_live(monkeypatch: pytest.MonkeyPatch):
    """Though the thread that answers is."""
    monkeypatch.setattr(metrics_server, "_LOOP_TIMEOUT_S", 0.2)
    with MetricsServer(CollectorRegistry(), "127.0.0.1", 0, lambda: True) as server, ThreadPoolExecutor() as threads:
        url = f"http://127.0.0.1:{server.server_port}/live"
        asking = threads.submit(urllib.request.urlopen, url, timeout=10)
        time.sleep(1)  # noqa: ASYNC251
        with pytest.raises(urllib.error.HTTPError, match="503"):
            asking.result()
        server.shutdown()
