"""Formats of metrics."""

import pytest
from prometheus_client import CollectorRegistry, Histogram

from baton_common.exposition import exemplar, exposition

PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,*/*;q=0.1"
)


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    histogram = Histogram("vllm:ttft_seconds", "TTFT.", registry=registry, buckets=(1, 2))
    histogram.observe(0.5, exemplar("abc"))
    histogram.observe(1.5, exemplar(None))
    return registry


@pytest.mark.parametrize("accept", [PROMETHEUS_2, PROMETHEUS_3])
def test_openmetrics_has_exemplars_and_colons(registry, accept):
    text, content_type = exposition(registry, accept)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    lines = text.decode().splitlines()
    assert lines[-1] == "# EOF"
    first, second = (line for line in lines if line.startswith("vllm:ttft_seconds_bucket") and "+Inf" not in line)
    assert first.startswith('vllm:ttft_seconds_bucket{le="1.0"} 1.0 # {trace_id="abc"} 0.5 ')
    assert second == 'vllm:ttft_seconds_bucket{le="2.0"} 2.0'


@pytest.mark.parametrize("accept", [None, "*/*", "text/plain;version=0.0.4"])
def test_text_has_none(registry, accept):
    text, content_type = exposition(registry, accept)
    assert content_type.startswith("text/plain; version=0.0.4")
    assert b'vllm:ttft_seconds_bucket{le="1.0"} 1.0\n' in text
    assert b"abc" not in text
