"""Prometheus metrics of the gateway. Labels take few values: a client cannot make new ones."""

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton_common.buckets import E2E_BUCKETS, ITL_BUCKETS, TTFT_BUCKETS
from baton_gateway.catalog import Catalog
from baton_gateway.record import RequestRecord


class Metrics:
    """All metrics of one gateway, in a registry of their own."""

    def __init__(self, catalog: Catalog) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        prefix = "baton_gateway_"
        self._requests = Counter(prefix + "requests", "HTTP requests.", ["route", "status"], registry=registry)
        self.in_flight = Gauge(prefix + "requests_in_flight", "HTTP requests being answered.", registry=registry)
        self._queue = Histogram(
            prefix + "queue_seconds",
            "How long requests waited for their turn.",
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self._refusals = Counter(
            prefix + "refused_requests", "Requests refused with 429 or 503.", ["reason", "tenant"], registry=registry
        )
        self._ttft = Histogram(
            prefix + "time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self.inter_token = Histogram(
            prefix + "inter_token_latency_seconds",
            "Between the arrivals of tokens of a request.",
            buckets=ITL_BUCKETS,
            registry=registry,
        )
        self._e2e = Histogram(
            prefix + "e2e_request_latency_seconds",
            "From a request's arrival to its end.",
            ["route"],
            buckets=E2E_BUCKETS,
            registry=registry,
        )
        self._parts = Histogram(
            prefix + "ttft_part_seconds",
            "What the time to the first token is made of.",
            ["part"],
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self._prefills = Counter(
            prefix + "prefills", "Prompts by the kind of pod that computed them.", ["by"], registry=registry
        )
        self._prompt_tokens = Counter(prefix + "prompt_tokens", "Tokens of prompts.", registry=registry)
        self._cached_tokens = Counter(
            prefix + "cached_prompt_tokens", "Tokens of prompts that no pod had to compute.", registry=registry
        )
        self._generation_tokens = Counter(prefix + "generation_tokens", "Tokens generated.", registry=registry)
        self._retries = Counter(
            prefix + "retries", "Prompts sent to another decode pod before any token.", registry=registry
        )
        self._resumes = Counter(
            prefix + "resumed_streams", "Choices continued on another decode pod.", registry=registry
        )
        registry.register(_Pools(catalog))
        catalog.revisions.register(registry)

    def finished(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self._requests.labels(record.route, str(record.status)).inc()
        self._e2e.labels(record.route).observe(time.monotonic() - record.started)
        if record.queued_s is not None:
            self._queue.observe(record.queued_s)
        if record.status in (429, 503) and record.identity is not None:
            self._refusals.labels(record.error or "", record.identity.name).inc()
        if record.first_token is not None:
            self._ttft.observe(record.first_token - record.started)
            for part, seconds in record.ttft_parts().items():
                self._parts.labels(part).observe(seconds)
        for by, count in record.prefills.items():
            self._prefills.labels(by).inc(count)
        self._prompt_tokens.inc(record.prompt_tokens)
        self._cached_tokens.inc(record.cached_tokens)
        self._generation_tokens.inc(record.completion_tokens)
        self._retries.inc(record.retries)
        self._resumes.inc(record.resumes)


class _Pools(Collector):
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def collect(self) -> Iterable[Metric]:
        labels = ["model", "pool"]
        waiting = GaugeMetricFamily(
            "baton_gateway_requests_waiting", "Requests that wait for their turn.", labels=labels
        )
        live = GaugeMetricFamily("baton_gateway_live_pods", "Pods that take requests.", labels=[*labels, "role"])
        for model, pool in self._catalog.pools:
            waiting.add_metric([model, pool.spec.name], pool.fleet.admission.waiting)
            for role, count in pool.fleet.live_pods().items():
                live.add_metric([model, pool.spec.name, role], count)
        return [waiting, live]
