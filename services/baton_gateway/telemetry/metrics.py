"""Prometheus metrics of the gateway. A client cannot add values to labels, so their number stays small."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

from baton_common.buckets import E2E_BUCKETS, ITL_BUCKETS, TTFT_BUCKETS
from baton_common.exposition import exemplar

from ..concurrency.background import FAILURES
from ..tenancy.quota import Quota
from ..tenancy.tenants import Tenants
from .gateway_registry import GatewayRegistry
from .record import RequestRecord
from .tenant_metrics import TenantMetrics

if TYPE_CHECKING:
    from .genai_metrics import GenAiMetrics

_MODEL = ("model",)


class Metrics:
    """All metrics of one gateway, in a registry of their own."""

    def __init__(
        self, models: Iterable[str], tenants: Tenants, quota: Quota, genai: "GenAiMetrics | None" = None
    ) -> None:
        """models: names of all models. genai: is also given every request that has ended."""
        self._genai = genai
        self.registry = GatewayRegistry()
        registry = self.registry
        prefix = "baton_gateway_"
        self._requests = Counter(prefix + "requests", "HTTP requests.", ["route", "status"], registry=registry)
        self.in_flight = Gauge(prefix + "requests_in_flight", "HTTP requests being answered.", registry=registry)
        self.draining = Gauge(prefix + "draining", "1 once the gateway has been told to end.", registry=registry)
        self._broken = Counter(
            prefix + "broken_streams", "Answers that ended by an error after they had begun.", _MODEL, registry=registry
        )
        self._queue = Histogram(
            prefix + "queue_seconds",
            "How long requests waited for admission.",
            _MODEL,
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self._refusals = Counter(
            prefix + "refused_requests", "Requests refused with 429 or 503.", ["reason", "tenant"], registry=registry
        )
        self._ttft = Histogram(
            prefix + "time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            _MODEL,
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self.inter_token = Histogram(
            prefix + "inter_token_latency_seconds",
            "Between the arrivals of tokens of a request.",
            _MODEL,
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
            "The parts of the time to the first token.",
            [*_MODEL, "part"],
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self._prefills = Counter(
            prefix + "prefills", "Prompts by the kind of pod that computed them.", [*_MODEL, "by"], registry=registry
        )
        self._prompt_tokens = Counter(prefix + "prompt_tokens", "Tokens of prompts.", _MODEL, registry=registry)
        self._cached_tokens = Counter(
            prefix + "cached_prompt_tokens", "Tokens of prompts that no pod had to compute.", _MODEL, registry=registry
        )
        self._generation_tokens = Counter(prefix + "generation_tokens", "Tokens generated.", _MODEL, registry=registry)
        self._retries = Counter(
            prefix + "retries", "Prompts sent to another decode pod before any token.", registry=registry
        )
        self._resumes = Counter(
            prefix + "resumed_streams", "Choices continued on another decode pod.", registry=registry
        )
        registry.register(FAILURES)
        self._tenants = TenantMetrics(tenants, quota, registry)
        self._begin_at_zero(models)

    def finished(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self._requests.labels(record.route, str(record.status)).inc()
        self._e2e.labels(record.route).observe(time.monotonic() - record.started)
        self._tenants.finished(record)
        if self._genai is not None:
            self._genai.finished(record)
        if record.status in (429, 503) and record.identity is not None:
            self._refusals.labels(record.error or "", record.identity.name).inc()
        self._retries.inc(record.retries)
        self._resumes.inc(record.resumes)
        if record.model is not None:
            self._finished(record.model, record)

    def _finished(self, model: str, record: RequestRecord) -> None:
        if record.status == 200 and record.error is not None:
            self._broken.labels(model).inc()
        if record.queued_s is not None:
            self._queue.labels(model).observe(record.queued_s)
        if record.first_token is not None:
            self._ttft.labels(model).observe(record.first_token - record.started, exemplar(record.trace_id))
            for part, seconds in record.ttft_parts().items():
                self._parts.labels(model, part).observe(seconds)
        for by, count in record.prefills.items():
            self._prefills.labels(model, by).inc(count)
        self._prompt_tokens.labels(model).inc(record.prompt_tokens)
        self._cached_tokens.labels(model).inc(record.cached_tokens)
        self._generation_tokens.labels(model).inc(record.completion_tokens)

    def _begin_at_zero(self, models: Iterable[str]) -> None:
        """Create the counters at 0: Prometheus would miss the increase of a counter whose first sample is 1."""
        for model in models:
            for counter in (self._broken, self._prompt_tokens, self._cached_tokens, self._generation_tokens):
                counter.labels(model)
            for by in ("prefill", "decode"):
                self._prefills.labels(model, by)
